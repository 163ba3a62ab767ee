"""Progress: a bar on a terminal, a line a minute elsewhere."""

from __future__ import annotations

import io

from megatron_d3.corpus.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def make(stream: io.StringIO, **options: bool) -> tuple[Progress, list[float]]:
    now = [0.0]
    progress = Progress(4 * 10**9, label="tokenize", stream=stream, clock=lambda: now[0], **options)
    return progress, now


def test_a_line_a_minute_without_a_terminal():
    stream = io.StringIO()
    progress, now = make(stream)
    for second in range(1, 126):
        now[0] = second
        progress.add(16 * 10**6, 1000)
    progress.close()
    assert stream.getvalue() == (
        "tokenize  24% | 0.96 of 4.00 GB | 60,000 tokens | 1,000 tokens/s | 0:03:10 left\n"
        "tokenize  48% | 1.92 of 4.00 GB | 120,000 tokens | 1,000 tokens/s | 0:02:10 left\n"
    )


def test_a_bar_on_a_terminal():
    stream = Terminal()
    progress, now = make(stream)
    now[0] = 3600.0
    progress.add(10**9, 7200)
    assert stream.getvalue() == (
        "\r[######                  ] tokenize  25% | 1.00 of 4.00 GB | 7,200 tokens | 2 tokens/s "
        "| 3:00:00 left\x1b[K"
    )
    progress.close()
    assert stream.getvalue().endswith("left\x1b[K\n")


def test_silence_and_no_input():
    stream = Terminal()
    progress, now = make(stream, is_silent=True)
    now[0] = 100.0
    assert progress.line().endswith("0 tokens/s | ? left")
    progress.add(1, 1)
    progress.close()
    assert stream.getvalue() == ""
    assert Progress(0, label="x", stream=stream).line().startswith("x 100% |")
