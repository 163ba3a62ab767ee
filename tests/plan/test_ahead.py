"""The weights of what was decided before a resume, read from the end of `rounds.jsonl`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_d3.errors import PlanError
from megatron_d3.plan import ahead
from megatron_d3.plan.ahead import targets_ahead

NAMES = ("web", "code")


def write_rounds(folder: Path, weights: list[float | None], *, size: int = 8) -> None:
    """Write a row for each round; None: the weights of the round before."""
    lines = []
    for i, web in enumerate(weights):
        named = "" if web is None else f'"weights":{{"web":{web},"code":{1 - web}}},'
        lines.append(f'{{"round":{i},"iteration":0,"step":{i},"start":{size * i},'
                     f'"stop":{size * (i + 1)},{named}"hash":"0"}}\n')
    (folder / "rounds.jsonl").write_text("".join(lines))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), block=st.sampled_from([1, 7, 64, 1 << 16]))
def test_every_position_has_the_weights_of_its_round(
    tmp_path: Path, data: st.DataObject, block: int
) -> None:
    later = st.none() | st.sampled_from([0.25, 0.5, 0.75])
    rows = [0.125, *data.draw(st.lists(later, max_size=12))]
    consumed = data.draw(st.integers(0, len(rows))) * 8
    frontier = data.draw(st.integers(consumed, len(rows) * 8))  # rows beyond it are no longer valid
    write_rounds(tmp_path, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ahead, "_BLOCK_BYTES", block)
        found = targets_ahead(tmp_path, NAMES, consumed=consumed, frontier=frontier)
    expected, web = {}, 0.0
    for i, row in enumerate(rows):
        web = web if row is None else row
        expected |= dict.fromkeys(range(8 * i, 8 * (i + 1)), web)
    assert [p for t in found for p in range(t.start, t.stop)] == list(range(consumed, frontier))
    for target in found:
        for position in range(target.start, target.stop):
            np.testing.assert_array_equal(
                target.weights, [expected[position], 1 - expected[position]])


def test_nothing_ahead_reads_no_file(tmp_path: Path) -> None:
    assert targets_ahead(tmp_path, NAMES, consumed=8, frontier=8) == []


def test_a_torn_last_line_is_left_out_and_a_damaged_one_named(tmp_path: Path) -> None:
    write_rounds(tmp_path, [0.5, 0.25])
    path = tmp_path / "rounds.jsonl"
    path.write_text(path.read_text() + '{"round":2,"itera')
    (first, second) = targets_ahead(tmp_path, NAMES, consumed=0, frontier=16)
    assert (first.weights[0], second.weights[0]) == (0.5, 0.25)
    path.write_text("what is this\n")
    with pytest.raises(PlanError, match=r"rounds\.jsonl"):
        targets_ahead(tmp_path, NAMES, consumed=0, frontier=16)
