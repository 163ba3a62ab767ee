"""Why curvature is measured by differences of gradients: Megatron's functions forget theirs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.mcore.launcher import Launcher

pytestmark = pytest.mark.mcore


@pytest.mark.parametrize("size", [1, 2])
def test_double_backward_is_silently_wrong_where_differences_are_right(
    launcher: Launcher, tmp_path: Path, size: int
) -> None:
    run = launcher.run(tmp_path, [], entry="tests.mcore.second_derivative:measure", world_size=size)
    run.require_success()  # no exception: nothing tells
    ranks = [dict(np.load(tmp_path / f"rank{rank}.npz")) for rank in range(size)]
    found = {name: np.concatenate([rank[name] for rank in ranks]) for name in ranks[0]}

    def error(name: str, wanted: str) -> float:
        return float(np.linalg.norm(found[name] - found[wanted]) / np.linalg.norm(found[wanted]))

    # The loss is computed in float32, whatever the weights.
    assert error("gradient", "whole gradient") < 1e-6
    assert error("central difference", "exact") < 1e-3
    assert error("double backward", "exact") > 1e-2
