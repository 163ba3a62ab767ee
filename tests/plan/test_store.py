"""The files of a plan: what is written, what a crash or a full disk leaves."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_d3.errors import PlanError
from megatron_d3.plan.files import AppendFile, write_atomically
from megatron_d3.plan.header import PlanFile
from megatron_d3.plan.reader import PlanReader
from megatron_d3.plan.rows import LossRow, RoundRow, iter_lines, last_line, sealed, unseal
from megatron_d3.plan.segment import Segment
from megatron_d3.plan.snapshot import Snapshot
from megatron_d3.plan.state import DeciderState
from megatron_d3.plan.store import Cut, PlanStore
from megatron_d3.types import StepSignals
from tests.plan_helpers import files_of, header, make_decider


def segments(num_rounds: int, mix: str = "0.5,0.25,0.25") -> list[tuple[DeciderState, Segment]]:
    decider = make_decider(header(mix=mix), (0, 1, 2))
    state, made = decider.init(), []
    for _ in range(num_rounds):
        decided = decider.decide(state)
        assert decided is not None
        state = decided[0]
        made.append(decided)
    return made


def new_store(directory: Path) -> PlanStore:
    return PlanStore.create(directory, PlanFile.begin(header(mix="0.5,0.25,0.25")))


def step(iteration: int, *sums: float, is_skipped: bool = False) -> StepSignals:
    return StepSignals(iteration, 4 * iteration, np.array(sums), np.array([8, 0, 8]), is_skipped)


def test_files_hold_what_was_appended(tmp_path: Path) -> None:
    store = new_store(tmp_path / "d3")
    for _, segment in segments(2):
        store.append_segment(segment, iteration=0)
    store.append_ledger(step(1, 0.1, 0.0, 3.0))
    store.append_ledger(step(2, float("inf"), 0.0, float("nan"), is_skipped=True))
    store.append_eval(2, "valid", np.array([1.5, 0.0, 2.0]), np.array([8, 0, 8]))
    store.close()
    files = files_of(tmp_path / "d3")
    assert sorted(files) == ["evals.jsonl", "ledger.jsonl", "lock", "plan.json", "positions.bin",
                             "rounds.jsonl"]
    assert files["positions.bin"] == b"".join(s.records.tobytes() for _, s in segments(2))
    assert len(files["positions.bin"]) == 80
    chains = [f"{s.chain:016x}" for _, s in segments(2)]
    assert files["rounds.jsonl"].decode() == (
        '{"round":0,"iteration":0,"step":0,"start":0,"stop":4,'
        f'"weights":{{"a":0.5,"b":0.25,"c":0.25}},"hash":"{chains[0]}"}}\n'
        f'{{"round":1,"iteration":0,"step":1,"start":4,"stop":8,"hash":"{chains[1]}"}}\n')
    rows = [json.loads(line) for line in files["ledger.jsonl"].splitlines()]
    assert [{k: v for k, v in row.items() if k != "hash"} for row in rows] == [
        {"iteration": 1, "consumed": 4, "loss": {"a": [0.1, 8], "c": [3.0, 8]}, "skipped": False},
        {"iteration": 2, "consumed": 8, "loss": {"a": [None, 8], "c": [None, 8]}, "skipped": True}]
    assert json.loads(files["evals.jsonl"])["split"] == "valid"


def test_floats_round_trip_exactly() -> None:
    rng = np.random.default_rng(0)
    sums = np.concatenate([rng.random(50) * 10.0 ** rng.integers(-300, 300, 50), [5e-324, 0.1]])
    names = [f"d{i}" for i in range(52)]
    signals = StepSignals(1, 4, sums, np.ones(52, np.int64))
    line, _ = sealed(LossRow.of_step(signals, names).to_body(), "0" * 16)
    assert LossRow.from_line(line).to_signals(names).loss_sums.tobytes() == sums.tobytes()


def test_rows_of_domains_without_tokens_are_left_out_and_come_back_as_zero() -> None:
    row = LossRow.of_step(step(3, 1.0, 7.0, float("nan")), "abc")
    assert dict(row.losses) == {"a": (1.0, 8), "c": (None, 8)}
    back = row.to_signals("abc")
    np.testing.assert_array_equal(back.loss_sums, [1.0, 0.0, np.nan])
    assert back.num_tokens.tolist() == [8, 0, 8]


def test_a_round_row_round_trips() -> None:
    row = RoundRow(3, 2, 5, 20, 24, {"a": 1 / 3, "b": 2 / 3}, (1 << 64) - 1)
    assert RoundRow.from_line(row.to_line()) == row


def test_the_seal_notices_any_changed_byte_and_a_missing_row() -> None:
    first, seal = sealed(b'{"iteration":1}', "0" * 16)
    second, _ = sealed(b'{"iteration":2}', seal)
    assert unseal(first, "0" * 16) == seal
    assert unseal(second, seal) is not None
    assert unseal(second, "0" * 16) is None
    for i in range(len(first) - 1):
        assert unseal(first[:i] + b"~" + first[i + 1:], "0" * 16) is None


@pytest.mark.parametrize(("content", "last", "num_complete"), [
    (b"", None, 0), (b"torn", None, 0), (b"a\n", (b"a\n", 2), 1), (b"a\nbb\n", (b"bb\n", 5), 2),
    (b"a\nbb\ntorn", (b"bb\n", 5), 2), (b"x" * 200_000 + b"\ny\ntorn", (b"y\n", 200_003), 2),
    (b"a\n" + b"x" * 200_000 + b"\n", (b"x" * 200_000 + b"\n", 200_003), 2)])
def test_torn_last_lines_do_not_count(
    tmp_path: Path, content: bytes, last: tuple[bytes, int] | None, num_complete: int
) -> None:
    path = tmp_path / "rows"
    path.write_bytes(content)
    assert last_line(path) == last
    assert len(list(iter_lines(path))) == num_complete
    assert last_line(tmp_path / "none") is None and not list(iter_lines(tmp_path / "none"))


def test_reader_refuses_positions_that_are_not_decided(tmp_path: Path) -> None:
    store = PlanStore.create(tmp_path / "d3", PlanFile.begin(
        header(mix="0.5,0.25,0.25"), iteration=5, position=20))
    reader = PlanReader(tmp_path / "d3")
    assert reader.frontier == 20
    decider = make_decider(header(mix="0.5,0.25,0.25"), (0, 1, 2))
    decided = decider.decide(decider.init(position=20, iteration=5))
    assert decided is not None
    store.append_segment(decided[1], iteration=5)
    assert reader.frontier == 24
    assert reader.positions(21, 23).tolist() == decided[1].records[1:3].tolist()
    assert store.positions(20, 24).tolist() == decided[1].records.tolist()
    assert len(reader.positions(24, 24)) == 0
    with pytest.raises(PlanError, match="position 19 was asked for, the plan starts at 20"):
        reader.positions(19, 22)
    with pytest.raises(PlanError, match="position 24 was asked for, decided are those below 24"):
        reader.positions(20, 25)
    with pytest.raises(PlanError, match=r"positions.bin: holds 40 bytes, the rounds need 50"):
        store.positions(20, 25)


def test_damaged_rows_are_named(tmp_path: Path) -> None:
    new_store(tmp_path / "d3").close()
    reader = PlanReader(tmp_path / "d3")
    (tmp_path / "d3/rounds.jsonl").write_bytes(b'{"round":0}\n')
    (tmp_path / "d3/ledger.jsonl").write_bytes(b"nonsense\n")
    (tmp_path / "d3/evals.jsonl").write_bytes(b"[]\n")
    with pytest.raises(PlanError, match=r"rounds.jsonl: damaged row b'\{\"round\":0\}"):
        list(reader.rounds())
    with pytest.raises(PlanError, match=r"ledger.jsonl: damaged row b'nonsense"):
        list(reader.ledger())
    with pytest.raises(PlanError, match=r"evals.jsonl: damaged row"):
        list(reader.evals())


@pytest.mark.parametrize("row", [b'{"iteration":1}\n', b"\x93\n", b"[]\n"])
def test_a_writer_refuses_a_last_row_without_its_hash(tmp_path: Path, row: bytes) -> None:
    new_store(tmp_path / "d3").close()
    (tmp_path / "d3/evals.jsonl").write_bytes(row)
    with pytest.raises(PlanError, match=r"evals.jsonl: damaged row"):
        PlanStore(tmp_path / "d3")


def test_no_plan_and_a_plan_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no plan here \(plan.json is missing\)"):
        PlanReader(tmp_path)
    new_store(tmp_path / "d3").close()
    with pytest.raises(PlanError, match=r"plan.json is there already; resume that plan"):
        new_store(tmp_path / "d3")
    (tmp_path / "d3/plan.json").unlink()
    with pytest.raises(PlanError, match=r"positions.bin is there already"):
        new_store(tmp_path / "d3")


def _claim(directory: Path, answers: multiprocessing.Queue[str]) -> None:
    try:
        PlanStore(directory)
    except PlanError as error:
        answers.put(str(error))
    else:
        answers.put("claimed")


def test_a_plan_json_of_random_bytes_is_named(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(b"\xb1\xff{")
    with pytest.raises(PlanError, match=r"plan.json: not JSON"):
        PlanReader(tmp_path)


def test_two_processes_cannot_write_one_plan(tmp_path: Path) -> None:
    store = new_store(tmp_path / "d3")
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.Queue[str] = context.Queue()
    for expected in ("another process is writing this plan", "claimed"):
        other = context.Process(target=_claim, args=(tmp_path / "d3", answers))
        other.start()
        assert expected in answers.get(timeout=30)
        other.join()
        store.close()


def test_the_same_evaluation_is_recorded_once(tmp_path: Path) -> None:
    store = new_store(tmp_path / "d3")
    for _ in range(2):
        store.append_eval(5, "valid", np.array([1.0, 2.0, 3.0]), np.array([8, 8, 8]))
        store.append_eval(5, "test", np.array([1.0, 2.0, 3.0]), np.array([8, 8, 8]))
        store.append_eval(5, "test", np.array([1.0, 2.0, 3.0]), np.array([8, 8, 8]))
    rows = [(row.iteration, row.split) for row, _, _ in PlanReader(store.directory).evals()]
    assert rows == [(5, "valid"), (5, "test"), (5, "valid"), (5, "test")]


def test_snapshots_have_the_same_bytes_and_come_back(tmp_path: Path) -> None:
    store = new_store(tmp_path / "d3")
    state, segment = segments(1)[0]
    store.append_segment(segment, iteration=0)
    path = store.snapshot(state).path
    content = path.read_bytes()
    assert path.name == "00000000-00000000.npz"
    path.unlink()
    assert store.snapshot(state).path.read_bytes() == content
    again = Snapshot(path)
    assert (again.round, again.iteration, again.generation) == (0, 0, 0)
    assert again.rounds_bytes == (tmp_path / "d3/rounds.jsonl").stat().st_size
    assert again.state.cursors.tolist() == state.cursors.tolist()


def test_bad_snapshots_are_named(tmp_path: Path) -> None:
    path = tmp_path / "00000003-00000004.npz"
    path.write_bytes(b"PK nonsense")
    with pytest.raises(PlanError, match=r"00000003-00000004.npz: cannot be read"):
        _ = Snapshot(path).state
    np.savez(path, version=np.array(9))
    with pytest.raises(PlanError, match=r"state version 9, expected 1 or 2;"):
        _ = Snapshot(path).state


def test_set_aside_moves_tails_and_keeps_the_rest(tmp_path: Path) -> None:
    store = new_store(tmp_path / "d3")
    made = segments(3)
    ends = []
    for state, segment in made:
        store.append_segment(segment, iteration=0)
        store.snapshot(state)
        ends.append((tmp_path / "d3/rounds.jsonl").stat().st_size)
    before = files_of(tmp_path / "d3")
    stale = tmp_path / "d3/state/00000002-00000000.npz"
    cut = Cut(store.plan, {"rounds.jsonl": ends[0], "positions.bin": 40, "ledger.jsonl": 0,
                           "evals.jsonl": 0}, (stale,), iteration=1)
    aside = store.set_aside(cut)
    assert aside == tmp_path / "d3/abandoned-0001"
    after = files_of(tmp_path / "d3")
    for name in ("rounds.jsonl", "positions.bin"):
        assert after[name] + (aside / name).read_bytes() == before[name]
    assert after["positions.bin"] == before["positions.bin"][:40]
    assert (aside / "state" / stale.name).read_bytes() == before[f"state/{stale.name}"]
    assert json.loads((aside / "note.json").read_text())["resumed_at_iteration"] == 1
    assert not stale.exists() and (tmp_path / "d3/state/00000001-00000000.npz").exists()
    again = replace(cut, arrays=())
    assert store.set_aside(again) is None  # nothing lies beyond it any more
    store.append_segment(made[1][1], iteration=0)
    assert store.set_aside(again) == tmp_path / "d3/abandoned-0002"


def test_an_unfinished_copy_is_made_again(tmp_path: Path) -> None:
    store = new_store(tmp_path / "d3")
    store.append_segment(segments(1)[0][1], iteration=0)
    (tmp_path / "d3/abandoned-0001.tmp").mkdir()
    (tmp_path / "d3/abandoned-0001.tmp/junk").write_bytes(b"x")
    (tmp_path / "d3/plan.json.tmp").write_bytes(b"half")
    store.close()
    store = PlanStore(tmp_path / "d3")
    assert not (tmp_path / "d3/plan.json.tmp").exists()
    aside = store.set_aside(Cut(store.plan, {"rounds.jsonl": 0, "positions.bin": 0}, (), 0))
    assert aside is not None and not (aside / "junk").exists()
    assert [p.name for p in (tmp_path / "d3").glob("abandoned-*")] == ["abandoned-0001"]


@contextmanager
def size_limit(num_bytes: int) -> Iterator[None]:
    """Files cannot grow beyond `num_bytes` in this block, also for root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "file")
    file.append(b"12345678")
    with (size_limit(12), pytest.raises(
            PlanError, match=r"file: cannot write the plan: File too large; raise the file size "
                             r"limit \(ulimit -f\), or put the plan elsewhere with --d3-plan-dir")):
        file.append(b"abcdefgh")
    assert (tmp_path / "file").read_bytes() == b"12345678"
    file.append(b"9")
    assert (tmp_path / "file").read_bytes() == b"123456789"


