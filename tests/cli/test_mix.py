"""`megatron-d3 mix propose`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_d3.cli.main import main
from megatron_d3.config import parse_config

HEADER = "run,weight/web,weight/code,loss/x,loss/y\n"


@pytest.fixture
def table(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    lines = [HEADER]
    for i in range(12):
        w = rng.uniform(0.2, 0.8)
        lines.append(f"r{i},{w},{1 - w},{2 + np.exp(w - 1)},{1 + np.exp(-2 * w)}\n")
    path = tmp_path / "runs.csv"
    path.write_text("".join(lines))
    return str(path)


def test_a_proposal_is_printed_and_written_for_a_static_run(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "weights.json"
    assert main(["mix", "propose", table, "--target", "y", "--cap", "web=0.75", "--out", str(out)]
                ) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["domain", "prior", "proposed", "cap", "tried"]
    assert lines[1].split()[:4] == ["web", "0.5000", "0.7500", "0.7500"]
    assert lines[7].startswith("no mixture within the limits has a fitted mean loss lower by more")
    assert lines[5].startswith("y ") and not any(line.startswith("x ") for line in lines)
    content = json.loads(out.read_text())
    assert content["weights"]["web"] == pytest.approx(0.75) and list(content["predicted"]) == ["y"]
    config = parse_config({"domains": {"web": "a", "code": "b"},
                           "mix": {"type": "static", "weights": str(out)}}, folder=tmp_path)
    assert config.mix.params.weights == content["weights"]


def test_json_and_a_warning_where_the_fit_extrapolates(
    table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mix", "propose", table, "--target", "y", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["weights"]["web"] == pytest.approx(1) and 0 <= content["duality_gap"] < 1e-6
    assert main(["mix", "propose", table, "--target", "y"]) == 0
    assert "beyond what the runs tried: web, code" in capsys.readouterr().out
    assert main(["mix", "propose", table, "--target", "y", "--max-kl", "0.01"]) == 0
    assert "beyond" not in capsys.readouterr().out


@pytest.mark.parametrize(("text", "message"), [
    ("", r"expected two or more columns weight/DOMAIN, one or more loss/NAME"),
    ("weight/a,weight/b,los/x\n", r"unknown column 'los/x', expected weight/DOMAIN, loss/NAME or"),
    ("weight/a,weight/a,loss/x\n", r"a column is there twice"),
    (HEADER + "r,1,1,2\n", r"runs.csv:2: got 4 cells, expected 5"),
    (HEADER + "r,1,-1,2,2\n", r"runs.csv:2: weight/code: got '-1', expected a finite number >= 0"),
    (HEADER + "r,1,1,0,2\n", r"runs.csv:2: loss/x: got '0', expected a finite number > 0"),
    (HEADER + "r,1,1,2,n\n", r"runs.csv:2: loss/y: got 'n', expected a finite number > 0"),
    (HEADER + "r,0,0,2,2\n", r"runs.csv:2: all weights are 0"),
    (HEADER + "r,1,1,2,2\n", r"1 runs: too few for 2 domains, expected at least 4"),
    (HEADER + "r,1,1,2,2\n" * 9, r"the runs are collinear: the weights of web, code do not vary"),
])
def test_a_table_that_cannot_be_used_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (tmp_path / "runs.csv").write_text(text)
    assert main(["mix", "propose", str(tmp_path / "runs.csv")]) == 1
    assert message in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(("extra", "message"), [
    (["--target", "z"], "--target z: "),
    (["--prior", "web"], "--prior web: expected DOMAIN=NUMBER"),
    (["--cap", "wbe=1"], "--cap wbe: no such domain; known: web, code"),
])
def test_flags_that_do_not_fit_the_table_are_refused(
    table: str, capsys: pytest.CaptureFixture[str], extra: list[str], message: str
) -> None:
    assert main(["mix", "propose", table, *extra]) == 1
    assert message in capsys.readouterr().err


def test_a_missing_table_and_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mix", "propose", "/none.csv"]) == 1
    assert "/none.csv: No such file or directory" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["mix", "propose", "x", "--max-kl", "0"])
