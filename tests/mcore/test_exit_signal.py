"""A signal that asks for a checkpoint ends neither helpers nor a rank that is leaving."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.mcore.launcher import ROOT

_START = """\
import os, signal, subprocess, sys, time
from megatron_d3.mcore import exit_signal
received = []
signal.signal(signal.SIGUSR1, lambda *_: received.append(True))
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", _START + textwrap.dedent(code)], cwd=ROOT, text=True,
        capture_output=True, timeout=120, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)})


_HELPER = """\
    child = subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input(); print(2)"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child.stdout.readline()
    child.send_signal(signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)
    while not received:
        time.sleep(0.01)
    print(child.communicate("\\n")[0].strip(), child.returncode)
"""


@pytest.mark.parametrize(("shield", "printed"), [
    ("    exit_signal.shield_children(signal.SIGUSR1)\n", "2 0"), ("", "-10")])
def test_helpers_of_a_rank_outlive_the_signal(shield: str, printed: str) -> None:
    done = run(shield + _HELPER)
    assert done.stdout.strip() == printed, done.stderr


@pytest.mark.parametrize(("before", "code"), [
    ("    exit_signal.ignore(signal.SIGUSR1)\n", 0), ("", -signal.SIGUSR1)])
def test_a_rank_that_leaves_outlives_the_signal(before: str, code: int) -> None:
    """Python restores the default while it ends; here it is done for it."""
    done = run(before + """\
    if not isinstance(signal.getsignal(signal.SIGUSR1), signal.Handlers):
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGUSR1)
    """)
    assert done.returncode == code, done.stderr