def test_a_segment_whose_row_cannot_be_written_is_not_written(tmp_path: Path) -> None:
    store = new_store(tmp_path / "d3")
    (_, first), (state, second) = segments(2)
    store.append_segment(first, iteration=0)
    before = files_of(tmp_path / "d3")
    with size_limit(120), pytest.raises(PlanError, match=r"rounds.jsonl: cannot write"):
        store.append_segment(second, iteration=0)  # 80 bytes of positions fit, the row does not
    with size_limit(10), pytest.raises(PlanError, match=r"00000001-00000000.npz: cannot write"):
        store.snapshot(state)
    assert files_of(tmp_path / "d3") == before
    store.append_segment(second, iteration=0)
    assert PlanReader(tmp_path / "d3").positions(0, 8).tolist() == [
        *first.records.tolist(), *second.records.tolist()]


def test_an_atomic_write_that_fails_keeps_the_old_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "plan.json", b"old")
    with size_limit(2), pytest.raises(PlanError, match="cannot write the plan"):
        write_atomically(tmp_path / "plan.json", b"new and longer")
    assert files_of(tmp_path) == {"plan.json": b"old"}


@contextmanager
def mounted(directory: Path, options: str) -> Iterator[None]:
    """A small file system of our own; skips where the user may not mount one."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a small file system here: {error}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True, capture_output=True)


def test_a_full_disk_is_named_and_the_plan_stays_whole(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with mounted(disk, "size=64k"):
        store = new_store(disk / "d3")
        made = segments(20)
        with (disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space"):
            while True:
                filler.write(b"x" * 512)
        written = 0
        with pytest.raises(PlanError, match=r"disk/d3/.*: cannot write the plan: No space left on "
                                            r"device; free some space there, or put the plan"):
            for _, segment in made:
                store.append_segment(segment, iteration=0)
                written += 1
            for iteration in range(1, 1000):
                store.append_ledger(step(iteration, 1.0, 0.0, 1.0))
        with pytest.raises(PlanError, match=r"No space left on device"):
            store.snapshot(made[0][0])
        with pytest.raises(PlanError, match=r"No space left on device"):
            PlanStore.create(disk / "other", store.plan)
        assert not (disk / "other/plan.json").exists()
        (disk / "filler").unlink()
        for _, segment in made[written:]:
            store.append_segment(segment, iteration=0)
        store.close()
        reader = PlanReader(disk / "d3")
        assert reader.positions(0, 80).tobytes() == b"".join(
            segment.records.tobytes() for _, segment in made)


def test_a_read_only_disk_is_named(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=64k,ro"), pytest.raises(
            PlanError, match=r"disk/d3: cannot make the plan: Read-only file system; it is on a "
                             r"read-only file system"):
        new_store(tmp_path / "disk/d3")


def test_a_path_below_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(PlanError, match=r"file/d3: cannot make the plan: Not a directory; a part of "
                                        r"the path is a file"):
        new_store(tmp_path / "file/d3")


@contextmanager
def without_privileges() -> Iterator[None]:
    """Root may write anywhere: be nobody in this block."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("mode", [0o500, 0o000])
def test_a_directory_without_permission_is_named(tmp_path: Path, mode: int) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=mode)
    with without_privileges(), pytest.raises(
            PlanError, match=r"closed/d3.* the plan: Permission denied; make it writable"):
        new_store(closed / "d3")
    with without_privileges(), pytest.raises(PlanError, match=r"d3/plan.json.*Permission denied"):
        PlanReader(closed / "d3")
    assert list(closed.iterdir()) == []
