"""The demo corpus: real text in clearly different domains, the same bytes every time."""

from __future__ import annotations

import argparse
import json
import logging
import re
from pathlib import Path

import pytest

pytest.importorskip("sentencepiece")

from megatron_d3.cli import demo_corpus as verb
from megatron_d3.corpus import demo_text
from megatron_d3.corpus.demo import DemoCorpus, build_demo_corpus, domains_yaml, open_demo_corpus
from megatron_d3.corpus.demo_text import find_sources, installation_roots
from megatron_d3.corpus.domain import open_domain
from megatron_d3.corpus.tokenizer import Tokenizer
from megatron_d3.errors import CorpusError
from tests.corpus_helpers import read_documents

LINE = "the {} line of a text that is long enough to be kept, number {}\n"


def text_of(kind: str, number: int, lines: int = 30) -> str:
    return "".join(LINE.format(kind, number * 1000 + line) for line in range(lines))


@pytest.fixture(scope="module")
def roots(tmp_path_factory) -> list[tuple[str, Path]]:
    """A tiny installation: twelve files a domain, and what must be left out."""
    root = tmp_path_factory.mktemp("python")
    files: dict[str, str | bytes] = {}
    for i in range(12):
        files[f"lib/module{i}.py"] = text_of("source", i)
        files[f"include/header{i}.h"] = text_of("header", i)
        files[f"packages/pkg/doc{i}.py"] = f'"""{text_of("docstring", i)}"""\nx = {i}\n'
        files[f"packages/pkg/stub{i}.pyi"] = text_of("stub", i)
        files[f"packages/page{i}.html"] = text_of("page", i)
        files[f"packages/table{i}.csv"] = text_of("table", i)
    files["lib/same.py"] = text_of("source", 0).replace(" ", "  ")  # same words
    files["packages/same.html"] = text_of("header", 0)  # same as a domain before
    files["lib/tiny.py"] = "x = 1\n"
    files["lib/binary.py"] = b"\xff\xfe" * 500
    files["lib/minified.py"] = "x" * 5000
    files["lib/mark.py"] = "\u2581" * 100 + text_of("mark", 0)
    files["lib/site-packages/inside.py"] = text_of("inside", 0)
    files["packages/torch/include/ATen/ops/add.h"] = text_of("generated", 0)
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    kinds = {"lib": "stdlib", "packages": "packages", "include": "include"}
    return [(kind, root / name) for name, kind in kinds.items()]


def build(path: Path, roots, **kwargs) -> DemoCorpus:
    settings = {"max_bytes_per_domain": 40_000, "vocab_size": 500} | kwargs
    return build_demo_corpus(path, roots=roots, **settings)


@pytest.fixture(scope="module")
def corpus(roots, tmp_path_factory) -> DemoCorpus:
    return build(tmp_path_factory.mktemp("demo") / "corpus", roots)


def texts_of(corpus: DemoCorpus, prefix: str) -> list[str]:
    tokenizer = Tokenizer(corpus.tokenizer_model)
    return [tokenizer.decode(tokens[:-1]) for tokens in read_documents(corpus.path / prefix)]


def test_holds_every_text_once_and_whole_lines(corpus):
    texts = texts_of(corpus, "python") + texts_of(corpus, "python_valid")
    assert len(texts) == 12
    for i in range(12):  # cut after the last whole line below a fortieth of 40,000 bytes
        (found,) = [text for text in texts if text.startswith(LINE.format("source", i * 1000))]
        assert text_of("source", i).startswith(found.replace("  ", " "))
        assert found.endswith("\n") and 900 < len(found) <= 1000


def test_domains_are_in_their_order_and_left_out_texts_are_out(corpus):
    names = [domain.name for domain in corpus.domains]
    assert names == ["python", "c", "prose", "stubs", "markup", "data", "unicode"]
    markup = texts_of(corpus, "markup") + texts_of(corpus, "markup_valid")
    assert len(markup) == 12  # the copy of a header is not among them
    everything = "".join(
        text
        for domain in corpus.domains
        for part in (domain.train, domain.valid)
        for text in texts_of(corpus, part.prefix)
    )
    for word in ("mark line", "inside", "generated", "xxxxx"):
        assert word not in everything


def test_prose_is_docstrings_without_code(corpus):
    for text in texts_of(corpus, "prose"):
        assert text.startswith("the docstring line") and "x =" not in text


def test_no_document_is_in_both_parts(corpus):
    for domain in corpus.domains:
        train = set(texts_of(corpus, domain.train.prefix))
        valid = set(texts_of(corpus, domain.valid.prefix))
        assert train and valid and not train & valid


