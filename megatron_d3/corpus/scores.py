"""Scores beside a corpus: `<prefix>.scores.npy`, one float64 a document, and a small JSON.

    web.scores.npy     (D,) float64, or (M, D) for M scores; row m belongs to names[m]
    web.scores.json    {"version": 1, "names": ["quality"], "num_documents": D, "index": "<hash>"}

The hash is that of the `.idx` the scores were made for, so that scores of another corpus are
refused. A `.npy` from elsewhere needs no JSON; only its length can be checked then.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np

from megatron_d3.corpus.index import Index
from megatron_d3.corpus.rewrite import BLOCK
from megatron_d3.errors import CorpusError

VERSION = 1
SUFFIXES = (".scores.npy", ".scores.json")


@dataclass(frozen=True, eq=False)
class Scores:
    """A score file, memory-mapped.

    Attributes:
        path: the `.npy`.
        values: (M, D) float64, a row a score.
        names: M names; ("score",) where there is no JSON.
        index: hash of the `.idx` they belong to, or None if not known.
    """

    path: Path
    values: np.ndarray
    names: tuple[str, ...]
    index: str | None

    def row(self, name: str | None) -> np.ndarray:
        """Return one score, (D,) float64.

        Args:
            name: may be None where there is only one.

        Raises:
            CorpusError: an unknown name, or none where there are several.
        """
        if name is None:
            if len(self.names) > 1:
                raise CorpusError(
                    f"{self.path}: holds several scores ({', '.join(self.names)}); choose one with "
                    "--score NAME"
                )
            return self.values[0]
        if name not in self.names:
            close = difflib.get_close_matches(name, self.names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(self.names)}"
            raise CorpusError(f"{self.path}: no score named {name!r}; {hint}")
        return self.values[self.names.index(name)]


def read_scores(
    path: str | Path, *, index: Index | None = None, is_digest_checked: bool = True
) -> Scores:
    """Open a score file and check that it belongs to a corpus.

    Args:
        path: the `.npy`; its JSON lies beside it, `x.scores.npy` -> `x.scores.json`.
        index: the corpus, if there is one to compare with.
        is_digest_checked: also compare its digest; False leaves that to `require_made_for`.

    Raises:
        CorpusError: missing or broken file, wrong dtype or shape, another number of documents,
            or made for another corpus.
    """
    path = Path(path)
    if not path.is_file():
        raise CorpusError(f"{path}: no such file; `megatron-d3 score` makes one")
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise CorpusError(f"{path}: not an .npy file that can be read: {error}") from error
    if not isinstance(values, np.ndarray) or values.ndim not in (1, 2):
        raise CorpusError(f"{path}: expected one score a document, (D,), or several, (M, D)")
    if values.dtype.kind not in "fiu":
        raise CorpusError(f"{path}: got dtype {values.dtype}, expected float64")
    rows = values[np.newaxis] if values.ndim == 1 else values
    names, made_for = _read_json(path, len(rows), rows.shape[1])
    scores = Scores(path, rows, names, made_for)
    if index is not None:
        _check_count(scores, index)
        if is_digest_checked:
            require_made_for(scores, index)
    return scores


def require_made_for(scores: Scores, index: Index) -> None:
    """Raise `CorpusError` if the scores name another corpus, by the digest of its `.idx`."""
    if scores.index is not None and scores.index != index.digest:
        raise CorpusError(
            f"{scores.path}: made for another corpus than {index.prefix} (the hash of the .idx "
            "differs); score this corpus, or remove the .json beside the scores if you are sure"
        )


def join_scores(parts: Sequence[Scores]) -> Scores:
    """Return the scores of several corpora, one after another, as if of one.

    Raises:
        CorpusError: they are not the same scores.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts[1:]:
        if part.names != first.names:
            raise CorpusError(
                f"{part.path}: has {', '.join(part.names)}, but {first.path} has "
                f"{', '.join(first.names)}; corpora ordered as one need the same scores"
            )
    values = np.concatenate([part.values for part in parts], axis=1)
    return Scores(first.path, values, first.names, None)


