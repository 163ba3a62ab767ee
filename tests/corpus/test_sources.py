"""Files, shards and chunks: nothing lost, nothing twice, wherever the cuts fall."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_d3.corpus import sources
from megatron_d3.corpus.sources import chunks, cut, find_files, rows_before
from megatron_d3.errors import ConfigError, CorpusError


def read_all(files: list[Path], shard_bytes: int, txt: str | None = None) -> bytes:
    shards = cut(files, shard_bytes=shard_bytes, txt=txt)
    return b"".join(chunk.data for shard in shards for chunk in chunks(shard))


@given(
    lines=st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"")), max_size=12),
    shard_bytes=st.integers(1, 40),
    chunk_bytes=st.integers(1, 20),
    is_ended=st.booleans(),
)
def test_every_line_is_read_once_wherever_the_cuts_fall(
    tmp_path_factory, lines, shard_bytes, chunk_bytes, is_ended
):
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    content = b"\n".join(lines) + (b"\n" if is_ended else b"")
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "CHUNK_BYTES", chunk_bytes)
        shards = cut([path], shard_bytes=shard_bytes)
        found = b""
        for span in (span for shard in shards for span in shard):
            for chunk in chunks([span]):
                expected = found.count(b"\n") + (0 if not found or found.endswith(b"\n") else 1)
                assert rows_before(span) + chunk.first_row == expected
                found += chunk.data
    assert found == content


def test_progress_adds_up_to_the_size_of_the_file(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"abcdefgh\n" * 200_000))
    (shard,) = cut([path], shard_bytes=10)
    pieces = list(chunks(shard))
    assert len(pieces) == 4
    assert sum(piece.progress for piece in pieces) == path.stat().st_size


def test_small_files_share_a_shard_and_large_ones_are_cut(tmp_path):
    for name, size in (("a", 3), ("b", 4), ("c", 25)):
        (tmp_path / f"{name}.jsonl").write_bytes(b"x" * (size - 1) + b"\n")
    shards = cut(find_files([tmp_path]), shard_bytes=10)
    cuts = [[(span.path.stem, span.start, span.stop) for span in shard] for shard in shards]
    assert cuts == [[("a", 0, 3), ("b", 0, 4)], [("c", 0, 10)], [("c", 10, 20)], [("c", 20, 25)]]


def test_folders_and_globs_are_sorted_and_patterns_keep_their_order(tmp_path):
    for name in ("b.jsonl", "a.parquet", "sub/c.txt.gz", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    names = [path.name for path in find_files([tmp_path / "*.jsonl", tmp_path])]
    assert names == ["b.jsonl", "a.parquet", "b.jsonl", "c.txt.gz"]


def test_files_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "notes.md").write_text("hello")
    with pytest.raises(CorpusError, match=r"notes\.md: no text file by its name; read are \.jsonl"):
        find_files([tmp_path / "notes.md"])
    with pytest.raises(CorpusError, match=r"no such file, or no text file in it"):
        find_files([tmp_path])


def test_a_txt_needs_to_be_told_what_a_document_is(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    with pytest.raises(ConfigError, match=r"a\.txt: give --txt file .* or --txt line"):
        cut([tmp_path / "a.txt"], shard_bytes=10)
    (shard,) = cut([tmp_path / "a.txt"], shard_bytes=10, txt="file")
    assert [(chunk.form, chunk.data) for chunk in chunks(shard)] == [("file", b"one\ntwo\n")]


def test_a_shard_holds_at_least_a_byte():
    with pytest.raises(ConfigError, match=r"--shard-size: got 0 bytes, expected at least 1"):
        cut([], shard_bytes=0)


@pytest.mark.parametrize("is_short", [False, True])
def test_damaged_gzip_names_the_file(tmp_path, is_short):
    path = tmp_path / "a.jsonl.gz"
    whole = gzip.compress(bytes(range(256)) * 100)
    path.write_bytes(whole[:-50] if is_short else whole[:100] + b"\xff" * 100)
    with pytest.raises(CorpusError, match=r"a\.jsonl\.gz: damaged or cut short"):
        read_all([path], 10)


def test_zstandard_is_read_across_frames_and_damage_is_named(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "a.jsonl.zst"
    frames = [zstandard.compress(text) for text in (b"one\n", b"two\n")]
    path.write_bytes(b"".join(frames))
    assert read_all([path], 10) == b"one\ntwo\n"
    path.write_bytes(b"\x28\xb5\x2f\xfd" + b"\xff" * 40)
    with pytest.raises(CorpusError, match=r"a\.jsonl\.zst: damaged or cut short"):
        read_all([path], 10)


@pytest.mark.parametrize(
    ("name", "library", "extra"),
    [("a.jsonl.zst", "zstandard", "zstd"), ("a.parquet", "pyarrow.parquet", "parquet")],
)
def test_missing_libraries_are_named_with_their_extra(tmp_path, monkeypatch, name, library, extra):
    monkeypatch.setitem(__import__("sys").modules, library, None)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(CorpusError, match=rf"pip install megatron-d3\[{extra}\]"):
        read_all([tmp_path / name], 10)


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(CorpusError, match=r"a\.parquet: not a Parquet file that can be read"):
        cut([tmp_path / "a.parquet"], shard_bytes=10)


def test_a_file_that_vanishes_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x\n")
    (shard,) = cut([path], shard_bytes=10)
    path.unlink()
    with pytest.raises(CorpusError, match=r"a\.jsonl: cannot be read: No such file"):
        list(chunks(shard))
