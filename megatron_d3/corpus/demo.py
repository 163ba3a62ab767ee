"""Build a multi-domain corpus of real text without a download; see `demo_text.py` for the text.

    OUT/tokenizer.model            SentencePiece, trained on the training part
    OUT/python.bin, python.idx     the training part of domain "python"
    OUT/python_valid.bin, .idx     its held-out part
    OUT/domains.yaml               the `domains:` block of a run file
    OUT/corpus.json                parameters, and documents, bytes, tokens and hashes of each part

Documents are deduplicated by a hash of their words, also across domains, and stand in the order of
that hash. The documents of lowest hash are held out, so that none is in both parts. The same Python
installation and parameters give the same bytes. The folder appears under its name when it is
complete; a finished one with the same parameters is used as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_d3.corpus import demo_text, tokenizer
from megatron_d3.corpus.demo_documents import Document, collect, drop_unusable, hold_out
from megatron_d3.corpus.index import read_index, suffixed
from megatron_d3.corpus.tokenizer import Tokenizer, train_tokenizer
from megatron_d3.errors import CorpusError

VERSION = 1
_TOKENIZER_BYTES_PER_DOMAIN = 1_000_000


@dataclass(frozen=True)
class Part:
    """One `.bin`/`.idx` pair of the demo corpus.

    Attributes:
        prefix: name of the pair inside the corpus folder.
        documents: number of documents.
        bytes: UTF-8 bytes of their text, without end-of-document tokens.
        tokens: number of tokens, end-of-document included.
        hash: blake2b-128 of the `.bin` and the `.idx`.
    """

    prefix: str
    documents: int
    bytes: int
    tokens: int
    hash: str


@dataclass(frozen=True)
class DemoDomain:
    """A domain of the demo corpus with its two parts."""

    name: str
    train: Part
    valid: Part


@dataclass(frozen=True)
class DemoCorpus:
    """A finished demo corpus.

    Attributes:
        path: its folder.
        vocab_size: pieces of its tokenizer.
        eod_id: end-of-document token.
        domains: in the order of `demo_text.DOMAINS`.
    """

    path: Path
    vocab_size: int
    eod_id: int
    domains: tuple[DemoDomain, ...]

    @property
    def tokenizer_model(self) -> Path:
        """The file for Megatron's `--tokenizer-model`."""
        return self.path / "tokenizer.model"

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of all text."""
        return sum(domain.train.bytes + domain.valid.bytes for domain in self.domains)

    @property
    def num_tokens(self) -> int:
        """Tokens of both parts of all domains."""
        return sum(domain.train.tokens + domain.valid.tokens for domain in self.domains)


def build_demo_corpus(
    out_dir: str | Path,
    *,
    max_bytes_per_domain: int = 5_000_000,
    vocab_size: int = 4096,
    valid_fraction: float = 0.05,
    roots: Sequence[tuple[str, Path]] | None = None,
) -> DemoCorpus:
    """Build the corpus, or return the finished one that is there.

    Args:
        out_dir: folder to make; must not exist, be empty, or hold a corpus of these parameters.
        max_bytes_per_domain: UTF-8 bytes of text at which a domain is full; its last document may
            reach beyond by a fortieth.
        vocab_size: pieces of the tokenizer.
        valid_fraction: part of a domain's bytes that is held out, in (0, 0.5].
        roots: folders to search, see `demo_text.find_sources`; default this Python's own.

    Raises:
        CorpusError: fewer than five domains of usable size, a folder that holds something else or
            cannot be written, a vocab_size that does not fit, a parameter out of range.
    """
    out_dir = Path(out_dir)
    parameters = _parameters(max_bytes_per_domain, vocab_size, valid_fraction)
    finished = _reuse(out_dir, parameters)
    if finished is not None:
        return finished
    sources = demo_text.find_sources(roots or demo_text.installation_roots())
    documents = drop_unusable(collect(sources, max_bytes_per_domain), max_bytes_per_domain)
    aside = suffixed(out_dir, f".tmp-{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        corpus = _write(aside, documents, vocab_size, valid_fraction)
        _write_text(aside / "domains.yaml", domains_yaml(corpus))
        _write_text(aside / "corpus.json", _to_json(corpus, parameters))
        if out_dir.is_dir() and not any(out_dir.iterdir()):
            out_dir.rmdir()
        os.rename(aside, out_dir)
    except OSError as error:
        finished = _reuse(out_dir, parameters)  # another process was first
        if finished is None:
            raise CorpusError(f"{out_dir}: cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return open_demo_corpus(out_dir)


def open_demo_corpus(path: str | Path) -> DemoCorpus:
    """Open a finished demo corpus and check its files against its `corpus.json`.

    Raises:
        CorpusError: no corpus there, one of another version, or files that do not fit.
    """
    path = Path(path)
    try:
        table = json.loads((path / "corpus.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorpusError(f"{path}: no finished demo corpus here ({error})") from error
    if table.get("version") != VERSION:
        raise CorpusError(
            f"{path}: corpus.json has version {table.get('version')}, expected {VERSION}; "
            f"remove the folder to build it anew"
        )
    domains = tuple(
        DemoDomain(row["name"], Part(**row["train"]), Part(**row["valid"]))
        for row in table["domains"]
    )
    for domain in domains:
        for part in (domain.train, domain.valid):
            found = read_index(path / part.prefix).num_tokens
            if found != part.tokens:
                raise CorpusError(
                    f"{path / part.prefix}: {found:,} tokens, but corpus.json says "
                    f"{part.tokens:,}; remove the folder to build it anew"
                )
    return DemoCorpus(path, table["tokenizer"]["vocab_size"], table["tokenizer"]["eod_id"], domains)


def domains_yaml(corpus: DemoCorpus) -> str:
    """Return the `domains:` block of a run file that lies in the corpus folder."""
    lines = [
        "# Domains of the demo corpus; paths are relative to this file. Megatron's flags for it:",
        "#   --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model",
        "domains:",
    ]
    for domain in corpus.domains:
        train, valid = domain.train, domain.valid
        lines.append(
            f"  {domain.name}: {{paths: [{train.prefix}], valid_paths: [{valid.prefix}]}}"
            f"  # {train.tokens:,} tokens"
        )
    return "\n".join(lines) + "\n"


def _parameters(max_bytes: int, vocab_size: int, valid_fraction: float) -> dict[str, object]:
    if max_bytes < 10_000:
        raise CorpusError(f"max_bytes_per_domain: got {max_bytes}, expected at least 10,000")
    if not 0 < valid_fraction <= 0.5:
        raise CorpusError(f"valid_fraction: got {valid_fraction}, expected a number in (0, 0.5]")
    return {
        "max_bytes_per_domain": max_bytes,
        "vocab_size": vocab_size,
        "valid_fraction": valid_fraction,
        "text_version": demo_text.VERSION,
        "tokenizer_version": tokenizer.VERSION,
    }


def _reuse(out_dir: Path, parameters: dict[str, object]) -> DemoCorpus | None:
    """Return a finished corpus of these parameters, None if nothing is there, else raise."""
    if not out_dir.exists() or (out_dir.is_dir() and not any(out_dir.iterdir())):
        return None
    try:
        table = json.loads((out_dir / "corpus.json").read_text(encoding="utf-8"))
        found = table["parameters"]
    except (OSError, ValueError, KeyError, TypeError):
        raise CorpusError(
            f"{out_dir}: exists and is no demo corpus; remove it or choose another folder"
        ) from None
    for name, wanted in parameters.items():
        if found.get(name) != wanted:
            raise CorpusError(
                f"{out_dir}: was built with {name} {found.get(name)}, now {wanted}; "
                f"remove it or choose another folder"
            )
    return open_demo_corpus(out_dir)


def _write(
    folder: Path, documents: dict[str, list[Document]], vocab_size: int, valid_fraction: float
) -> DemoCorpus:
    parts = {name: hold_out(found, valid_fraction) for name, found in documents.items()}
    sample = [
        text
        for train, _ in parts.values()
        for text in _first_bytes(train, _TOKENIZER_BYTES_PER_DOMAIN)
    ]
    model = train_tokenizer(sample, folder / "tokenizer.model", vocab_size=vocab_size)
    domains = tuple(
        DemoDomain(
            name,
            _write_part(folder, name, train, model),
            _write_part(folder, f"{name}_valid", valid, model),
        )
        for name, (train, valid) in parts.items()
    )
    return DemoCorpus(folder, model.vocab_size, model.eod_id, domains)


def _first_bytes(documents: Iterable[Document], max_bytes: int) -> list[str]:
    texts, total = [], 0
    for document in documents:
        if total >= max_bytes:
            break
        texts.append(document.text)
        total += document.num_bytes
    return texts


def _write_part(folder: Path, prefix: str, documents: list[Document], model: Tokenizer) -> Part:
    num_tokens = model.write_corpus((document.text for document in documents), folder / prefix)
    digest = hashlib.blake2b(digest_size=16)
    for suffix in (".bin", ".idx"):
        digest.update(suffixed(folder / prefix, suffix).read_bytes())
    num_bytes = sum(document.num_bytes for document in documents)
    return Part(prefix, len(documents), num_bytes, num_tokens, digest.hexdigest())


def _to_json(corpus: DemoCorpus, parameters: dict[str, object]) -> str:
    table = {
        "version": VERSION,
        "parameters": parameters,
        "tokenizer": {
            "type": "SentencePieceTokenizer",
            "model": "tokenizer.model",
            "vocab_size": corpus.vocab_size,
            "eod_id": corpus.eod_id,
            "hash": hashlib.blake2b(
                corpus.tokenizer_model.read_bytes(), digest_size=16
            ).hexdigest(),
        },
        "domains": [asdict(domain) for domain in corpus.domains],
    }
    return json.dumps(table, indent=2) + "\n"


def _write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
