"""A killed run that is resumed leaves the same bytes as one that never stopped."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_d3.errors import PlanError, ResumeError
from megatron_d3.plan import apportion
from megatron_d3.plan.audit import audit
from megatron_d3.plan.batch_schedule import BatchSchedule
from megatron_d3.plan.header import RunHeader
from megatron_d3.plan.keeper import PlanKeeper
from megatron_d3.plan.reader import PlanReader
from tests.plan_helpers import Crash, Trainer, domains, files_of, header, make_decider

HEAD = header(total=40)  # 10 steps of 4 samples, an online mixer, read-ahead of 8


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    directory = tmp_path_factory.mktemp("whole") / "d3"
    Trainer(directory, HEAD).run()
    return files_of(directory)


def test_the_toy_run_exercises_what_it_should(tmp_path: Path, whole: dict[str, bytes]) -> None:
    assert {name.partition("/")[0] for name in whole} == {
        "plan.json", "positions.bin", "rounds.jsonl", "ledger.jsonl", "evals.jsonl", "state", "lock"}
    rows = [json.loads(line) for line in whole["rounds.jsonl"].splitlines()]
    assert [row["iteration"] for row in rows] == [0, 0, 0, 1, 2, 3, 4, 5, 6, 7]  # read-ahead
    # The mixer moves, but not by the overflow of step 7.
    assert ["weights" in row for row in rows] == [True, False, False, *[True] * 6, False]
    assert sum(name.startswith("state/") for name in whole) == 2


@pytest.mark.parametrize("killed_at", range(1, 11))
def test_resume_from_the_last_checkpoint(
    tmp_path: Path, whole: dict[str, bytes], killed_at: int
) -> None:
    Trainer(tmp_path / "d3", HEAD).run(stop_at=killed_at)
    stopped = files_of(tmp_path / "d3")
    keeper = PlanKeeper.open(tmp_path / "d3", HEAD, make_decider, iteration=killed_at,
                             consumed=4 * killed_at)
    keeper.close()
    assert files_of(tmp_path / "d3") == stopped  # a resume where it stopped changes nothing
    Trainer(tmp_path / "d3", HEAD).run(killed_at, 4 * killed_at)
    assert files_of(tmp_path / "d3") == whole
    assert not list((tmp_path / "d3").glob("abandoned-*"))


@pytest.mark.parametrize("checkpoint", range(10))
def test_resume_from_an_older_checkpoint(
    tmp_path: Path, whole: dict[str, bytes], checkpoint: int
) -> None:
    Trainer(tmp_path / "stopped", HEAD).run(stop_at=checkpoint)
    Trainer(tmp_path / "d3", HEAD).run(stop_at=9)
    before = files_of(tmp_path / "d3")
    keeper = PlanKeeper.open(tmp_path / "d3", HEAD, make_decider, iteration=checkpoint,
                             consumed=4 * checkpoint)
    keeper.close()
    kept = files_of(tmp_path / "d3")
    assert kept == files_of(tmp_path / "stopped")  # as if it had been stopped there
    aside = files_of(tmp_path / "d3/abandoned-0001") if checkpoint < 9 else {}
    for name in before:  # nothing is lost
        assert kept.get(name, b"") + (aside.get(name, b"") if name != "plan.json" else b"") == (
            before[name])
    Trainer(tmp_path / "d3", HEAD).run(checkpoint, 4 * checkpoint)
    assert files_of(tmp_path / "d3") == whole


class CrashingCalls:
    """Counts calls of some `os` functions and dies at one, before, in the middle of or after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.count = 0
        self.crash_at: tuple[int, str] | None = None
        for name in names:
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.crash_at is None or self.crash_at[0] != self.count:
                return function(*args, **kwargs)
            when = self.crash_at[1]
            if when == "middle" and name == "write":
                function(args[0], args[1][:len(args[1]) // 2])
            elif when == "after":
                function(*args, **kwargs)
            raise Crash
        return call


def test_a_crash_at_any_write_is_survived(
    tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = CrashingCalls(monkeypatch, "write", "replace")
    Trainer(tmp_path / "count", HEAD).run()
    num_calls = calls.count
    assert num_calls == 1 + 2 * 10 + 10 + 2 + 2  # plan, segments, ledger, evals, states
    for at in range(2, num_calls + 1):
        for when in ("before", "middle", "after"):
            directory = tmp_path / f"{at}{when}"
            calls.count, calls.crash_at = 0, (at, when)
            trainer = Trainer(directory, HEAD)
            with pytest.raises(Crash):
                trainer.run()
            calls.crash_at = None
            done = sum(1 for _ in PlanReader(directory).ledger())
            checkpoint = (done // 3) * 3
            trainer.run(checkpoint, 4 * checkpoint)
            assert files_of(directory) == whole, (at, when)
            shutil.rmtree(directory)


def test_a_crash_while_resuming_is_survived(
    tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = CrashingCalls(monkeypatch, "write", "replace", "rename", "ftruncate")
    Trainer(tmp_path / "start", HEAD).run(stop_at=9)
    at = 0
    while True:
        at += 1
        directory = tmp_path / f"{at}"
        shutil.copytree(tmp_path / "start", directory)
        calls.count, calls.crash_at = 0, (at, "before")
        try:
            PlanKeeper.open(directory, HEAD, make_decider, iteration=5, consumed=20).close()
        except Crash:
            pass
        else:
            break
        calls.crash_at = None
        Trainer(directory, HEAD).run(5, 20)
        assert files_of(directory) == whole, at
    assert at > 6


def test_lost_positions_of_kept_rounds_are_written_again(
    tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """After a power failure the rows may be on disk and their positions not."""
    Trainer(tmp_path / "d3", HEAD).run(stop_at=9)
    with (tmp_path / "d3/positions.bin").open("r+b") as file:
        file.truncate(10 * 17 + 3)
    Trainer(tmp_path / "d3", HEAD).run(9, 36)
    assert files_of(tmp_path / "d3") == whole


def test_the_order_of_a_pure_mixer_does_not_depend_on_the_read_ahead(tmp_path: Path) -> None:
    head = header(total=40, mix="0.5,0.3,0.2")
    positions = []
    for read_ahead in (0, 5, 8, 30):
        directory = tmp_path / str(read_ahead)
        Trainer(directory, head, read_ahead=read_ahead).run()
        positions.append(files_of(directory)["positions.bin"])
    assert len(set(positions)) == 1
    Trainer(tmp_path / "x", head, read_ahead=30).run(stop_at=4)
    Trainer(tmp_path / "x", head, read_ahead=0).run(4, 16)
    assert files_of(tmp_path / "x")["positions.bin"] == positions[0]


# --- what is refused -------------------------------------------------------------------------------

MIX = {"type": "0.5,0.3,0.2"}
FIXED = header(total=40, mix="0.5,0.3,0.2")


def changed(**changes: Any) -> RunHeader:
    return replace(FIXED, **changes)


def with_config(**changes: Any) -> RunHeader:
    return replace(FIXED, config={**FIXED.config, **changes})


def other_corpus(head: RunHeader, name: str, **changes: Any) -> RunHeader:
    return replace(head, domains=tuple(
        replace(d, **changes) if d.name == name else d for d in head.domains))


REFUSED = {
    "seq_length": (changed(seq_length=16, domains=domains(50, 25, 10, seq_length=16)),
                   "made with seq_length 8, now 16; keep the old one"),
    "seed": (changed(seed=8, domains=domains(100, 50, 20, seed=8)),
             "made with seed 7, now 8; keep the old one"),
    "tokenizer": (changed(tokenizer="other"), "made with tokenizer toy, now other; use the old one"),
    "added": (changed(domains=domains(100, 50, 20, 10)),
              r'made with domains \["a", "b", "c"\], now \["a", "b", "c", "d"\]; name the same'),
    "order": (changed(domains=FIXED.domains[::-1]),
              r'made with domain order \["a", "b", "c"\], now \["c", "b", "a"\]; list the domains'),
    "corpus": (other_corpus(FIXED, "b", fingerprint="new"),
               r"made with domains.b.fingerprint hash-of-b, now new; its files, order, valid_fraction"),
    "size": (other_corpus(FIXED, "b", num_samples=51),
             r"made with domains.b.num_samples 50, now 51; its files, valid_fraction or"),
    "tokens": (other_corpus(FIXED, "b", num_tokens=401),
               r"made with domains.b.num_tokens 400, now 401; its files, valid_fraction or"),
    "mixer": (with_config(mix={"type": "online"}),
              r"made with mix.type 0.5,0.3,0.2, now online; keep the old value"),
    "parameter": (with_config(mix={**MIX, "alpha": 0.5}), r"made with mix.alpha null, now 0.5"),
    "round_steps": (with_config(round_steps=2), r"made with round_steps 1, now 2"),
    "sampling": (with_config(sampling="multinomial"),
                 r"made with sampling apportion, now multinomial"),
    "versions": (changed(versions={"toy": 2}),
                 r"made with versions.toy 1, now 2; use the Megatron-D3 that wrote the plan"),
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("stopped") / "d3"
    Trainer(directory, FIXED).run(stop_at=6)
    return directory


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("checkpoint", [0, 4])
def test_changes_are_refused_and_nothing_is_written(
    tmp_path: Path, stopped: Path, name: str, checkpoint: int
) -> None:
    shutil.copytree(stopped, tmp_path / "d3")
    head, message = REFUSED[name]
    with pytest.raises(ResumeError, match=rf"plan .*d3: {message}.*--d3-resume fork"):
        PlanKeeper.open(tmp_path / "d3", head, make_decider, iteration=checkpoint,
                        consumed=4 * checkpoint)
    assert files_of(tmp_path / "d3") == files_of(stopped)
    assert not list((tmp_path / "d3").glob("abandoned-*"))


def test_every_refused_change_is_told_at_once(stopped: Path) -> None:
    head = changed(seed=8, domains=domains(100, 50, 20, seed=8), tokenizer="other")
    with pytest.raises(ResumeError) as error:
        PlanKeeper.open(stopped, head, make_decider, iteration=4, consumed=16)
    assert [line.partition("made with ")[2][:9] for line in str(error.value).splitlines()] == [
        "seed 7, n", "tokenizer"]


def test_a_longer_run_is_refused_where_weights_may_depend_on_it(tmp_path: Path) -> None:
    for mix, changes in (("online", {}), ("0.5,0.5,0", {"max_samples": [100, 100, 100]})):
        head = header(total=40)
        head = replace(head, config={**head.config, "mix": {"type": mix, **changes}})
        Trainer(tmp_path / mix, head).run(stop_at=4)
        with pytest.raises(ResumeError, match=r"made with total_samples 40, now 80; the weights may "
                                              r"depend on it"):
            PlanKeeper.open(tmp_path / mix, replace(head, total_samples=80), make_decider,
                            iteration=4, consumed=16)


REJECTED_CHECKPOINTS = {
    "newer": (8, 32, (r"its ledger ends at iteration 6, the checkpoint is newer \(iteration 8\); load "
                     r"a checkpoint of iteration 6 or before")),
    "other run": (4, 20, (r"had consumed 16 samples at iteration 4, the checkpoint 20; it is a "
                         r"checkpoint of another run")),
    "other start": (0, 4, r"had consumed 0 samples at iteration 0, the checkpoint 4"),
    "too far": (5, 44, r"the run ends after 40 samples, the checkpoint has consumed 44; raise"),
}


@pytest.mark.parametrize("name", REJECTED_CHECKPOINTS)
def test_checkpoints_that_do_not_fit_are_refused(stopped: Path, name: str) -> None:
    iteration, consumed, message = REJECTED_CHECKPOINTS[name]
    before = files_of(stopped)
    for mode in ("strict", "fork"):
        with pytest.raises(ResumeError, match=message):
            PlanKeeper.open(stopped, FIXED, make_decider, iteration=iteration, consumed=consumed,
                            mode=mode)  # type: ignore[arg-type]
    assert files_of(stopped) == before


def test_a_checkpoint_without_a_plan(tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match=r"plan .*d3: there is none, but the checkpoint is of "
                                          r"iteration 4; .*--d3-resume fork"):
        PlanKeeper.open(tmp_path / "d3", FIXED, make_decider, iteration=4, consumed=16)
    assert not (tmp_path / "d3").exists()
    Trainer(tmp_path / "d3", FIXED).run(4, 16, mode="fork", stop_at=7)
    reader = PlanReader(tmp_path / "d3")
    assert (reader.first_position, reader.frontier) == (16, 36)
    assert reader.positions(16, 18).tolist() == [(0, 0), (1, 0)]
    Trainer(tmp_path / "d3", FIXED).run(6, 24)
    with pytest.raises(ResumeError, match=r"starts at iteration 4, the checkpoint is of iteration 3"):
        PlanKeeper.open(tmp_path / "d3", FIXED, make_decider, iteration=3, consumed=12)
    Trainer(tmp_path / "again", FIXED).run(4, 16, mode="fork")
    assert files_of(tmp_path / "again") == files_of(tmp_path / "d3")


def rewrite(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert content.count(old) >= 1 and len(old) == len(new)
    path.write_bytes(content.replace(old, new, 1))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "weight": (lambda d: rewrite(d / "rounds.jsonl", b'"a":0.5', b'"a":0.6'),
               r"round 0 \(positions 0-3\): weights .* when computed again; the plan was changed"),
    "hash": (lambda d: rewrite(d / "rounds.jsonl", b'"step":3', b'"step":9'),
             r"round 3 \(positions 12-15\): step 9 in rounds.jsonl, 3 when computed again"),
    "sample": (lambda d: rewrite(d / "positions.bin", b"\0\0\3\0", b"\0\0\4\0"),
               r"round 1: positions 4-7 of positions.bin are not those that the round decided"),
    "loss": (lambda d: rewrite(d / "ledger.jsonl", b'"consumed":8', b'"consumed":9'),
             r"ledger.jsonl: the row of iteration 2 was changed, or rows before it are missing"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_changed_plan_is_refused(tmp_path: Path, name: str) -> None:
    damage, message = DAMAGE[name]
    Trainer(tmp_path / "d3", FIXED).run(stop_at=6, snapshot_every=100)
    damage(tmp_path / "d3")
    before = files_of(tmp_path / "d3")
    with pytest.raises(ResumeError, match=message):
        PlanKeeper.open(tmp_path / "d3", FIXED, make_decider, iteration=6, consumed=24)
    assert files_of(tmp_path / "d3") == before


def test_rows_missing_in_the_middle_are_refused(tmp_path: Path) -> None:
    Trainer(tmp_path / "d3", HEAD).run(stop_at=9, snapshot_every=100)
    path = tmp_path / "d3/ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3] + lines[4:]))
    with pytest.raises(ResumeError, match=r"round 6 was decided at iteration 4, ledger.jsonl has rows up "
                                          r"to 3"):
        PlanKeeper.open(tmp_path / "d3", HEAD, make_decider, iteration=6, consumed=24)
    with pytest.raises(ResumeError, match=r"ledger.jsonl has no row of iteration 4"):
        PlanKeeper.open(tmp_path / "d3", HEAD, make_decider, iteration=4, consumed=16)
    path.write_bytes(b"".join(lines))
    path = tmp_path / "d3/rounds.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4] + lines[5:]))
    with pytest.raises(ResumeError, match=r"round 5 \(positions 16-19\): round 5 in rounds.jsonl, 4"):
        PlanKeeper.open(tmp_path / "d3", HEAD, make_decider, iteration=9, consumed=36)
    path.write_bytes(b"".join(lines[:4]))
    with pytest.raises(ResumeError, match=r"rounds.jsonl decides positions up to 16, the checkpoint "
                                          r"has consumed 36"):
        PlanKeeper.open(tmp_path / "d3", HEAD, make_decider, iteration=9, consumed=36)


def test_a_state_of_another_plan_is_refused(tmp_path: Path) -> None:
    Trainer(tmp_path / "d3", HEAD).run(stop_at=6)
    other = replace(HEAD, config={**HEAD.config, "sampling": "multinomial"})
    Trainer(tmp_path / "other", other).run(stop_at=6)
    name = "state/00000003-00000001.npz"
    shutil.copy(tmp_path / "other" / name, tmp_path / "d3" / name)
    with pytest.raises(ResumeError, match=r"00000003-00000001.npz: not the state after round 3 of"):
        PlanKeeper.open(tmp_path / "d3", HEAD, make_decider, iteration=6, consumed=24)


def test_another_version_is_refused_by_both_versions(tmp_path: Path) -> None:
    Trainer(tmp_path / "d3", FIXED).run(stop_at=2)
    path = tmp_path / "d3/plan.json"
    path.write_text(path.read_text().replace('"version": 1,', '"version": 2,', 1))
    with pytest.raises(PlanError, match=r"plan.json: plan version 2, expected 1; use the Megatron-D3"):
        PlanKeeper.open(tmp_path / "d3", FIXED, make_decider)


# --- what is allowed -------------------------------------------------------------------------------


def test_batch_size_and_length_may_change(tmp_path: Path) -> None:
    Trainer(tmp_path / "d3", FIXED).run(stop_at=5)
    Trainer(tmp_path / "whole", FIXED).run()
    head = changed(batch_schedule=BatchSchedule.constant(6), total_samples=50)
    Trainer(tmp_path / "d3", head).run(5, 20, stop_at=8)
    Trainer(tmp_path / "d3", head).run(8, 38)  # 20 + 3 * 6; the same again: no new generation
    reader = PlanReader(tmp_path / "d3")
    assert [(g.iteration, g.position, g.round) for g in reader.plan.generations] == [
        (0, 0, 0), (5, 20, 7)]
    rows = [(row.round, row.step, row.start, row.stop) for row, _ in reader.rounds()]
    # Rounds 5 and 6 were read ahead with the old batches; the new ones begin at the checkpoint.
    assert rows[4:9] == [(4, 4, 16, 20), (5, 5, 20, 24), (6, 6, 24, 28), (7, 5, 20, 26),
                         (8, 6, 26, 32)]
    # The order of samples is that of a run that never changed.
    assert reader.positions(0, 40).tobytes() == files_of(tmp_path / "whole")["positions.bin"]


def test_non_decisive_settings_may_change(tmp_path: Path) -> None:
    Trainer(tmp_path / "d3", FIXED).run(stop_at=5)
    before = files_of(tmp_path / "d3")
    PlanKeeper.open(tmp_path / "d3", with_config(paths="elsewhere"), make_decider, iteration=5,
                    consumed=20).close()
    assert files_of(tmp_path / "d3") == before


def draws(reader: PlanReader) -> dict[tuple[int, str], list[int]]:
    """Ordinals in the order of positions, by (table id, name)."""
    records = np.array(reader.positions(reader.first_position, reader.frontier))
    return {(i, domain.name): records["sample"][records["domain"] == i].tolist()
            for i, domain in enumerate(reader.plan.table)}


def assert_no_sample_lost_or_repeated(reader: PlanReader) -> None:
    for ordinals in draws(reader).values():
        assert ordinals == list(range(len(ordinals)))


def test_a_fork_changes_the_mixture_and_keeps_every_cursor(tmp_path: Path) -> None:
    Trainer(tmp_path / "d3", FIXED).run(stop_at=6)
    kept = np.array(PlanReader(tmp_path / "d3").positions(0, 20)).tobytes()
    head = with_config(mix={"type": "0,0.5,0.5"})
    Trainer(tmp_path / "d3", head).run(5, 20, mode="fork")
    reader = PlanReader(tmp_path / "d3")
    assert np.array(reader.positions(0, 20)).tobytes() == kept
    assert_no_sample_lost_or_repeated(reader)
    counts = np.bincount(reader.positions(20, 40)["domain"], minlength=3)
    assert counts[0] == 0 and abs(counts[1] - counts[2]) <= 2
    assert reader.plan.generations[1].cursors == (10, 6, 4)
    # In strict mode the forked run goes on as it is now.
    before = files_of(tmp_path / "d3")
    Trainer(tmp_path / "d3", head).run(7, 28)
    assert files_of(tmp_path / "d3") == before


def test_fork_in_a_job_script_forks_once(tmp_path: Path) -> None:
    head = with_config(mix={"type": "0,0.5,0.5"})
    Trainer(tmp_path / "once", FIXED).run(stop_at=5)
    Trainer(tmp_path / "once", head).run(5, 20, mode="fork")
    Trainer(tmp_path / "d3", FIXED).run(stop_at=5)
    for start, stop in ((5, 7), (7, 8), (8, 10)):
        Trainer(tmp_path / "d3", head).run(start, 4 * start, mode="fork", stop_at=stop)
    assert files_of(tmp_path / "d3") == files_of(tmp_path / "once")


def test_domains_may_come_go_change_and_come_back(tmp_path: Path) -> None:
    def head(mix: str, *names: str) -> RunHeader:
        known = {d.name: d for d in domains(100, 50, 20, 30)}
        known["B"] = replace(known["b"], fingerprint="another b")
        return changed(domains=tuple(known[name] for name in names), config={
            **FIXED.config, "mix": {"type": mix}})

    directory = tmp_path / "d3"
    Trainer(directory, head("0.5,0.5", "a", "b")).run(stop_at=3)
    Trainer(directory, head("0.4,0.3,0.3", "c", "a", "b")).run(3, 12, mode="fork", stop_at=5)
    Trainer(directory, head("0.5,0.5", "c", "B")).run(5, 20, mode="fork", stop_at=7)
    Trainer(directory, head("0.5,0.25,0.25", "a", "b", "d")).run(7, 28, mode="fork")
    reader = PlanReader(directory)
    assert [d.name + d.fingerprint[-1] for d in reader.plan.table] == [
        "aa", "bb", "cc", "bb", "dd"]
    assert [g.domain_ids for g in reader.plan.generations] == [
        (0, 1), (2, 0, 1), (2, 3), (0, 1, 4)]
    assert_no_sample_lost_or_repeated(reader)
    keeper = PlanKeeper.open(directory, head("0.5,0.25,0.25", "a", "b", "d"), make_decider,
                             iteration=9, consumed=36)
    used = {name: len(ordinals) for (_, name), ordinals in draws(reader).items()}
    assert keeper.decider.table_ids == (0, 1, 4)
    assert used["a"] == keeper.state.cursors[0]
    keeper.close()


def test_a_domain_without_its_corpus_is_gone_from_the_checkpoint_on(tmp_path: Path) -> None:
    """Positions that were read ahead but not trained on must not ask for it."""
    Trainer(tmp_path / "d3", FIXED, read_ahead=16).run(stop_at=5)
    head = changed(domains=FIXED.domains[:2], config={**FIXED.config, "mix": {"type": "0.5,0.5"}})
    Trainer(tmp_path / "d3", head).run(5, 20, mode="fork", stop_at=6)
    assert 2 in PlanReader(tmp_path / "d3").positions(0, 20)["domain"]
    assert 2 not in PlanReader(tmp_path / "d3").positions(20, 28)["domain"]


@pytest.mark.parametrize("checkpoint", range(1, 5))
def test_a_fork_can_be_taken_back(
    tmp_path: Path, whole: dict[str, bytes], checkpoint: int
) -> None:
    """Going back to before the fork gives the run that never forked, its read-ahead included."""
    Trainer(tmp_path / "d3", HEAD).run(stop_at=5)
    Trainer(tmp_path / "d3", FIXED).run(5, 20, mode="fork", stop_at=8)
    Trainer(tmp_path / "d3", HEAD).run(checkpoint, 4 * checkpoint)
    assert files_of(tmp_path / "d3") == whole


def test_a_fork_at_the_start_starts_over(tmp_path: Path) -> None:
    Trainer(tmp_path / "d3", HEAD).run(stop_at=5)
    old = files_of(tmp_path / "d3")
    Trainer(tmp_path / "d3", FIXED).run(mode="fork")
    Trainer(tmp_path / "fresh", FIXED).run()
    assert files_of(tmp_path / "d3") == files_of(tmp_path / "fresh")
    aside = files_of(tmp_path / "d3/abandoned-0001")
    assert {name: aside[name] for name in old if name != "lock"} == {
        name: content for name, content in old.items() if name != "lock"}


def test_another_version_of_an_algorithm_may_go_on_by_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = changed(versions={"apportion": apportion.VERSION})
    directory = tmp_path / "d3"
    Trainer(directory, old).run(stop_at=6)
    kept = PlanReader(directory).positions(0, 20).tobytes()
    monkeypatch.setattr(apportion, "VERSION", apportion.VERSION + 1)
    new = changed(versions={"apportion": apportion.VERSION})
    with pytest.raises(ResumeError, match=r"made with versions.apportion \d+, now \d+"):
        PlanKeeper.open(directory, new, make_decider, iteration=5, consumed=20)
    with pytest.raises(ResumeError, match=r"positions from 0 on were decided by version \d+ of "
                                          r"apportion, this is \d+; use the Megatron-D3 that wrote"):
        PlanKeeper.open(directory, old, make_decider, iteration=5, consumed=20)
    Trainer(directory, new).run(5, 20, mode="fork", stop_at=7)
    Trainer(directory, new).run(6, 24)
    reader = PlanReader(directory)
    assert reader.positions(0, 20).tobytes() == kept
    assert_no_sample_lost_or_repeated(reader)
    assert "of apportion, this is" in audit(directory, make_decider).findings[0]
    path = directory / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4] + lines[5:]))
    with pytest.raises(ResumeError, match="ledger.jsonl has no row of iteration 5"):
        PlanKeeper.open(directory, changed(versions={"apportion": 9}), make_decider, iteration=5,
                        consumed=20, mode="fork")


def test_the_mixer_keeps_its_state_unless_it_changes(tmp_path: Path) -> None:
    Trainer(tmp_path / "d3", HEAD).run(stop_at=5)
    shutil.copytree(tmp_path / "d3", tmp_path / "longer")
    longer = PlanKeeper.open(tmp_path / "longer", replace(HEAD, total_samples=80), make_decider,
                             iteration=5, consumed=20, mode="fork")
    assert longer.state.mixer["seen"] == 5
    other = replace(HEAD, domains=HEAD.domains[:2])
    fewer = PlanKeeper.open(tmp_path / "d3", other, make_decider, iteration=5, consumed=20,
                            mode="fork")
    assert fewer.state.mixer["seen"] == 0
    assert any("domains no longer used: c" in line for line in fewer.messages)


def test_messages_say_what_a_resume_did(tmp_path: Path) -> None:
    Trainer(tmp_path / "d3", FIXED).run(stop_at=6)
    head = changed(domains=domains(100, 50, 20, 10), config={
        **FIXED.config, "mix": {"type": "0.25,0.25,0.25,0.25"}})
    keeper = PlanKeeper.open(tmp_path / "d3", head, make_decider, iteration=5, consumed=20,
                             mode="fork")
    keeper.close()
    assert keeper.messages == (
        f"d3 plan: resumed at iteration 5, what came later is in {tmp_path}/d3/abandoned-0001",
        ('d3 plan: from position 20 on: made with domains ["a", "b", "c"], now '
        '["a", "b", "c", "d"]'),
        "d3 plan: from position 20 on: made with mix.type 0.5,0.3,0.2, now 0.25,0.25,0.25,0.25",
        "d3 plan: new or changed domains, from their first sample: d")
