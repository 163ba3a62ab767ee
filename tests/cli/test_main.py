"""The frame of the command line: verbs, exit codes, messages, pipes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megatron_d3 import __version__
from megatron_d3.cli.main import VERBS, main

ROOT = Path(__file__).parents[2]

TOY = '''
from megatron_d3.errors import ConfigError

NAME = "toy"
HELP = "do as told"
EXAMPLE = """megatron-d3 toy done
megatron-d3 toy refuse"""


def add_arguments(parser):
    parser.add_argument("what", help="done, refuse, stop or fail")


def run(args):
    print(f"told {args.what}")
    if args.what == "refuse":
        raise ConfigError("d3.mix.alpha: got 1.5, expected a number in [0, 1)")
    if args.what == "stop":
        raise KeyboardInterrupt
    if args.what == "fail":
        raise RuntimeError("our own bug")
    if args.what == "pipe":
        raise BrokenPipeError
    return 0
'''


@pytest.fixture
def verbs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "d3_test_toy_verb.py").write_text(textwrap.dedent(TOY))
    # A module that does not exist: the chosen verb is the only one that is imported.
    return {"toy": "d3_test_toy_verb", "other": "d3_test_no_such_verb"}


def test_a_verb_runs_and_returns_its_code(verbs, capsys):
    assert main(["toy", "done"], verbs=verbs) == 0
    assert capsys.readouterr() == ("told done\n", "")


def test_a_refusal_is_a_message_without_a_traceback(verbs, capsys):
    assert main(["toy", "refuse"], verbs=verbs) == 1
    assert capsys.readouterr() == (
        "told refuse\n",
        "megatron-d3 toy: d3.mix.alpha: got 1.5, expected a number in [0, 1)\n",
    )


def test_an_interrupt_is_no_traceback(verbs):
    assert main(["toy", "stop"], verbs=verbs) == 130


def test_our_own_bugs_are_not_hidden(verbs):
    with pytest.raises(RuntimeError, match="our own bug"):
        main(["toy", "fail"], verbs=verbs)


@pytest.mark.parametrize(("argv", "message"), [
    ([], "the following arguments are required: VERB"),
    (["tyo"], "invalid choice: 'tyo'"),
    (["toy"], "the following arguments are required: what"),
    (["toy", "done", "--fast"], "unrecognized arguments: --fast"),
])  # fmt: skip
def test_wrong_usage_is_exit_code_2(verbs, capsys, argv, message):
    verbs = {"toy": verbs["toy"]}
    with pytest.raises(SystemExit) as caught:
        main(argv, verbs=verbs)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("size", ["nan", "inf", "0", "five"])
def test_a_demo_corpus_of_no_size_is_refused(tmp_path, capsys, size):
    with pytest.raises(SystemExit) as caught:
        main(["demo-corpus", "--out", str(tmp_path / "corpus"), "--max-mb-per-domain", size])
    assert caught.value.code == 2
    assert f"got '{size}', expected a number >= 0.01" in capsys.readouterr().err
    assert not (tmp_path / "corpus").exists()


def test_help_lists_the_verbs(verbs, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"], verbs={"toy": verbs["toy"]})
    assert caught.value.code == 0
    words = capsys.readouterr().out.split()
    at = words.index("toy")
    assert words[at : at + 4] == ["toy", "do", "as", "told"]


def test_help_of_a_verb_shows_its_example(verbs, capsys):
    with pytest.raises(SystemExit):
        main(["toy", "--help"], verbs=verbs)
    out = capsys.readouterr().out
    assert out.startswith("usage: megatron-d3 toy [-h] what\n\ndo as told\n")
    assert out.endswith("example:\n  megatron-d3 toy done\n  megatron-d3 toy refuse\n")


def test_version(verbs, capsys):
    with pytest.raises(SystemExit):
        main(["--version"], verbs={})
    assert capsys.readouterr().out == f"megatron-d3 {__version__}\n"


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_keeps_the_contract(name, capsys):
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: megatron-d3 {name}")
    assert f"example:\n  megatron-d3 {name}" in out


def run_module(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatron_d3", *argv],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)  # fmt: skip


def test_the_package_can_be_run_as_a_module():
    done = run_module("--version")
    assert (done.returncode, done.stdout) == (0, f"megatron-d3 {__version__}\n")


def test_a_closed_pipe_is_no_error(tmp_path):
    (tmp_path / "d3_test_toy_verb.py").write_text(textwrap.dedent(TOY))
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from megatron_d3.cli.main import main\n"
        "sys.exit(main(['toy', 'pipe'], verbs={'toy': 'd3_test_toy_verb'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
