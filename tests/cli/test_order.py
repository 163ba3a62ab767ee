"""The verb `order`: from a corpus with scores to an ordered one, and what it refuses."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import numpy as np
import pytest

from megatron_d3.cli import order as verb
from megatron_d3.corpus.index import read_index
from megatron_d3.corpus.scores import read_scores
from megatron_d3.corpus.writer import IndexWriter
from megatron_d3.errors import ConfigError, CorpusError

SCORES = [0.5, 0.1, 0.4, 0.2, 0.3, 0.0]


def write(prefix: Path, scores: list[float]) -> Path:
    """Document d is d + 1 tokens, all equal to d."""
    with IndexWriter(prefix, dtype="uint16") as writer:
        for number in range(len(scores)):
            writer.add_document([number] * (number + 1))
    np.save(f"{prefix}.scores.npy", np.array(scores))
    return prefix


def order(*flags: str | Path) -> int:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return verb.run(parser.parse_args([str(flag) for flag in flags]))


@pytest.fixture
def web(tmp_path: Path) -> Path:
    return write(tmp_path / "web", SCORES)


def first_tokens(prefix: Path) -> list[int]:
    index = read_index(prefix)
    out = []
    for pointer in index.pointers.tolist():
        token = np.empty(1, index.dtype)
        index.read_into(token, pointer)
        out.append(int(token[0]))
    return out


def test_documents_lie_in_the_order_of_their_scores(web, tmp_path, capsys):
    flags = ("--method", "sort", "--ascending")
    assert order("--prefix", web, *flags, "--output-prefix", tmp_path / "out") == 0
    assert first_tokens(tmp_path / "out") == [5, 1, 3, 4, 2, 0]
    assert read_index(tmp_path / "out").lengths.tolist() == [6, 2, 4, 5, 3, 1]
    assert os.path.samefile(tmp_path / "web.bin", tmp_path / "out.bin")
    assert capsys.readouterr().out == (
        "sort: ascending, temperature 0, jitter 0, seed 42\n"
        f"in   {web}  6 documents  21 tokens\n"
        f"out  {tmp_path / 'out'}  .bin linked\n"
        "mean score by tenth  0 0.1 0.2 0.3 0.4 0.5\n"
    )


def test_scores_follow_their_documents(web, tmp_path):
    out = tmp_path / "out"
    order("--prefix", web, "--method", "sort", "--descending", "--output-prefix", out)
    scores = read_scores(tmp_path / "out.scores.npy", index=read_index(out))
    assert scores.row(None).tolist() == sorted(SCORES, reverse=True)


def test_provenance_names_everything_that_decided(web, tmp_path, capsys):
    flags = (
        "--preset",
        "saw-pretrain",
        "--ascending",
        "--ratio",
        "0.2",
        "--jitter",
        "5%",
        "--json",
    )
    order("--prefix", web, *flags, "--output-prefix", tmp_path / "out")
    got = json.loads((tmp_path / "out.origin.json").read_text())
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("mean_score_by_tenth") == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
    assert printed == got
    assert got["recipe"] == {
        "method": "saw",
        "version": 1,
        "ascending": True,
        "parameters": {"sections": 3, "ratio": 0.2, "layers": 3},
        "jitter": 0.05,
        "jitter_version": 1,
        "seed": 42,
    }
    assert got["preset"] == "saw-pretrain"
    assert got["inputs"][0]["index"] == read_index(web).digest
    assert got["output"]["index"] == read_index(tmp_path / "out").digest
    assert got["score"]["name"] == "score"
    assert got["bin"] == "linked"


def test_several_corpora_are_ordered_as_one(web, tmp_path):
    code = write(tmp_path / "code", [0.25, 0.05])
    out = tmp_path / "out"
    flags = ("--method", "sort", "--ascending", "--merge", "--output-prefix", out)
    order("--prefix", web, code, *flags)
    assert read_index(out).lengths.tolist() == [6, 2, 2, 4, 1, 5, 3, 1]
    assert json.loads((tmp_path / "out.origin.json").read_text())["bin"] == "concatenated"


def test_copy_writes_the_tokens_in_order(web, tmp_path):
    out = tmp_path / "out"
    order("--prefix", web, "--method", "sort", "--ascending", "--copy", "--output-prefix", out)
    assert not os.path.samefile(tmp_path / "web.bin", tmp_path / "out.bin")
    tokens = np.fromfile(tmp_path / "out.bin", "<u2").tolist()
    assert tokens == [5] * 6 + [1] * 2 + [3] * 4 + [4] * 5 + [2] * 3 + [0]


def test_shuffle_needs_no_scores_and_the_seed_decides(web, tmp_path):
    (tmp_path / "web.scores.npy").unlink()
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        flags = ("--method", "shuffle", "--seed", seed, "--output-prefix", tmp_path / name)
        order("--prefix", web, *flags)
    got = [first_tokens(tmp_path / name) for name in "abc"]
    assert got[0] == got[1] != got[2]
    assert sorted(got[2]) == [0, 1, 2, 3, 4, 5]
    assert not (tmp_path / "a.scores.npy").exists()


def test_permutation_and_plot_are_written(web, tmp_path):
    pytest.importorskip("matplotlib")
    flags = ("--method", "fold", "--layers", "2", "--ascending")
    extra = ("--permutation-out", tmp_path / "p.npy", "--plot", tmp_path / "o.png")
    order("--prefix", web, *flags, *extra, "--output-prefix", tmp_path / "out")
    permutation = np.load(tmp_path / "p.npy")
    assert permutation.dtype == np.int64
    assert permutation.tolist() == first_tokens(tmp_path / "out") == [5, 3, 2, 1, 4, 0]
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")


def test_plot_of_an_unknown_format_is_refused(web, tmp_path):
    pytest.importorskip("matplotlib")
    flags = ("--method", "sort", "--ascending", "--output-prefix", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"--plot: no image format called 'xyz'"):
        order("--prefix", web, *flags, "--plot", tmp_path / "o.xyz")
    assert not (tmp_path / "o.xyz").exists()


def test_dry_run_writes_nothing(web, tmp_path, capsys):
    before = sorted(tmp_path.iterdir())
    extra = ("--permutation-out", tmp_path / "p.npy", "--plot", tmp_path / "o.png", "--dry-run")
    flags = ("--method", "sort", "--ascending", "--output-prefix", tmp_path / "out")
    order("--prefix", web, *flags, *extra)
    assert sorted(tmp_path.iterdir()) == before
    assert ".bin would be linked" in capsys.readouterr().out


def test_an_existing_output_is_replaced_only_with_overwrite(web, tmp_path):
    flags = ("--prefix", web, "--method", "sort", "--output-prefix", tmp_path / "out")
    order(*flags, "--ascending")
    with pytest.raises(CorpusError, match=r"out.bin: exists; .*--overwrite"):
        order(*flags, "--descending", "--permutation-out", tmp_path / "p.npy")
    assert not (tmp_path / "p.npy").exists()
    assert first_tokens(tmp_path / "out") == [5, 1, 3, 4, 2, 0]
    order(*flags, "--descending", "--overwrite")
    assert first_tokens(tmp_path / "out") == [0, 2, 4, 3, 1, 5]


def test_a_corpus_can_be_ordered_in_place(web, tmp_path):
    order("--prefix", web, "--method", "sort", "--ascending", "--output-prefix", web, "--overwrite")
    assert first_tokens(web) == [5, 1, 3, 4, 2, 0]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"web.{end}" for end in ("bin", "idx", "origin.json", "scores.json", "scores.npy")]  # fmt: skip


def test_even_layers_warn_on_stderr(web, tmp_path, capsys):
    flags = ("--method", "saw", "--ratio", "0.4", "--layers", "2", "--ascending", "--dry-run")
    order("--prefix", web, *flags, "--output-prefix", tmp_path / "out")
    assert "warning: saw: with 2 layers (even)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ascending"], r"give --method or --preset"),
        (["--method", "sort"], r"sort needs --ascending"),
        (["--method", "sort", "--preset", "saw-wide", "--ascending"], r"preset saw-wide is saw"),
        (["--preset", "sawpretrain", "--ascending"], r"did you mean 'saw-pretrain'"),
        (["--method", "sort", "--layers", "3", "--ascending"], r"not a parameter of sort"),
        (["--method", "saw", "--sections", "0", "--ascending"], r"order.sections: got 0"),
        (["--method", "saw", "--ratio", "0.6", "--ascending"], r"order.ratio: got 0.6"),
        (["--method", "fold", "--layers", "0", "--ascending"], r"order.layers: got 0"),
        (["--method", "sort", "--jitter", "1.5", "--ascending"], r"order.jitter: got 1.5"),
        (["--method", "sort", "--scores", "a", "b", "--ascending"], r"got 2 files for 1 corpora"),
    ],
)
def test_flags_that_do_not_fit_are_refused(web, tmp_path, flags, message):
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=message):
        order("--prefix", web, "--output-prefix", tmp_path / "out", *flags)
    assert sorted(tmp_path.iterdir()) == before


def test_several_corpora_without_merge_are_refused(web, tmp_path):
    flags = ("--method", "shuffle", "--output-prefix", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"got 2 corpora; give --merge"):
        order("--prefix", web, web, *flags)


def test_a_plot_without_scores_is_refused(web, tmp_path):
    (tmp_path / "web.scores.npy").unlink()
    flags = ("--method", "shuffle", "--output-prefix", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"--plot: there are no scores to draw"):
        order("--prefix", web, *flags, "--plot", tmp_path / "o.png")


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([0.0, float("nan"), 0.1, float("nan"), 0.0, 0.0], r"document 1 has no score"),
        ([0.0, 1.0], r"2 scores, but .*web has 6 documents"),
    ],
)
def test_scores_that_do_not_fit_are_refused(web, tmp_path, scores, message):
    np.save(tmp_path / "web.scores.npy", np.array(scores))
    flags = ("--method", "sort", "--ascending", "--output-prefix", tmp_path / "out")
    with pytest.raises(CorpusError, match=message):
        order("--prefix", web, *flags)


@pytest.mark.parametrize("text", ["a", "5%%", ""])
def test_a_jitter_that_is_no_number_is_a_usage_error(web, tmp_path, text, capsys):
    with pytest.raises(SystemExit) as stop:
        order("--prefix", web, "--output-prefix", tmp_path / "out", "--jitter", text)
    assert stop.value.code == 2
    assert "expected a count (5000), a share (0.05) or a percentage (5%)" in capsys.readouterr().err


def test_the_same_flags_give_the_same_bytes(web, tmp_path):
    flags = ("--method", "segment", "--jitter", "3", "--first-percent", "40")
    for name in ("a", "b"):
        order("--prefix", web, *flags, "--output-prefix", tmp_path / name)
    assert (tmp_path / "a.idx").read_bytes() == (tmp_path / "b.idx").read_bytes()