def test_table_is_true(corpus):
    for domain in corpus.domains:
        for part in (domain.train, domain.valid):
            documents = read_documents(corpus.path / part.prefix)
            assert part.documents == len(documents)
            assert part.tokens == sum(map(len, documents))
            assert part.bytes == sum(len(t.encode()) for t in texts_of(corpus, part.prefix))
            assert {tokens[-1] for tokens in documents} == {corpus.eod_id}
        total = domain.train.bytes + domain.valid.bytes
        assert 0.05 * total <= domain.valid.bytes < 0.25 * total


def test_domains_open_as_the_yaml_block_says(corpus):
    import yaml

    block = yaml.safe_load((corpus.path / "domains.yaml").read_text())
    assert (corpus.path / "domains.yaml").read_text() == domains_yaml(corpus)
    assert list(block["domains"]) == [domain.name for domain in corpus.domains]
    for name, entry in block["domains"].items():
        paths = {key: [corpus.path / prefix for prefix in entry[key]] for key in entry}
        domain = open_domain(name, seq_length=32, seed=1, **paths)
        assert domain.valid is not None and domain.info.num_samples > 3


def test_same_text_and_parameters_give_the_same_bytes(corpus, roots, tmp_path):
    build(tmp_path / "again", roots)
    names = sorted(path.name for path in corpus.path.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "again").iterdir())
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (corpus.path / name).read_bytes()


def test_finished_corpus_is_used_as_it_is(corpus, roots, monkeypatch):
    monkeypatch.setattr(demo_text, "find_sources", None)
    assert build(corpus.path, roots) == corpus == open_demo_corpus(corpus.path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 600}, "was built with vocab_size 500, now 600; remove it or choose"),
        ({"max_bytes_per_domain": 50_000}, "was built with max_bytes_per_domain 40000, now 50000"),
        ({"valid_fraction": 0.1}, "was built with valid_fraction 0.05, now 0.1"),
    ],
)
def test_other_parameters_do_not_overwrite_it(corpus, roots, change, message):
    with pytest.raises(CorpusError, match=message):
        build(corpus.path, roots, **change)


def test_empty_folder_is_filled_and_another_is_not_touched(roots, tmp_path):
    (tmp_path / "empty").mkdir()
    assert build(tmp_path / "empty", roots).num_tokens > 0
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("precious")
    with pytest.raises(CorpusError, match="full: exists and is no demo corpus; remove it or"):
        build(tmp_path / "full", roots)
    (tmp_path / "file").write_text("precious")
    with pytest.raises(CorpusError, match="file: exists and is no demo corpus"):
        build(tmp_path / "file", roots)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "full"]


def test_failure_leaves_nothing(roots, tmp_path):
    with pytest.raises(CorpusError, match="vocab_size 100 cannot be trained"):
        build(tmp_path / "corpus", roots, vocab_size=100)
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_made_is_refused(roots, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CorpusError, match="corpus: cannot be written: Not a directory"):
        build(tmp_path / "file" / "corpus", roots)


def test_too_few_domains_are_refused_with_a_table(roots, tmp_path, caplog):
    with pytest.raises(CorpusError, match=r"demo corpus: 2 domains with .*found: python 0, c 11,"):
        build(tmp_path / "corpus", roots[2:])
    assert "only 0 bytes of python, left out" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_small_domain_is_remarked_upon(roots, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        build(tmp_path / "corpus", roots)
    assert re.search(r"only 11,\d\d\d bytes of markup$", caplog.text, re.MULTILINE)
    assert "unicode" not in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_bytes_per_domain": 100}, "max_bytes_per_domain: got 100, expected at least 10,000"),
        ({"valid_fraction": 0}, r"valid_fraction: got 0, expected a number in \(0, 0.5\]"),
        ({"valid_fraction": 0.6}, "valid_fraction: got 0.6"),
    ],
)
def test_parameters_out_of_range_are_refused(roots, tmp_path, change, message):
    with pytest.raises(CorpusError, match=message):
        build(tmp_path / "corpus", roots, **change)


def test_damaged_corpus_is_refused(roots, tmp_path):
    corpus = build(tmp_path / "corpus", roots)
    table = json.loads((corpus.path / "corpus.json").read_text())
    table["domains"][0]["train"]["tokens"] += 1
    (corpus.path / "corpus.json").write_text(json.dumps(table))
    with pytest.raises(CorpusError, match="python: .* tokens, but corpus.json says .* build it"):
        open_demo_corpus(corpus.path)
    table["version"] = 0
    (corpus.path / "corpus.json").write_text(json.dumps(table))
    with pytest.raises(CorpusError, match="corpus.json has version 0, expected 1; remove the"):
        open_demo_corpus(corpus.path)
    with pytest.raises(CorpusError, match="no finished demo corpus here"):
        open_demo_corpus(tmp_path / "nowhere")


