"""A DoReMi proxy with domains that are not as one would like: rare, used up, tiny, not finite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from megatron_d3.cli.doremi_result import read_proxy
from megatron_d3.plan.audit import audit
from megatron_d3.plan.reader import PlanReader
from megatron_d3.planning import decider_factory
from tests.corpus_helpers import write_corpus
from tests.mcore.launcher import Launcher, Run
from tests.mcore.naive_doremi import alphas_from
from tests.mcore.plans import EOD, flags, ledger, plan_bytes, write_config

pytestmark = pytest.mark.mcore

NAMES = ["web", "code", "wiki"]
STEPS = 4
FAULTS = "tests.mcore.naive_doremi:"


def train(
    launcher: Launcher, folder: Path, config: Path, extra: list[str] | None = None, *,
    steps: int = STEPS, world_size: int = 1, name: str = "run", **how: Any,
) -> Run:
    arguments = [*flags(config, folder, steps=steps, save_interval=2),
                 "--d3-plan-dir", str(folder / "d3"), *(extra or [])]
    environment = {"D3_TEST_ALPHA_FILE": str(folder / "alpha"), **how.pop("environment", {})}
    return launcher.run(folder / name, arguments, world_size=world_size, environment=environment,
                        setup=how.pop("setup", FAULTS + "record_alpha"), **how)


@pytest.fixture(scope="module")
def reference(launcher: Launcher, corpora: Path) -> Path:
    config = write_config(corpora / "reference.yaml")
    train(launcher, corpora / "reference", config, steps=2).require_success()
    return corpora / "reference"


def proxy(corpora: Path, reference: Path, name: str, *, domains: list[str] | None = None,
          **mix: Any) -> Path:
    settings = {"type": "doremi", "reference": str(reference), "eta": 4.0} | mix
    return write_config(corpora / f"{name}.yaml", domains or NAMES, mix=settings)


def require_alpha(folder: Path, names: list[str] = NAMES) -> np.ndarray:
    """Require that alpha weighed the steps as the ledger's sums say; return (T, K) alpha after."""
    expected = alphas_from(ledger(folder / "d3"), names, eta=4.0)
    used = [json.loads(line) for line in (folder / "alpha0").read_text().splitlines()]
    assert_allclose(used, expected[:-1], rtol=1e-12)
    found = read_proxy(folder / "d3")
    assert_allclose(found.alphas, expected[1:], rtol=1e-12)
    assert_allclose(found.mean, np.mean(expected[1:], axis=0), rtol=1e-12)
    assert audit(folder / "d3", decider_factory()).is_sound
    return found.alphas


def draws(folder: Path) -> np.ndarray:
    """Return (T, K) samples of each domain in each step."""
    reader = PlanReader(folder / "d3")
    domains = np.array(reader.stored(0, reader.frontier)["domain"]).reshape(-1, 8)
    return np.array([np.bincount(step, minlength=3) for step in domains])


def test_a_domain_near_its_limit_is_drawn_less_and_weighed_all_the_same(
    launcher: Launcher, corpora: Path, reference: Path, tmp_path: Path
) -> None:
    """wiki has 49 samples: `max_epochs` of 0.05 leaves two for the whole run."""
    config = proxy(corpora, reference, "limit", max_epochs={"wiki": 0.05})
    run = train(launcher, tmp_path, config, world_size=2).require_success()
    counts = draws(tmp_path)
    assert counts.sum(axis=0)[2] == 2 and (counts[:, 2] == 0).sum() >= 2
    alphas = require_alpha(tmp_path)
    rows = ledger(tmp_path / "d3")
    assert ["wiki" in row["loss"] for row in rows] == (counts[:, 2] > 0).tolist()
    assert f" | alpha web {alphas[-1][0]:.4f}" in run.output


def test_a_domain_without_any_budget_is_never_drawn_and_keeps_an_excess_of_0(
    launcher: Launcher, corpora: Path, reference: Path, tmp_path: Path
) -> None:
    config = proxy(corpora, reference, "none", max_epochs={"wiki": 0.01})
    train(launcher, tmp_path, config).require_success()
    assert draws(tmp_path).sum(axis=0).tolist() == [16, 16, 0]
    alphas = require_alpha(tmp_path)
    assert np.all(np.diff(alphas[:, 2]) < 0)  # the others have an excess; the floor c / K remains
    assert alphas[-1, 2] > 1e-3 / 3


def test_stop_ends_the_run_where_a_domain_is_used_up(
    launcher: Launcher, corpora: Path, reference: Path, tmp_path: Path
) -> None:
    config = proxy(corpora, reference, "stop", max_epochs={"wiki": 0.12}, exhausted="stop")
    run = train(launcher, tmp_path, config).require_success()  # 5 samples, 8/3 a step
    assert len(ledger(tmp_path / "d3")) == 2 == len(require_alpha(tmp_path))
    assert "a domain has reached d3.mix.max_epochs and d3.mix.exhausted is stop" in run.output


def test_repeat_goes_on_with_the_domain(
    launcher: Launcher, corpora: Path, reference: Path, tmp_path: Path
) -> None:
    config = proxy(corpora, reference, "repeat", max_epochs={"wiki": 0.05}, exhausted="repeat")
    train(launcher, tmp_path, config).require_success()
    assert draws(tmp_path).sum(axis=0).max() - draws(tmp_path).sum(axis=0).min() <= 1
    require_alpha(tmp_path)


