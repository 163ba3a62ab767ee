"""Tokenizing: the same bytes however the work is cut, shared or interrupted."""

from __future__ import annotations

import json
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from megatron_d3.corpus import encoding, parts, sources
from megatron_d3.corpus.encoders import TokenizerFiles
from megatron_d3.corpus.encoding import Crew, Settings, Worker
from megatron_d3.corpus.index import read_index
from megatron_d3.corpus.mpi import Ranks
from megatron_d3.corpus.records import Keys
from megatron_d3.corpus.scores import read_scores
from megatron_d3.corpus.sources import cut
from megatron_d3.corpus.tokenization import ALL_SUFFIXES, Summary, assign, tokenize
from megatron_d3.corpus.writer import IndexWriter
from megatron_d3.errors import ConfigError, CorpusError
from tests.corpus_helpers import read_documents

BYTES = TokenizerFiles("bytes")
TEXTS = ["one", "", "three words here", ["a", "", "bc"], "é", "x" * 900] + [
    f"n{n}" for n in range(50)
]


def write_jsonl(path: Path, texts: list = TEXTS) -> Path:
    lines = [json.dumps({"text": text, "q": number / 8}) for number, text in enumerate(texts)]
    path.write_text("\n".join(lines))
    return path


def make(
    source: Path, prefix: Path, *, shard_bytes: int = 10**6, workers: int = 1, **options
) -> Summary:
    is_overwriting = options.pop("is_overwriting", False)
    ranks = options.pop("ranks", Ranks())
    choices = {"keys": Keys(scores=("q",)), "is_appending_eod": True, **options}
    summary = tokenize(
        cut([source], shard_bytes=shard_bytes),
        prefix,
        Settings(BYTES, **choices),
        workers=workers,
        ranks=ranks,
        is_overwriting=is_overwriting,
    )
    assert summary is not None
    return summary


def files_of(prefix: Path) -> dict[str, bytes]:
    """Return all files of a corpus; where it stands and is called does not matter."""
    found = {}
    for path in prefix.parent.glob(f"{prefix.name}.*"):
        content = path.read_bytes().replace(str(prefix).encode(), b"PREFIX")
        found[path.name.removeprefix(prefix.name)] = content
    return found


