"""The three steps of DoReMi, with runs that write plans but train nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from numpy.testing import assert_allclose

from megatron_d3.cli import doremi, doremi_runs
from megatron_d3.cli.doremi_file import read_doremi_file
from megatron_d3.cli.doremi_result import first_weights, read_proxy
from megatron_d3.cli.main import main
from megatron_d3.config import load_config
from megatron_d3.errors import ConfigError, D3Error, PlanError
from megatron_d3.plan.batch_schedule import BatchSchedule
from megatron_d3.plan.keeper import PlanKeeper
from megatron_d3.planning import decider_factory, open_domains, plan_header
from megatron_d3.types import StepSignals
from tests.corpus_helpers import documents, write_corpus

NAMES = ["web", "code", "wiki"]
EXCESS = np.array([0.4, 0.1, 0.0])  # nats per token, the same at every step
STEPS = 5


def value_of(arguments: Sequence[str], flag: str) -> Path:
    return Path(arguments[list(arguments).index(flag) + 1])


class FakeTraining:
    """Takes the place of `torchrun`: writes the plan that a run would write."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.arguments: list[list[str]] = []
        self.launchers: list[list[str]] = []
        self.fail_in: str | None = None
        self.stop_in: str | None = None

    def __call__(
        self, arguments: Sequence[str], *, log: Path, module: str = "",
        launcher: Sequence[str] = (), **_: Any,
    ) -> None:
        config = load_config(value_of(arguments, "--d3-config"))
        self.arguments.append(list(arguments))
        self.launchers.append(list(launcher))
        if module == "megatron_d3.mcore.store_losses":
            self.runs.append("losses")
            value_of(arguments, "--d3-plan-dir").mkdir()
            return
        save = value_of(arguments, "--save")
        self.runs.append(save.name)
        log.write_text("words\n")
        if save.name == self.fail_in:
            raise D3Error("training ended with exit code 1")
        domains = open_domains(config, seq_length=8, seed=1)
        header = plan_header(
            config, domains, seq_length=8, seed=1, tokenizer="t", total_samples=6 * STEPS,
            batch_schedule=BatchSchedule.constant(6))
        trained = ledger_length(save / "d3")
        keeper = PlanKeeper.open(
            save / "d3", header, decider_factory(), iteration=trained, consumed=6 * trained)
        for step in range(trained, 2 if save.name == self.stop_in else STEPS):
            keeper.advance(6 * (step + 1))
            if keeper.state.position < 6 * (step + 1):  # `exhausted: stop`
                break
            counts = np.full(3, 16)
            keeper.observe(StepSignals(
                step + 1, 6 * (step + 1), 3.0 * counts, counts, excess_sums=EXCESS * counts))
        keeper.close()


def ledger_length(plan_dir: Path) -> int:
    path = plan_dir / "ledger.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> FakeTraining:
    fake = FakeTraining()
    monkeypatch.setattr(doremi_runs, "train", fake)
    monkeypatch.setattr(doremi, "require_training_packages", lambda: None)
    monkeypatch.setenv("MEGATRON_D3_DEVICE", "cpu")
    return fake


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    for seed, name in enumerate(NAMES):
        write_corpus(tmp_path / name, documents(seed=seed, num_documents=30, vocab_size=50))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({
        "domains": {name: name for name in NAMES}, "valid_fraction": 0,
        "mix": {"type": "static", "weights": {"web": 2, "code": 1, "wiki": 1}}}, sort_keys=False))
    (tmp_path / "all.args").write_text("--num-layers 2  # small\n--lr 1e-3\n")
    (tmp_path / "large.args").write_text("--num-layers 9\n")
    return write(tmp_path)


def write(folder: Path, /, **changes: Any) -> Path:
    path = folder / "doremi.yaml"
    path.write_text(yaml.safe_dump({
        "folder": "out", "config": "run.yaml", "flags": ["all.args"],
        "final": {"flags": ["large.args"]}} | changes))
    return path


def expected_alphas() -> np.ndarray:
    alpha, rows = np.full(3, 1 / 3), []
    for _ in range(STEPS):
        alpha = alpha * np.exp(EXCESS)
        alpha = 0.999 * alpha / alpha.sum() + 0.001 / 3
        rows.append(alpha)
    return np.array(rows)


