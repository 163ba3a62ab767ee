"""Tokenize text files into a corpus: any number of processes and MPI ranks, the same bytes.

One process a rank reads files and writes shards; workers turn chunks of text into tokens and hand
them back in order. Each rank writes whole shards; rank 0 puts them together. A few chunks a worker
are in flight, so that memory depends on neither the number nor the size of the files (save that a
`.txt` that is one document, a line, and a Parquet row group are held whole).

Output is byte-identical to Megatron's `tools/preprocess_data.py` for the same tokenizer and text:
a document a row, in order, an empty document a document without sequences, a list of strings a
document of several sequences, end of document as one more token of its last sequence.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_d3 import __version__
from megatron_d3.corpus.derive import ORIGIN_SUFFIX, ORIGIN_VERSION
from megatron_d3.corpus.encoding import Crew, Settings, open_settings
from megatron_d3.corpus.index import dtype_for_vocab, suffixed
from megatron_d3.corpus.mpi import Ranks
from megatron_d3.corpus.parts import (
    SUFFIX,
    Parts,
    PartWriter,
    Tally,
    finished,
    hold,
    remove,
)
from megatron_d3.corpus.progress import Progress
from megatron_d3.corpus.publish import Publication
from megatron_d3.corpus.records import Problem
from megatron_d3.corpus.scores import SUFFIXES, score_files
from megatron_d3.corpus.sources import Chunk, Span, chunks, rows_before
from megatron_d3.errors import ConfigError, CorpusError, D3Error

VERSION = 1
SKIPPED_SUFFIX = ".skipped.jsonl"
ALL_SUFFIXES = (".bin", *SUFFIXES, SKIPPED_SUFFIX, ORIGIN_SUFFIX, ".idx")


@dataclass(frozen=True)
class Summary:
    """What was made.

    Attributes:
        prefix: the corpus.
        tally: its numbers.
        skipped: reason -> rows.
        num_resumed: shards that an earlier run had done.
        num_shards: all of them.
        seconds: of this run.
    """

    prefix: str
    tally: Tally
    skipped: dict[str, int]
    num_resumed: int
    num_shards: int
    seconds: float


def tokenize(
    shards: Sequence[tuple[Span, ...]],
    prefix: Path,
    settings: Settings,
    *,
    workers: int = 1,
    ranks: Ranks = Ranks(),  # noqa: B008, frozen
    is_overwriting: bool = False,
) -> Summary | None:
    """Write PREFIX.bin, PREFIX.idx, their scores and origin.

    Args:
        shards: from `sources.cut`; the same on every rank.
        prefix: where to write, without suffix.
        settings: what decides the bytes.
        workers: processes of this rank that tokenize; 1: this process itself.
        ranks: of an mpirun; all of them call this.
        is_overwriting: replace a corpus, and the shards of an unfinished run of another job.

    Returns:
        the summary on rank 0, None on others.

    Raises:
        ConfigError: less than one worker, or a tokenizer without end of document where one is
            to be appended.
        CorpusError: no tokenizer, a row that is no document, existing output, no space, nothing
            to write.
    """
    if workers < 1:
        raise ConfigError(f"--workers: got {workers}, expected at least 1")
    encoder = open_settings(settings)
    folder = suffixed(prefix, SUFFIX)
    if ranks.rank:
        done = ranks.broadcast(None)
        if done is None:
            raise CorpusError("rank 0 refused to start")
        _, failure = _share(shards, folder, settings, workers, ranks, done)
        _raise_first(ranks.gather(failure))
        return None
    new = Publication(prefix, ALL_SUFFIXES, is_overwriting=is_overwriting)
    with ExitStack() as stack:
        try:
            stack.enter_context(new)
            job = _job(shards, settings)
            stack.enter_context(hold(folder, job, is_replacing=is_overwriting))
            done = finished(folder)
        except BaseException:
            ranks.broadcast(None)  # or the others would wait for ever
            raise
        ranks.broadcast(done)
        progress, failure = _share(shards, folder, settings, workers, ranks, done)
        _raise_first(ranks.gather(failure))
        parts = Parts(folder, len(shards))
        tokenizer = {"vocab_size": encoder.vocab_size, "eod_id": encoder.eod_id}
        total, skipped = _assemble(parts, shards, settings, tokenizer, new)
    remove(folder)  # NOTE: not before the corpus stands
    return Summary(str(prefix), total, skipped, len(done), len(shards), progress.seconds)


def assign(shards: Sequence[tuple[Span, ...]], ranks: Ranks, done: set[int]) -> list[int]:
    """Return the shards of one rank: the largest first, each to the rank with the least work."""
    sizes = [sum(span.size for span in shard) for shard in shards]
    loads = [0] * ranks.size
    mine = []
    for number in sorted(range(len(shards)), key=lambda number: (-sizes[number], number)):
        if number not in done:
            rank = loads.index(min(loads))
            loads[rank] += max(sizes[number], 1)
            if rank == ranks.rank:
                mine.append(number)
    return sorted(mine)


def _share(
    shards: Sequence[tuple[Span, ...]],
    folder: Path,
    settings: Settings,
    workers: int,
    ranks: Ranks,
    done: set[int],
) -> tuple[Progress, tuple[int, D3Error] | None]:
    """Write the shards of this rank; return the first failure with the number of its shard."""
    mine = assign(shards, ranks, done)
    progress = Progress(
        sum(span.size for number in mine for span in shards[number]),
        label="tokenize" if ranks.size == 1 else f"tokenize, rank 0 of {ranks.size}",
        is_silent=ranks.rank > 0,
    )
    number = mine[0] if mine else 0
    try:
        with Crew(settings, workers) as crew:
            encoded = crew.encode(_stream(shards, mine))
            for number in mine:
                with PartWriter(folder, number) as part:
                    for chunk, result in encoded:
                        if chunk is None or result is None:  # the end of a shard
                            break
                        if result.tally.problems and settings.on_error == "fail":
                            raise _refusal(shards[number], chunk, result.tally.problems[0])
                        part.add(result)
                        progress.add(chunk.progress, len(result.tokens))
    except OSError as error:
        hint = "; free some space and run it again" if error.errno == errno.ENOSPC else ""
        where = error.filename or folder
        return progress, (number, CorpusError(f"{where}: {error.strerror}{hint}"))
    except D3Error as error:
        return progress, (number, error)
    finally:
        progress.close()
    return progress, None


def _stream(shards: Sequence[tuple[Span, ...]], mine: Sequence[int]) -> Iterator[Chunk | None]:
    """Yield the chunks of some shards, None after each shard."""
    for number in mine:
        yield from chunks(shards[number])
        yield None


def _refusal(shard: tuple[Span, ...], chunk: Chunk, problem: Problem) -> CorpusError:
    row = problem.row
    if chunk.form in ("jsonl", "lines"):
        row += rows_before(shard[chunk.span])
    place = _place(chunk.form, row)
    where = f"{chunk.path}{f', {place[0]} {place[1]:,}' if place else ''}"
    return CorpusError(
        f"{where}: {problem.reason}: {problem.detail}; mend it, or give --on-error skip"
    )


def _place(form: str, row: int) -> tuple[str, int] | None:
    """Return how a row is called and numbered: lines from 1, rows of a table from 0."""
    return None if row < 0 else ("row", row) if form == "parquet" else ("line", row + 1)


def _raise_first(failures: Sequence[tuple[int, D3Error] | None]) -> None:
    """Raise the failure of the first shard that has one, on every rank."""
    found = [failure for failure in failures if failure is not None]
    if found:
        raise min(found, key=lambda failure: failure[0])[1]


def _job(shards: Sequence[tuple[Span, ...]], settings: Settings) -> dict[str, Any]:
    """Return what an unfinished run has to agree in, to be continued."""
    files = dict.fromkeys(span.path for shard in shards for span in shard)
    stats = [(path, path.stat()) for path in files]
    return {
        "version": VERSION,
        **_choices(settings),
        "files": [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats],
        "shard size": hashlib.blake2b(repr(shards).encode(), digest_size=8).hexdigest(),
    }


def _choices(settings: Settings) -> dict[str, Any]:
    """Return what decides the bytes besides the text, as JSON values."""
    return {
        "tokenizer": f"{settings.tokenizer.kind} {settings.tokenizer.fingerprint()}",
        "text_key": settings.keys.text,
        "score_keys": list(settings.keys.scores),
        "append_eod": settings.is_appending_eod,
        "on_error": settings.on_error,
        "empty": settings.empty,
    }


def _assemble(
    parts: Parts,
    shards: Sequence[tuple[Span, ...]],
    settings: Settings,
    tokenizer: dict[str, Any],
    new: Publication,
) -> tuple[Tally, dict[str, int]]:
    """Write the files of the corpus from its shards; return its numbers and what was skipped."""
    total, skipped = Tally(), dict[str, int]()
    for number in range(parts.count):
        tally = parts.tally(number)
        total.add(tally)
        for problem in tally.problems:
            skipped[problem.reason] = skipped.get(problem.reason, 0) + 1
    if not total.num_documents:
        why = "".join(f"; {count:,} rows: {reason}" for reason, count in skipped.items())
        raise CorpusError(f"{new.prefix}: no document in any of the files{why}")
    dtype = dtype_for_vocab(tokenizer["vocab_size"])
    new.concatenate(".bin", parts.bins())
    index = new.write_hashed(".idx", parts.idx(dtype, total))
    names = settings.keys.scores
    if names:
        values = parts.scores(len(names), total.num_documents)
        arrays, text = score_files(values, names=names, index=index)
        new.write(SUFFIXES[0], arrays)
        new.write(SUFFIXES[1], [text])
    if skipped:
        new.write(SKIPPED_SUFFIX, _skipped_rows(parts, shards))
    files = {span.path: 0 for shard in shards for span in shard}
    origin = {
        "version": ORIGIN_VERSION,
        "program": f"megatron-d3 {__version__}",
        "verb": "tokenize",
        "algorithm_version": VERSION,
        **_choices(settings),
        **tokenizer,
        "files": [{"file": str(path), "bytes": path.stat().st_size} for path in files],
        "skipped": skipped,
        "num_documents": total.num_documents,
        "num_tokens": total.num_tokens,
        "output": {"prefix": str(new.prefix), "index": index},
    }
    new.write(ORIGIN_SUFFIX, [(json.dumps(origin, indent=2) + "\n").encode()])
    return total, skipped


def _skipped_rows(parts: Parts, shards: Sequence[tuple[Span, ...]]) -> Iterator[bytes]:
    """Yield a line of JSON for every row skipped."""
    passed: dict[Path, int] = {}  # lines of a file in the spans before
    for number, shard in enumerate(shards):
        tally = parts.tally(number)
        problems: dict[int, list[Problem]] = {}
        for problem in tally.problems:
            problems.setdefault(problem.span, []).append(problem)
        for at, span in enumerate(shard):
            before = passed.get(span.path, 0)
            for problem in problems.get(at, ()):
                row = problem.row
                if span.form in ("jsonl", "lines"):
                    row += before
                place = _place(span.form, row)
                entry = {"file": str(span.path), **(dict([place]) if place else {})}
                entry |= {"reason": problem.reason, "detail": problem.detail}
                yield (json.dumps(entry) + "\n").encode()
            passed[span.path] = before + tally.num_rows.get(at, 0)
