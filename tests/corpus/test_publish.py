"""Files appear together or not at all, whenever the writer dies."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_d3.corpus.publish import Publication
from megatron_d3.errors import CorpusError

SUFFIXES = [".bin", ".json", ".idx"]


def publish(prefix: Path, text: bytes, **flags) -> None:
    with Publication(prefix, SUFFIXES, **flags) as new:
        for suffix in SUFFIXES:
            new.write(suffix, [text])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_appear_when_the_block_ends(tmp_path):
    with Publication(tmp_path / "a", SUFFIXES) as new:
        new.write(".bin", [b"1", b"2"])
        assert not (tmp_path / "a.bin").exists()
    assert contents(tmp_path) == {"a.bin": b"12"}


def test_nothing_is_left_when_the_block_raises(tmp_path):
    with pytest.raises(KeyError), Publication(tmp_path / "a", SUFFIXES) as new:
        new.write(".bin", [b"1"])
        raise KeyError
    assert contents(tmp_path) == {}


def test_existing_files_are_kept_without_overwrite(tmp_path):
    publish(tmp_path / "a", b"old")
    with pytest.raises(CorpusError, match=r"a.bin: exists; .*--overwrite"):
        publish(tmp_path / "a", b"new")
    assert set(contents(tmp_path).values()) == {b"old"}


def test_overwrite_replaces_all_and_removes_what_is_not_written_again(tmp_path):
    publish(tmp_path / "a", b"old")
    with Publication(tmp_path / "a", SUFFIXES, is_overwriting=True) as new:
        new.write(".bin", [b"new"])
        new.write(".idx", [b"new"])
    assert contents(tmp_path) == {"a.bin": b"new", "a.idx": b"new"}


def test_overwriting_by_a_link_to_itself_leaves_one_file(tmp_path):
    publish(tmp_path / "a", b"old")
    with Publication(tmp_path / "a", SUFFIXES, is_overwriting=True) as new:
        new.link(".bin", tmp_path / "a.bin")
        new.write(".idx", [b"new"])
    assert contents(tmp_path) == {"a.bin": b"old", "a.idx": b"new"}


@pytest.mark.parametrize("deadly", range(1, 7))
def test_killed_at_any_rename_the_old_files_are_intact(tmp_path, deadly):
    """Six renames replace three files; die before each, as a SIGKILL would."""
    publish(tmp_path / "a", b"old")
    code = f"""
import os, signal
from megatron_d3.corpus import publish
calls, rename = 0, os.replace
def dying(source, target):
    global calls
    calls += 1
    if calls == {deadly}:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, target)
publish.os.replace = dying
with publish.Publication("a", {SUFFIXES}, is_overwriting=True) as new:
    for suffix in {SUFFIXES}:
        new.write(suffix, [b"new"])
"""
    path = os.pathsep.join(sys.path)
    died = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert died.returncode == -signal.SIGKILL
    left = contents(tmp_path)
    old = {name.split(".replaced-")[0] for name, text in left.items() if text == b"old"}
    assert old == {"a.bin", "a.json", "a.idx"}
    if "a.idx" in left:  # a corpus under the final name is whole
        assert {left[f"a{suffix}"] for suffix in SUFFIXES} == {b"old"}


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(CorpusError, match=r"no such folder; create it first"):
        publish(tmp_path / "none" / "a", b"new")


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM])
def test_a_bin_that_cannot_be_linked_names_copy(tmp_path, monkeypatch, code):
    def refuse(source, target):
        raise OSError(code, os.strerror(code), source)

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "in.bin").write_bytes(b"1")
    with (
        pytest.raises(CorpusError, match=r"cannot be linked to .*in.bin .*or --copy"),
        Publication(tmp_path / "a", SUFFIXES) as new,
    ):
        new.link(".bin", tmp_path / "in.bin")
    assert contents(tmp_path) == {"in.bin": b"1"}


def test_no_space_left_leaves_nothing_and_says_so(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CorpusError, match=r"No space left on device; nothing was changed"):
        publish(tmp_path / "a", b"new")
    assert contents(tmp_path) == {}


def test_other_errors_of_the_system_name_the_file(tmp_path, monkeypatch):
    def refuse(source, target):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(target))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(CorpusError, match=r"a.bin: cannot be written: Permission denied"):
        publish(tmp_path / "a", b"new")
    assert contents(tmp_path) == {}


def test_a_link_that_fails_for_another_reason_is_reported(tmp_path):
    with (
        pytest.raises(CorpusError, match=r"cannot be written: No such file"),
        Publication(tmp_path / "a", SUFFIXES) as new,
    ):
        new.link(".bin", tmp_path / "none.bin")


def test_files_are_concatenated(tmp_path):
    (tmp_path / "x").write_bytes(b"12")
    (tmp_path / "y").write_bytes(b"3")
    with Publication(tmp_path / "a", SUFFIXES) as new:
        new.concatenate(".bin", [tmp_path / "x", tmp_path / "y", tmp_path / "x"])
    assert (tmp_path / "a.bin").read_bytes() == b"12312"


def test_what_a_dead_process_was_writing_is_removed(tmp_path):
    host = socket.gethostname()
    (tmp_path / f"a.bin.tmp-{host}-0999999999").write_bytes(b"dead")
    (tmp_path / f"a.bin.tmp-{host}-1").write_bytes(b"alive")
    (tmp_path / "a.bin.tmp-elsewhere-0999999999").write_bytes(b"not known")
    publish(tmp_path / "a", b"new")
    left = {name for name in contents(tmp_path) if ".tmp-" in name}
    assert left == {f"a.bin.tmp-{host}-1", "a.bin.tmp-elsewhere-0999999999"}


def test_what_a_killed_process_had_put_aside_is_named(tmp_path):
    (tmp_path / "a.idx.replaced-12").write_bytes(b"old")
    with pytest.raises(CorpusError, match=r"a.idx.replaced-12: put aside by .* back to a.idx, or"):
        publish(tmp_path / "a", b"new")