def test_reference_proxy_and_final_are_trained_in_turn(
    training: FakeTraining, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doremi", str(recipe)]) == 0
    assert training.runs == ["reference", "proxy", "final"]
    out = recipe.parent / "out"
    mixes = [load_config(value_of(a, "--d3-config")).mix for a in training.arguments]
    assert [mix.type for mix in mixes] == ["static", "doremi", "static"]
    assert mixes[1].params.reference == out / "round-1" / "reference"
    assert mixes[2].params.weights == json.loads((out / "weights.json").read_text())["weights"]
    assert training.arguments[0][:4] == ["--num-layers", "2", "--lr", "1e-3"]
    assert training.arguments[2][4:6] == ["--num-layers", "9"]

    content = json.loads((out / "weights.json").read_text())
    alphas = expected_alphas()
    assert_allclose(list(content["weights"].values()), alphas.mean(axis=0), rtol=1e-12)
    assert_allclose(list(content["final"].values()), alphas[-1], rtol=1e-12)
    assert content["reference"] == {"web": 0.5, "code": 0.25, "wiki": 0.25}
    assert_allclose(content["max_change_from_reference"],
                    np.abs(alphas.mean(axis=0) - [0.5, 0.25, 0.25]).max())
    assert content["num_steps"] == STEPS and content["round"] == 1
    rows = (out / content["trajectory"]).read_text().splitlines()
    assert rows[0] == "iteration,web,code,wiki"
    assert_allclose(np.array([row.split(",") for row in rows[1:]], float)[:, 1:], alphas, rtol=1e-12)
    shown = capsys.readouterr().out
    assert f"web      0.5000     {alphas.mean(axis=0)[0]:.4f}     {alphas[-1][0]:.4f}" in shown
    assert f"mix: {{type: static, weights: {out / 'weights.json'}}}" in shown


def test_weights_json_is_a_static_mixture(training: FakeTraining, recipe: Path) -> None:
    main(["doremi", str(recipe)])
    mix = {"type": "static", "weights": "out/weights.json"}
    path = recipe.parent / "next.yaml"
    path.write_text(yaml.safe_dump({"domains": {name: name for name in NAMES}, "mix": mix}))
    assert_allclose(list(load_config(path).mix.params.weights.values()),
                    expected_alphas().mean(axis=0), rtol=1e-12)


@pytest.mark.parametrize("step", ["reference", "proxy", "final"])
def test_a_failed_step_is_tried_again_and_finished_ones_are_reused(
    training: FakeTraining, recipe: Path, step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    training.fail_in = step
    assert main(["doremi", str(recipe)]) == 1
    assert training.runs[-1] == step
    training.fail_in, before = None, len(training.runs)
    assert main(["doremi", str(recipe), "--json"]) == 0
    every = ["reference", "proxy", "final"]
    assert training.runs[before:] == every[every.index(step):]
    output = capsys.readouterr()
    assert output.err.count("finished before, reused") == every.index(step)
    assert json.loads(output.out)["version"] == 1
    before = len(training.runs)
    assert main(["doremi", str(recipe)]) == 0
    assert len(training.runs) == before


def test_iterating_ends_when_the_weights_stay(training: FakeTraining, recipe: Path) -> None:
    assert main(["doremi", str(recipe), "--iterate"]) == 0
    # the fake's excess does not depend on the reference: round 2 finds what round 1 found
    assert training.runs == ["reference", "proxy", "reference", "proxy", "final"]
    content = json.loads((recipe.parent / "out" / "weights.json").read_text())
    assert content["round"] == 2 and content["max_change_from_reference"] < 1e-3


def test_iterating_ends_after_max_rounds(training: FakeTraining, recipe: Path) -> None:
    write(recipe.parent, max_rounds=1, final=None)
    assert main(["doremi", str(recipe), "--iterate"]) == 0
    assert training.runs == ["reference", "proxy"]


def test_stored_losses_take_the_references_place(
    training: FakeTraining, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(recipe.parent, proxy={"stored_losses": True, "eta": 2.0})
    assert main(["doremi", str(recipe)]) == 0
    assert training.runs == ["reference", "losses", "proxy", "final"]
    store, proxy = training.arguments[1:3]
    assert "--save" not in store and "--load" not in store
    losses = recipe.parent / "out" / "round-1" / "losses"
    assert value_of(store, "--d3-plan-dir") == losses
    assert load_config(value_of(store, "--d3-config")).mix.params.reference.name == "reference"
    params = load_config(value_of(proxy, "--d3-config")).mix.params
    assert (params.losses, params.reference, params.eta) == (losses, None, 2.0)


@pytest.mark.parametrize(("change", "message"), [
    (lambda folder: (folder / "all.args").write_text("--num-layers 3\n--lr 1e-3\n"),
     "from other arguments: was 2, now 3;"),
    (lambda folder: write(folder, proxy={"eta": 3.0}),
     "from other settings: mix.eta was 1.0, now 3.0;"),
    (lambda folder: rewrite(folder / "run.yaml", seed=9),
     "from other settings: seed was None, now 9;"),
])
def test_another_recipe_is_refused(
    training: FakeTraining, recipe: Path, change: Any, message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["doremi", str(recipe)])
    change(recipe.parent)
    assert main(["doremi", str(recipe)]) == 1
    assert message in capsys.readouterr().err


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changes, sort_keys=False))


def test_weights_of_other_domains_are_refused_by_name(
    training: FakeTraining, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("reference", "proxy"):
        assert main(["doremi", str(recipe), "--step", name]) == 0
    content = yaml.safe_load((recipe.parent / "run.yaml").read_text())
    domains = {"books": "wiki", "web": "web", "code": "code"}
    rewrite(recipe.parent / "run.yaml", domains=domains, mix=content["mix"] | {"weights": None})
    assert main(["doremi", str(recipe), "--step", "final"]) == 1
    assert (f"{recipe.parent / 'out' / 'weights.json'}: not those of this run's domains; no such "
            "domains: wiki; no weight for: books") in capsys.readouterr().err
    assert main(["doremi", str(recipe)]) == 1
    assert "settings: domains.wiki" in capsys.readouterr().err
    assert training.runs == ["reference", "proxy"]


@pytest.mark.parametrize(("changes", "message"), [
    ({"folder": None}, r"doremi.folder: got null, expected a path"),
    ({"tolerence": 1e-3}, r"doremi.tolerence: unknown key, did you mean tolerance\?"),
    ({"proxy": {"eta": -1}}, r"doremi.proxy.eta: got -1, expected a number in \(0, inf\)"),
    ({"flags": ["none.args"]}, r"doremi.flags: no file .*none.args"),
    ({"config": "odm.yaml"}, r"doremi.config: the mix of .*odm.yaml is odm, whose weights change"),
])
def test_files_that_cannot_work(recipe: Path, changes: dict[str, Any], message: str) -> None:
    content = yaml.safe_load((recipe.parent / "run.yaml").read_text())
    (recipe.parent / "odm.yaml").write_text(yaml.safe_dump(content | {"mix": {"type": "odm"}}))
    with pytest.raises(ConfigError, match=message):
        read_doremi_file(write(recipe.parent, **changes))


def test_plans_without_a_proxy(training: FakeTraining, recipe: Path) -> None:
    main(["doremi", str(recipe)])
    with pytest.raises(PlanError, match="not the plan of a DoReMi proxy; its mix.type is static"):
        read_proxy(recipe.parent / "out" / "final" / "d3")
    with pytest.raises(PlanError, match="no plan here"):
        first_weights(recipe.parent / "nowhere")


def test_losses_by_hand(
    training: FakeTraining, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = recipe.parent / "losses"
    assert main(["doremi", "losses"]) == 1
    assert "which folder to make" in capsys.readouterr().err
    assert main(["doremi", "losses", str(out), "--", "--lr", "1"]) == 1
    assert "give the proxy's flags after --" in capsys.readouterr().err
    config = str(recipe.parent / "run.yaml")
    assert main(["doremi", "losses", str(out), "--", "--lr", "1", "--d3-config", config]) == 0
    assert training.arguments[-1] == ["--lr", "1", "--d3-config", config, "--d3-plan-dir", str(out)]
    assert main(["doremi", str(recipe), "more"]) == 1
    assert "what is more?" in capsys.readouterr().err


class TestSteps:
    """Each step as a command of its own, for jobs that depend on each other."""

    def step(self, recipe: Path, *words: str) -> int:
        return main(["doremi", str(recipe), "--step", *words])

    def test_in_turn_give_what_one_command_gives(
        self, training: FakeTraining, recipe: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for name in ("reference", "proxy", "final"):
            assert self.step(recipe, name) == 0
        assert training.runs == ["reference", "proxy", "final"]
        for name in ("reference", "proxy", "final"):
            assert self.step(recipe, name) == 0
        assert main(["doremi", str(recipe)]) == 0
        assert training.runs == ["reference", "proxy", "final"]
        assert capsys.readouterr().err.count("finished before, reused") == 6

    def test_of_stored_losses(
        self, training: FakeTraining, recipe: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write(recipe.parent, proxy={"stored_losses": True})
        assert self.step(recipe, "reference") == 0
        assert self.step(recipe, "proxy") == 1
        assert "run --step losses first" in capsys.readouterr().err
        for name in ("losses", "losses", "proxy"):
            assert self.step(recipe, name) == 0
        assert training.runs == ["reference", "losses", "proxy"]

    @pytest.mark.parametrize(("words", "before"), [
        (["losses"], "reference"), (["proxy"], "reference"), (["final"], "proxy"),
        (["reference", "--round", "2"], "proxy"),
    ])
    def test_without_the_one_before_is_refused(
        self, training: FakeTraining, recipe: Path, capsys: pytest.CaptureFixture[str],
        words: list[str], before: str,
    ) -> None:
        write(recipe.parent, proxy={"stored_losses": True})
        training.fail_in = "reference"  # it began, and has not come to its end
        main(["doremi", str(recipe)])
        capsys.readouterr()
        assert self.step(recipe, *words) == 1
        folder = recipe.parent / "out" / "round-1"
        assert (f"--step {words[0]}: the step before it is not finished: {before} of round 1 in "
                f"{folder}; run --step {before} first") in capsys.readouterr().err
        assert training.runs == ["reference"]

    def test_of_later_rounds_have_nothing_to_do_once_the_weights_stay(
        self, training: FakeTraining, recipe: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.step(recipe, "reference") == self.step(recipe, "proxy") == 0
        for number in ("2", "3", "4"):
            for name in ("reference", "proxy"):
                assert self.step(recipe, name, "--round", number) == (0 if number < "4" else 1)
        assert self.step(recipe, "final") == 0
        assert training.runs == ["reference", "proxy", "reference", "proxy", "final"]
        errors = capsys.readouterr().err
        assert errors.count("not needed: the stop rule was met in round 2") == 2
        content = json.loads((recipe.parent / "out" / "weights.json").read_text())
        assert content["round"] == 2
        # An earlier round again leaves the weights of the last alone.
        assert self.step(recipe, "proxy", "--round", "1") == 0
        assert json.loads((recipe.parent / "out" / "weights.json").read_text()) == content
        assert main(["doremi", str(recipe)]) == 1
        assert "holds 2 rounds; continue them with --iterate" in capsys.readouterr().err
        assert main(["doremi", str(recipe), "--iterate"]) == 0
        assert len(training.runs) == 5

    @pytest.mark.parametrize(("words", "message"), [
        (["--step", "losses"], "doremi.proxy.stored_losses is false"),
        (["--step", "final"], "the recipe has no `final`"),
        (["--step", "reference", "--round", "6"], "--round: got 6, doremi.max_rounds is 5"),
        (["--step", "reference", "--round", "0"], "--round: got 0, expected at least 1"),
        (["--round", "2"], "--round: got 2, expected at least 1, together with --step"),
        (["--step", "final", "--round", "2"], "--round: not with --step final"),
        (["--step", "proxy", "--iterate"], "--iterate: not with --step"),
    ])
    def test_that_cannot_be(
        self, training: FakeTraining, recipe: Path, capsys: pytest.CaptureFixture[str],
        words: list[str], message: str,
    ) -> None:
        write(recipe.parent, final=None)
        assert main(["doremi", str(recipe), *words]) == 1
        assert message in capsys.readouterr().err
        assert not training.runs

    def test_are_started_by_the_launcher(self, training: FakeTraining, recipe: Path) -> None:
        launcher = "srun torchrun --nnodes 2 --rdzv-endpoint 'node1:1234'"
        assert self.step(recipe, "reference", "--launcher", launcher) == 0
        assert training.launchers == [
            ["srun", "torchrun", "--nnodes", "2", "--rdzv-endpoint", "node1:1234"]]


class TestRunsThatStopEarly:
    """A run may leave without an error before its end: it is not finished then."""

    @pytest.mark.parametrize("name", ["reference", "proxy", "final"])
    def test_continue_by_the_same_command(
        self, training: FakeTraining, recipe: Path, capsys: pytest.CaptureFixture[str], name: str
    ) -> None:
        training.stop_in = name
        assert main(["doremi", str(recipe)]) == 75
        assert training.runs[-1] == name
        error = capsys.readouterr().err
        assert "stopped after 12 of 30 samples without an error" in error
        assert "the same command continues" in error
        training.stop_in, before = None, len(training.runs)
        assert main(["doremi", str(recipe)]) == 0
        every = ["reference", "proxy", "final"]
        assert training.runs[before:] == every[every.index(name):]

    def test_unless_the_plan_itself_ends_there(self, training: FakeTraining, recipe: Path) -> None:
        """`exhausted: stop`: a domain has no sample left."""
        content = yaml.safe_load((recipe.parent / "run.yaml").read_text())
        content["mix"] |= {"max_epochs": {"web": 0.15}, "exhausted": "stop"}
        (recipe.parent / "run.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        assert main(["doremi", str(recipe)]) == 0
        assert training.runs == ["reference", "proxy", "final"]
        for run in ("round-1/reference", "round-1/proxy", "final"):
            assert 0 < ledger_length(recipe.parent / "out" / run / "d3") < STEPS
