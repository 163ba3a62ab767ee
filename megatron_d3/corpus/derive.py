"""Publish a corpus made of documents of others: `.bin`, `.idx`, their scores, and where from.

out.bin            linked, concatenated or copied in order, see `rewrite.py`
out.scores.npy     the scores of the same documents, if there are any
out.scores.json
out.origin.json    what the corpus was made of and how: enough to make it again, and to check
out.idx            last: it makes the corpus one
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from megatron_d3 import __version__
from megatron_d3.corpus.index import suffixed
from megatron_d3.corpus.publish import Publication
from megatron_d3.corpus.rewrite import Source, rewrite
from megatron_d3.corpus.scores import (
    SUFFIXES,
    Scores,
    array_hash,
    join_scores,
    read_scores,
    score_chunks,
    score_json,
)

ORIGIN_VERSION = 1
ORIGIN_SUFFIX = ".origin.json"
ALL_SUFFIXES = (".bin", *SUFFIXES, ORIGIN_SUFFIX, ".idx")


def origin(
    source: Source, documents: np.ndarray | None, *, is_copying: bool, how: dict[str, Any]
) -> dict[str, Any]:
    """Return what determines a derived corpus, as JSON values without clock or host.

    Args:
        source: the documents it is made of.
        documents: the chosen ones in their order; None: all as they are.
        is_copying: as for `rewrite`.
        how: what the verb adds: its name, parameters and seed.
    """
    linked = "linked" if len(source.bins) == 1 else "concatenated"
    with ThreadPoolExecutor() as pool:  # hashing is a second a GB, and each remembers its digest
        order = pool.submit(lambda: None if documents is None else array_hash(documents))
        list(pool.map(lambda index: index.digest, source.indexes))
    return {
        "version": ORIGIN_VERSION,
        "program": f"megatron-d3 {__version__}",
        **how,
        "inputs": [
            {
                "prefix": str(index.prefix),
                "index": index.digest,
                "bin_bytes": index.bin_bytes,
                "num_documents": index.num_documents,
                "num_tokens": index.num_tokens,
            }
            for index in source.indexes
        ],
        "bin": "copied in order" if is_copying else linked,
        "documents": order.result(),
    }


def derive(
    source: Source,
    documents: np.ndarray | None,
    prefix: str | Path,
    *,
    scores: Scores | None,
    report: dict[str, Any],
    is_copying: bool = False,
    is_overwriting: bool = False,
    copy: Callable[[np.ndarray, Path], None] | None = None,
) -> None:
    """Write a derived corpus; all its files appear together.

    Args:
        source: the documents it is made of.
        documents: the chosen ones in their order; None: all as they are.
        prefix: where it is written, without suffix.
        scores: of all documents of `source`; None: it has none.
        report: from `origin`; gains the entry "output".
        is_copying: as for `rewrite`.
        is_overwriting: as for `Publication`.
        copy: as for `rewrite`.

    Raises:
        CorpusError: as `rewrite` and `Publication`.
    """
    with Publication(prefix, ALL_SUFFIXES, is_overwriting=is_overwriting) as new:
        with ThreadPoolExecutor(1) as pool:
            writing = None
            if scores is not None:
                chunks = score_chunks(scores.values, documents=documents)
                writing = pool.submit(new.write, SUFFIXES[0], chunks)
            index = rewrite(source, documents, new, is_copying=is_copying, copy=copy)
            if writing is not None:
                writing.result()
        report["output"] = {"prefix": str(prefix), "index": index}
        if scores is not None:
            count = source.num_documents if documents is None else len(documents)
            text = score_json(scores.names, num_documents=count, index=index)
            new.write(SUFFIXES[1], [text])
        new.write(ORIGIN_SUFFIX, [(json.dumps(report, indent=2) + "\n").encode()])


def scores_beside(source: Source) -> tuple[Scores | None, list[Path]]:
    """Return the scores of all documents, if every corpus has a score file, and the missing ones.

    Raises:
        CorpusError: a file is broken or does not belong, or the corpora have different scores.
    """
    paths = [suffixed(index.prefix, SUFFIXES[0]) for index in source.indexes]
    missing = [path for path in paths if not path.is_file()]
    if missing:
        return None, missing
    parts = [
        read_scores(path, index=index) for path, index in zip(paths, source.indexes, strict=True)
    ]
    return join_scores(parts), []