def score_files(
    values: np.ndarray, *, names: Sequence[str], index: str
) -> tuple[Iterator[np.ndarray | bytes], bytes]:
    """Return the contents of both files, ready to be written: the `.npy` in chunks, and the JSON.

    Args:
        values: (M, D) float64.
        names: M names.
        index: digest of the `.idx` the scores are for.
    """
    return score_chunks(values), score_json(names, num_documents=values.shape[1], index=index)


def score_chunks(
    values: np.ndarray, *, documents: np.ndarray | None = None
) -> Iterator[np.ndarray | bytes]:
    """Yield the bytes of a score file.

    Args:
        values: (M, D) numbers.
        documents: (D',) columns to take, in this order; None: all.
    """
    num_documents = values.shape[1] if documents is None else len(documents)
    shape = (num_documents,) if len(values) == 1 else (len(values), num_documents)
    yield _npy_header(shape, np.dtype(np.float64))
    for row in values:
        if documents is not None:
            row = np.array(row)  # in large pages, from which gathering takes a third of the time
        for start in range(0, num_documents, BLOCK):
            block = slice(start, start + BLOCK)
            chunk = row[block] if documents is None else row.take(documents[block])
            yield np.ascontiguousarray(chunk, dtype="<f8")


def score_json(names: Sequence[str], *, num_documents: int, index: str) -> bytes:
    """Return the description that lies beside a score file.

    Args:
        names: of the scores.
        num_documents: of the corpus.
        index: digest of its `.idx`.
    """
    meta = {
        "version": VERSION,
        "names": list(names),
        "num_documents": num_documents,
        "index": index,
    }
    return (json.dumps(meta, indent=2) + "\n").encode()


def array_hash(values: np.ndarray) -> str:
    """Return a hash of the values of an array in C order, whatever file they came from."""
    state = hashlib.blake2b(digest_size=16)
    for start in range(0, len(values), BLOCK):
        state.update(np.ascontiguousarray(values[start : start + BLOCK]))
    return state.hexdigest()


def npy_chunks(values: np.ndarray) -> Iterator[np.ndarray | bytes]:
    """Yield the bytes of a one-dimensional array as an `.npy` file, little-endian."""
    yield _npy_header(values.shape, values.dtype)
    for start in range(0, len(values), BLOCK):
        block = np.ascontiguousarray(values[start : start + BLOCK])
        yield block.astype(values.dtype.newbyteorder("<"), copy=False)


def _npy_header(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    header = BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype.newbyteorder("<"))
    np.lib.format.write_array_header_1_0(
        header, {"descr": descr, "fortran_order": False, "shape": shape}
    )
    return header.getvalue()


def _read_json(path: Path, num_rows: int, num_documents: int) -> tuple[tuple[str, ...], str | None]:
    meta_path = path.with_suffix(".json")
    if not meta_path.is_file():
        names = tuple(f"score{row}" for row in range(num_rows)) if num_rows > 1 else ("score",)
        return names, None
    try:
        meta = json.loads(meta_path.read_bytes())
        version, names = meta["version"], tuple(meta["names"])
        count, made_for = meta["num_documents"], meta["index"]
    except (ValueError, KeyError, TypeError) as error:
        raise CorpusError(f"{meta_path}: not the description of a score file: {error!r}") from error
    if version != VERSION:
        raise CorpusError(f"{meta_path}: version {version}, expected {VERSION}")
    if (len(names), count) != (num_rows, num_documents):
        raise CorpusError(
            f"{meta_path}: describes {len(names)} scores of {count} documents, but {path.name} "
            f"holds {num_rows} of {num_documents}"
        )
    return names, made_for


def _check_count(scores: Scores, index: Index) -> None:
    num_scores = scores.values.shape[1]
    if num_scores != index.num_documents:
        raise CorpusError(
            f"{scores.path}: {num_scores:,} scores, but {index.prefix} has "
            f"{index.num_documents:,} documents"
        )