class TestDemoText:
    def test_sources_do_not_depend_on_where_the_roots_lie(self, roots, tmp_path):
        import shutil

        moved = []
        for kind, root in roots:
            shutil.copytree(root, tmp_path / root.name)
            moved.append((kind, tmp_path / root.name))
        first, second = find_sources(roots), find_sources(moved)
        for domain, sources in first.items():
            assert [s.name for s in sources] == [s.name for s in second[domain]]
            assert [s.read() for s in sources] == [s.read() for s in second[domain]]

    @pytest.mark.parametrize(
        ("kind", "path", "domain"),
        [
            ("stdlib", "json/decoder.py", "python"),
            ("stdlib", "encodings/cp1252.py", "unicode"),
            ("stdlib", "pydoc_data/topics.py", None),
            ("packages", "torch/nn/functional.py", "prose"),
            ("include", "Python.h", "c"),
            ("packages", "torch/include/ATen/ops/add.h", None),
            ("packages", "numpy/__init__.pyi", "stubs"),
            ("packages", "x-1.dist-info/METADATA", "markup"),
            ("packages", "x-1.dist-info/licenses/LICENSE.md", "prose"),
            ("packages", "x-1.dist-info/licenses/COPYING", "prose"),
            ("stdlib", "idlelib/NEWS.txt", "prose"),
            ("packages", "x/README.md", "markup"),
            ("stdlib", "test/decimaltestdata/add.decTest", "data"),
            ("packages", "x/notes.txt", None),
            ("packages", "x/lib.so", None),
        ],
    )
    def test_domain_of_a_file(self, kind, path, domain):
        assert demo_text._domain_of(kind, path) == domain

    def test_docstrings_stand_in_the_order_of_the_module(self):
        source = (
            '"""Module."""\nclass A:\n    """Class."""\n    def f(self):\n        """Method."""\n'
            '        def g():\n            """Inner."""\n'
            'async def h():\n    """Async, not taken."""\ndef i():\n    """Function."""\n'
        )
        assert demo_text._docstrings(source) == "Module.\n\nClass.\n\nMethod.\n\nFunction."

    @pytest.mark.parametrize("source", [None, "x = 1\n" * 99, '"""open', '"""a"""\ndef f(:\n'])
    def test_files_without_docstrings_give_none(self, source):
        assert demo_text._docstrings(source) is None

    def test_package_description_follows_the_headers(self):
        metadata = "Name: x\nVersion: 1\n\n# x\n\nText.\n"
        assert demo_text._description(metadata) == "# x\n\nText.\n"
        assert demo_text._description(None) is None

    def test_language_reference_is_parsed_into_topics(self, tmp_path):
        (tmp_path / "topics.py").write_text("topics = {'if': 'The if statement', 'for': 'Loops'}\n")
        found = demo_text._topics(tmp_path / "topics.py")
        assert [(s.name, s.read()) for s in found] == [
            ("topics/if", "The if statement"),
            ("topics/for", "Loops"),
        ]
        (tmp_path / "topics.py").write_text("topics = {")
        assert demo_text._topics(tmp_path / "topics.py") == []
        assert demo_text._topics(tmp_path / "none.py") == []

    def test_unicode_rows_name_the_scripts_of_the_world(self):
        rows = {source.name: source.read() for source in demo_text._unicode_rows()}
        assert "U+0041 A LATIN CAPITAL LETTER A; Lu, lower a\n" in rows["unicode/000"]
        assert "U+00BD ½ VULGAR FRACTION ONE HALF; No, made of" in rows["unicode/000"]
        assert "GREEK SMALL LETTER ALPHA; Ll, upper Α\n" in rows["unicode/003"]  # noqa: RUF001  (it is Greek)
        assert "unicode/04e" not in rows  # computed names

    def test_this_installation_has_text_of_at_least_five_domains(self):
        sources = find_sources(installation_roots())
        assert sum(len(found) > 50 for found in sources.values()) >= 5


def test_verb_prints_a_table_and_json(corpus, capsys):
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    flags = ["--out", str(corpus.path), "--max-mb-per-domain", "0.04", "--vocab-size", "500"]
    assert verb.run(parser.parse_args(flags)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["domain", "documents", "bytes", "tokens"]
    assert [line.split()[0] for line in lines[1:-1]] == [d.name for d in corpus.domains]
    assert lines[-1].endswith(f"vocabulary 500, in {corpus.path}")
    assert verb.run(parser.parse_args([*flags, "--json"])) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["num_tokens"] == corpus.num_tokens and table["eod_id"] == 2


@pytest.mark.slow
def test_this_installation_gives_twenty_megabytes(tmp_path):
    corpus = build_demo_corpus(tmp_path / "corpus")
    assert corpus.num_bytes > 20e6 and len(corpus.domains) >= 5
