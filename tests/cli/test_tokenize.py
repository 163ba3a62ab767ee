"""The verb `tokenize`: flags, summary and exit codes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_d3.cli import tokenize as verb
from tests.corpus_helpers import read_documents


def run(*flags) -> int:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return verb.run(parser.parse_args([str(flag) for flag in flags]))


@pytest.fixture
def flags(tmp_path) -> list:
    rows = [{"text": "ab", "q": 1}, {"text": "", "q": 2}, {"text": "c"}]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "", "{"]))
    return ["--input", tmp_path / "*.jsonl", "--output-prefix", tmp_path / "web",
            "--tokenizer-type", "bytes", "--workers", "1"]  # fmt: skip


def test_the_summary_says_what_was_skipped_and_why(flags, tmp_path, capsys):
    assert run(*flags, "--append-eod", "--score-key", "q", "--on-error", "skip") == 0
    lines = capsys.readouterr().out.replace(str(tmp_path), "DIR").splitlines()
    assert lines.pop(1).endswith(" tokens/s")
    assert lines == [
        "DIR/web: 2 documents, 3 tokens from 2 bytes of text (0.67 bytes a token)",
        "empty documents kept: 1",
        "blank lines passed over: 1",
        "skipped, no key 'q': 1",
        "skipped, broken JSON: 1",
        "skipped rows are listed in DIR/web.skipped.jsonl",
        "scores: q in DIR/web.scores.npy",
    ]
    assert read_documents(tmp_path / "web") == [[97, 98, 0], []]


def test_json_can_be_piped(flags, capsys):
    assert run(*flags, "--json", "--on-error", "skip") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_documents"] == 3
    assert report["skipped"] == {"broken JSON": 1}


def test_sizes_have_units(capsys):
    assert [verb._size(text) for text in ("7", "64M", "2gb", "1k")] == [7, 64e6, 2e9, 1000]
    with pytest.raises(argparse.ArgumentTypeError, match="got '1.5G', expected bytes"):
        verb._size("1.5G")


@pytest.mark.parametrize(
    ("tool", "verb"), [("preprocess_data", "tokenize"), ("reorder_index", "order")]
)
def test_the_tools_are_doors_to_the_verbs(tool, verb, tmp_path):
    path = Path(__file__).parents[2] / "tools" / f"{tool}.py"
    words = [sys.executable, path, "--help"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.startswith(f"usage: megatron-d3 {verb} ")