def test_a_domain_of_one_sample_repeats_it(
    launcher: Launcher, corpora: Path, reference: Path, tmp_path: Path
) -> None:
    write_corpus(corpora / "one", [[*range(1, 33), EOD]])
    config = write_config(
        corpora / "one.yaml", ["web", "code"], valid_fraction=0,
        mix={"type": "doremi", "reference": str(reference), "eta": 4.0})
    content = config.read_text().replace("domains:\n", "domains:\n  one: one\n")
    config.write_text(content)
    run = train(launcher, tmp_path, config, world_size=2).require_success()
    require_alpha(tmp_path, ["one", "web", "code"])
    reader = PlanReader(tmp_path / "d3")
    records = np.array(reader.stored(0, reader.frontier))
    hashes = [sample for step in run.samples() for sample in step]
    of_one = {hashes[i] for i in np.flatnonzero(records["domain"] == 0)}
    assert len(of_one) == 1 and (records["domain"] == 0).sum() >= 10


def test_a_reference_that_is_nan_on_a_domain_counts_as_absent_there(
    launcher: Launcher, corpora: Path, reference: Path, tmp_path: Path
) -> None:
    """The loss does not depend on the reference: training goes on untouched."""
    config = proxy(corpora, reference, "nan-reference")
    environment = {"D3_TEST_SPOIL_AT": "2"}
    run = train(launcher, tmp_path / "a", config, setup=FAULTS + "spoil_reference",
                environment=environment).require_success()
    rows = ledger(tmp_path / "a/d3")
    assert [row["excess"]["wiki"] is None for row in rows] == [False, True, False, False]
    assert all(row["loss"]["wiki"][0] > 0 for row in rows)
    kept = [{**row, "loss": dict(row["loss"])} for row in rows]
    del kept[1]["loss"]["wiki"]  # as the naive rule sees an absent domain
    found = read_proxy(tmp_path / "a/d3")
    assert_allclose(found.alphas, alphas_from(kept, NAMES, eta=4.0)[1:], rtol=1e-12)
    plain = train(launcher, tmp_path / "b", config).require_success()
    assert run.losses()[:3] == plain.losses()[:3]  # alpha_2 weighs step 3 first
    assert run.losses()[3] != plain.losses()[3]


def test_a_loss_that_is_nan_stops_the_run_and_nothing_of_the_step_is_kept(
    launcher: Launcher, corpora: Path, reference: Path, tmp_path: Path
) -> None:
    config = proxy(corpora, reference, "nan")
    run = train(launcher, tmp_path, config, setup=FAULTS + "spoil_losses",
                environment={"D3_TEST_SPOIL_AT": "4"})
    assert run.codes != [0]
    assert "found NaN in local forward loss calculation" in run.output
    assert len(ledger(tmp_path / "d3")) == 3
    # From its checkpoint, without the fault, it goes on as a run that never met it. (Megatron wants
    # to try the step again on another device first, and there is none.)
    train(launcher, tmp_path, config, ["--rerun-mode", "disabled"], name="again").require_success()
    train(launcher, tmp_path / "whole", config).require_success()
    assert plan_bytes(tmp_path / "d3") == plan_bytes(tmp_path / "whole/d3")


def test_a_nan_that_megatron_is_told_to_pass_over_reaches_no_weight(
    launcher: Launcher, corpora: Path, reference: Path, tmp_path: Path
) -> None:
    """The model is lost then; alpha goes on with the last finite excess of each domain."""
    config = proxy(corpora, reference, "nan-passed")
    train(launcher, tmp_path, config, ["--no-check-for-nan-in-loss-and-grad"],
          setup=FAULTS + "spoil_losses", environment={"D3_TEST_SPOIL_AT": "2"}).require_success()
    rows = ledger(tmp_path / "d3")
    assert [row["excess"] for row in rows[2:]] == [dict.fromkeys(NAMES)] * 2
    assert [rows[1]["excess"][name] is None for name in NAMES] == [False, False, True]
    kept = [{**row, "loss": {name: row["loss"][name] for name in NAMES
                             if row["excess"][name] is not None}} for row in rows]
    found = read_proxy(tmp_path / "d3")
    assert_allclose(found.alphas, alphas_from(kept, NAMES, eta=4.0)[1:], rtol=1e-12)
    assert np.isfinite(found.mean).all() and found.mean.sum() == pytest.approx(1)


def test_limits_the_released_codes_loss_and_read_ahead_resume_bit_for_bit(
    launcher: Launcher, corpora: Path, reference: Path, tmp_path: Path
) -> None:
    """The sampling weights change every step here, and they are part of that loss."""
    config = proxy(corpora, reference, "ahead", max_epochs={"wiki": 0.21, "code": 0.14},
                   variant="official")
    workers = ["--num-workers", "4"]  # 2 x 4 x 2 samples: two rounds are decided before the kill
    whole = train(launcher, tmp_path / "whole", config, workers, steps=6).require_success()
    rounds = [row.weights for row, _ in PlanReader(tmp_path / "whole/d3").rounds()]
    assert None not in rounds[2:4] and rounds[2] != rounds[3]
    killed = train(launcher, tmp_path, config, workers, steps=6, kill_at=3)
    assert -9 in killed.codes
    resumed = train(launcher, tmp_path, config, workers, steps=6, name="again").require_success()
    assert resumed.steps() == whole.steps()[2:]
    assert plan_bytes(tmp_path / "d3") == plan_bytes(tmp_path / "whole/d3")