@pytest.fixture
def source(tmp_path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl")


def test_documents_are_those_of_the_index_writer(source, tmp_path):
    summary = make(source, tmp_path / "web")
    with IndexWriter(tmp_path / "expected", dtype="uint16") as writer:
        for text in TEXTS:
            pieces = [list(part.encode()) for part in ([text] if isinstance(text, str) else text)]
            pieces = [piece for piece in pieces if piece]
            if pieces:
                pieces[-1].append(0)
            writer.add_document([*chain(*pieces)], [len(piece) for piece in pieces])
    for suffix in (".bin", ".idx"):
        expected = (tmp_path / f"expected{suffix}").read_bytes()
        assert (tmp_path / f"web{suffix}").read_bytes() == expected
    scores = read_scores(tmp_path / "web.scores.npy", index=read_index(tmp_path / "web"))
    assert scores.names == ("q",)
    assert scores.row("q").tolist() == [number / 8 for number in range(len(TEXTS))]
    assert set(files_of(tmp_path / "web")) == {".bin", ".idx", ".scores.npy", ".scores.json",
                                               ".origin.json"}  # fmt: skip
    assert (summary.tally.num_documents, summary.tally.num_empty) == (56, 1)
    assert summary.tally.num_tokens == read_index(tmp_path / "web").num_tokens


@pytest.mark.parametrize("shard_bytes", [700, 3000])
def test_shards_and_chunks_leave_no_trace(source, tmp_path, monkeypatch, shard_bytes):
    make(source, tmp_path / "web")
    monkeypatch.setattr(sources, "CHUNK_BYTES", 64)
    make(source, tmp_path / "other", shard_bytes=shard_bytes)
    assert files_of(tmp_path / "other") == files_of(tmp_path / "web")


def test_workers_leave_no_trace(source, tmp_path):
    make(source, tmp_path / "web")
    make(source, tmp_path / "other", workers=2, shard_bytes=2500)
    assert files_of(tmp_path / "other") == files_of(tmp_path / "web")


def test_several_scores_are_rows(tmp_path):
    lines = [json.dumps({"text": "a", "m": {"q": n}, "r": -n}) for n in range(5)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    make(tmp_path / "a.jsonl", tmp_path / "web", keys=Keys(scores=("m.q", "r")), shard_bytes=90)
    scores = read_scores(tmp_path / "web.scores.npy")
    assert scores.names == ("m.q", "r")
    assert scores.values.tolist() == [[0, 1, 2, 3, 4], [0, -1, -2, -3, -4]]


def test_empty_documents_can_be_skipped(source, tmp_path):
    summary = make(source, tmp_path / "web", empty="skip")
    assert (summary.tally.num_documents, summary.tally.num_empty) == (55, 1)
    assert read_documents(tmp_path / "web")[1] == [*b"three words here", 0]
    assert read_scores(tmp_path / "web.scores.npy").values[0, 1] == 2 / 8


BAD = ['{"text": "a", "q": 1}', "{", "", '{"text": "b"}', '{"text": "c", "q": 2}', "{"]


@pytest.mark.parametrize("shard_bytes", [7, 10**6])
def test_a_broken_line_is_named_by_file_and_number(tmp_path, shard_bytes):
    (tmp_path / "a.jsonl").write_text("\n".join(BAD))
    message = r"a\.jsonl, line 2: broken JSON: .*; mend it, or give --on-error skip"
    with pytest.raises(CorpusError, match=message):
        make(tmp_path / "a.jsonl", tmp_path / "web", shard_bytes=shard_bytes)
    assert not list(tmp_path.glob("web.*x"))


@pytest.mark.parametrize("shard_bytes", [7, 10**6])
def test_skipped_rows_are_counted_and_listed(tmp_path, shard_bytes):
    (tmp_path / "a.jsonl").write_text("\n".join(BAD))
    summary = make(tmp_path / "a.jsonl", tmp_path / "web", shard_bytes=shard_bytes, on_error="skip")
    assert read_documents(tmp_path / "web") == [[97, 0], [99, 0]]
    assert summary.skipped == {"broken JSON": 2, "no key 'q'": 1}
    assert summary.tally.num_blank == 1
    text = (tmp_path / "web.skipped.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert [(row["line"], row["reason"]) for row in rows] == [
        (2, "broken JSON"), (4, "no key 'q'"), (6, "broken JSON")]  # fmt: skip


@pytest.mark.parametrize("shard_bytes", [22, 10**6])
def test_what_the_refusal_of_a_broken_line_advises_works(tmp_path, shard_bytes):
    source = tmp_path / "a.jsonl"
    source.write_text("\n".join(BAD))
    with pytest.raises(CorpusError, match=r"mend it, or give --on-error skip"):
        make(source, tmp_path / "web", shard_bytes=shard_bytes)
    summary = make(source, tmp_path / "web", shard_bytes=shard_bytes, on_error="skip")
    assert summary.num_resumed == (1 if shard_bytes == 22 else 0)
    assert read_documents(tmp_path / "web") == [[97, 0], [99, 0]]
    with pytest.raises(CorpusError, match=r"line 2: broken JSON"):
        make(source, tmp_path / "mended")
    source.write_text(BAD[0])  # no shard was done: nothing of the first try is left to disagree with
    make(source, tmp_path / "mended")
    assert read_documents(tmp_path / "mended") == [[97, 0]]


def test_rows_of_other_forms_are_placed(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff")
    (shard,) = cut([tmp_path / "a.txt"], shard_bytes=9, txt="file")
    with pytest.raises(CorpusError, match=r"a\.txt: not UTF-8: byte 0 is 0xff; mend it"):
        tokenize([shard], tmp_path / "web", Settings(BYTES, Keys()))


def test_nothing_to_write_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("{\n{\n")
    with pytest.raises(CorpusError, match=r"no document in any of the files; 2 rows: broken JSON"):
        make(tmp_path / "a.jsonl", tmp_path / "web", on_error="skip")


def stop_after(monkeypatch, shards: int) -> None:
    """Let the run die when it starts another shard than the first ones."""
    enter = parts.PartWriter.__enter__
    count = [0]

    def dying(self):
        count[0] += 1
        if count[0] > shards:
            raise KeyboardInterrupt
        return enter(self)

    monkeypatch.setattr(parts.PartWriter, "__enter__", dying)


@pytest.mark.parametrize("shards", [0, 2])
def test_an_interrupted_run_goes_on_by_shard(source, tmp_path, monkeypatch, shards):
    make(source, tmp_path / "web", shard_bytes=1000)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_after(patch, shards)
        make(source, tmp_path / "other", shard_bytes=1000)
    assert not [path for path in tmp_path.glob("other.*") if path.suffix != ".parts"]
    summary = make(source, tmp_path / "other", shard_bytes=1000)
    assert summary.num_resumed == shards
    assert files_of(tmp_path / "other") == files_of(tmp_path / "web")


def test_an_unfinished_run_of_another_job_is_refused(source, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_after(patch, 1)
        make(source, tmp_path / "web", shard_bytes=1000)
    for options, field in (
        ({"is_appending_eod": False}, "append_eod: true, now false"),
        ({"empty": "skip"}, 'empty: "keep", now "skip"'),
        ({"shard_bytes": 999}, "shard size"),
    ):
        with pytest.raises(CorpusError, match=rf"web\.parts: .* another {field}"):
            make(source, tmp_path / "web", **{"shard_bytes": 1000, **options})
    write_jsonl(source, [*TEXTS, "more"])
    with pytest.raises(CorpusError, match=r"another files: .*a\.jsonl.* or give --overwrite"):
        make(source, tmp_path / "web", shard_bytes=1000)
    summary = make(source, tmp_path / "web", shard_bytes=1000, is_overwriting=True)
    assert (summary.num_resumed, summary.tally.num_documents) == (0, 57)


def test_two_runs_to_one_prefix_are_refused(source, tmp_path):
    with (
        parts.hold(tmp_path / "web.parts", {}, is_replacing=False),
        pytest.raises(CorpusError, match=r"another process is tokenizing to this prefix"),
    ):
        make(source, tmp_path / "web")


def test_existing_output_is_refused_and_replaced_whole(source, tmp_path):
    make(source, tmp_path / "web")
    before = files_of(tmp_path / "web")
    with pytest.raises(CorpusError, match=r"exists; choose another name or give --overwrite"):
        make(source, tmp_path / "web", keys=Keys())
    assert files_of(tmp_path / "web") == before
    make(source, tmp_path / "web", keys=Keys(), is_overwriting=True)
    assert set(files_of(tmp_path / "web")) == {".bin", ".idx", ".origin.json"}
    assert set(before) < set(ALL_SUFFIXES)


def test_refusals_before_any_work(source, tmp_path, monkeypatch):
    with pytest.raises(CorpusError, match=r"nowhere: no such folder; create it first"):
        make(source, tmp_path / "nowhere" / "web")
    with pytest.raises(CorpusError, match=r"nowhere: no such folder; create it first"):
        parts.hold(tmp_path / "nowhere" / "web.parts", {}, is_replacing=False).__enter__()
    with pytest.raises(ConfigError, match=r"--workers: got 0, expected at least 1"):
        make(source, tmp_path / "web", workers=0)
    monkeypatch.setattr("megatron_d3.corpus.encoders._Bytes.eod_id", None)
    with pytest.raises(ConfigError, match=r"--append-eod: the tokenizer names no end of document"):
        make(source, tmp_path / "web")


def test_no_space_left_names_the_file(source, tmp_path, monkeypatch):
    def full(self, encoded):
        raise OSError(28, "No space left on device", "web.parts/00000000.bin")

    monkeypatch.setattr(parts.PartWriter, "add", full)
    with pytest.raises(CorpusError, match=r"0000\.bin: No space left on device; free some space"):
        make(source, tmp_path / "web")


class Liar:
    """A tokenizer whose ids do not fit its vocabulary."""

    vocab_size, eod_id = 100, 0

    def encode(self, texts):
        return [[70_000] for _ in texts]


def test_a_token_beyond_the_dtype_is_named(source, monkeypatch):
    monkeypatch.setattr(encoding, "open_encoder", lambda files: Liar())
    worker = Worker(Settings(BYTES, Keys()))
    (shard,) = cut([source], shard_bytes=10**6)
    with pytest.raises(CorpusError, match=r"token 70,000, but its vocabulary of 100 is .* uint16"):
        worker(next(iter(sources.chunks(shard))))


def test_a_killed_worker_is_an_error_not_a_hang(source):
    (shard,) = cut([source], shard_bytes=10**6)
    with Crew(Settings(BYTES, Keys()), 2) as crew:
        assert crew._pool is not None
        crew._pool.submit(sys.exit)  # ends nothing: the worker reports it and goes on
        (chunk, encoded), _ = crew.encode([*sources.chunks(shard), None])
        assert chunk is not None and encoded is not None and encoded.tally.num_documents == 56
        for process in list(crew._pool._processes.values()):
            process.kill()
        with pytest.raises(CorpusError, match=r"a worker process was killed; where memory is"):
            list(crew.encode(list(sources.chunks(shard)) * 20))


def test_ranks_share_all_shards_by_size(tmp_path):
    for number, size in enumerate((50, 10, 20, 30, 40)):
        (tmp_path / f"{number}.jsonl").write_bytes(b"x" * size)
    shards = cut(sorted(tmp_path.glob("*.jsonl")), shard_bytes=50)
    assert [sum(span.size for span in shard) for shard in shards] == [50, 30, 30, 40]
    shares = [assign(shards, Ranks(rank, 3), set()) for rank in range(3)]
    assert shares == [[0], [3], [1, 2]]
    assert [assign(shards, Ranks(rank, 2), {0, 3}) for rank in range(2)] == [[1], [2]]


class Scripted:
    """Stands in for the communicator of a rank that is not the first, or of one that fails."""

    def __init__(self, broadcast, others):
        self.value, self.others, self.sent = broadcast, others, []

    def bcast(self, value, root):
        self.sent.append(value)
        return self.value if self.value != "own" else value

    def allgather(self, value):
        return [value, *self.others]


def test_ranks_stop_together(source, tmp_path):
    shards = cut([source], shard_bytes=1000)
    settings = Settings(BYTES, Keys())
    with pytest.raises(CorpusError, match="rank 0 refused to start"):
        tokenize(shards, tmp_path / "web", settings, ranks=Ranks(1, 2, Scripted(None, [])))
    (tmp_path / "web.bin").write_bytes(b"")
    comm = Scripted("own", [])
    with pytest.raises(CorpusError, match="exists"):
        tokenize(shards, tmp_path / "web", settings, ranks=Ranks(0, 2, comm))
    assert comm.sent == [None]
    failing = Scripted("own", [(0, CorpusError("what another rank met"))])
    with pytest.raises(CorpusError, match="what another rank met"):
        tokenize(shards, tmp_path / "new", settings, ranks=Ranks(0, 2, failing))
    assert np.all([not path.name.endswith(".idx") for path in tmp_path.glob("new*")])
