"""The configuration file: read, refused, written back, documented."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_d3.config import (
    DomainConfig,
    MixConfig,
    OrderConfig,
    RunConfig,
    load_config,
    parse_config,
)
from megatron_d3.config_reference import render
from megatron_d3.errors import ConfigError
from megatron_d3.influence.settings import D3Config
from megatron_d3.mix import Natural, Schedule, Static, Temperature, UniMax

FULL = """\
domains:
  web:  {paths: [corpus/web], order: shuffle}
  code: {paths: [corpus/code_a, /abs/code_b], valid_paths: [corpus/code_valid], order: stored}
  wiki: corpus/wiki
seed: 1234
valid_fraction: 1e-2
mix: {type: static, weights: {web: 0.7, code: 0.2, wiki: 1e-1},
      max_epochs: {wiki: 2}, exhausted: stop}
round_steps: 4
sampling: multinomial
"""
SHORT = "domains: {web: a, code: [b, c]}\n"


@pytest.fixture
def write(tmp_path):
    def write_file(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write_file


def test_a_full_file(write, tmp_path):
    assert load_config(write(FULL)) == RunConfig(
        domains={
            "web": DomainConfig((tmp_path / "corpus/web",)),
            "code": DomainConfig(
                (tmp_path / "corpus/code_a", Path("/abs/code_b")),
                (tmp_path / "corpus/code_valid",),
                "stored",
            ),
            "wiki": DomainConfig((tmp_path / "corpus/wiki",)),
        },
        seed=1234,
        valid_fraction=0.01,
        round_steps=4,
        sampling="multinomial",
        mix=MixConfig(
            "static", {"wiki": 2.0}, "stop", Static.Config({"web": 0.7, "code": 0.2, "wiki": 0.1})
        ),
    )


def test_the_shortest_file(write, tmp_path):
    config = load_config(write(SHORT))
    assert config == RunConfig(
        {
            "web": DomainConfig((tmp_path / "a",)),
            "code": DomainConfig((tmp_path / "b", tmp_path / "c")),
        }
    )
    assert config.mix == MixConfig("static", None, "redistribute", Static.Config(None))
    assert list(config.domains) == ["web", "code"]


@pytest.mark.parametrize(
    "text",
    [
        FULL,
        SHORT,
        SHORT + "mix: {type: temperature, temperature: inf}",
        SHORT + "mix: {type: unimax, max_epochs: {web: 4}}",
        SHORT + "order: {type: d3, gamma: 1e-3, sketch: {dim: 100}}",
        SHORT + "order: {type: d3, preset: paper, window: 7, overlap: true}",
    ],
)
def test_the_resolved_configuration_is_json_and_loads_back(write, text, tmp_path):
    config = load_config(write(text))
    plain = json.loads(json.dumps(config.to_dict(), allow_nan=False))
    assert plain == config.to_dict()
    assert parse_config(plain, folder=Path("/elsewhere")) == config
    assert list(plain) == [
        "domains", "seed", "valid_fraction", "mix", "round_steps", "read_ahead_steps", "sampling",
        *(["order"] if config.order else []),
    ]  # fmt: skip


def test_the_resolved_mix_in_full(write):
    assert load_config(write(FULL)).to_dict()["mix"] == {
        "type": "static",
        "max_epochs": {"wiki": 2.0},
        "exhausted": "stop",
        "weights": {"web": 0.7, "code": 0.2, "wiki": 0.1},
    }


@pytest.mark.parametrize(
    ("mix", "params"),
    [
        ("{type: natural}", Natural.Config()),
        ("{type: temperature, temperature: 3}", Temperature.Config(3.0)),
        ("{type: unimax, max_epochs: 4}", UniMax.Config(4.0)),
        (
            "{type: schedule, interpolation: cosine,"
            + " knots: [[0, {web: 1, code: 3}], [1e3, {web: 1, code: 1}]]}",
            Schedule.Config(
                ((0, {"web": 1.0, "code": 3.0}), (1000, {"web": 1.0, "code": 1.0})), "cosine"
            ),
        ),
    ],
)
def test_the_settings_of_every_mixer(write, mix, params):
    config = load_config(write(SHORT + f"mix: {mix}"))
    assert config.mix.params == params


def test_max_epochs_reaches_both_unimax_and_the_cap(write):
    mix = load_config(write(SHORT + "mix: {type: unimax, max_epochs: 4}")).mix
    assert mix.max_epochs == mix.params.max_epochs == 4


def test_a_weights_file_is_read_relative_to_the_configuration(write, tmp_path):
    (tmp_path / "w.json").write_text('{"weights": {"web": 1, "code": 3}}')
    config = load_config(write(SHORT + "mix: {weights: w.json}"))
    assert config.mix.params == Static.Config({"web": 1, "code": 3})


OTHER = r"not those of this run's domains; no such domains: pile, books; no number for: web, code$"


@pytest.mark.parametrize(("mix", "content", "message"), [
    ("weights: w.json", '{"weights": {"pile": 1, "books": 3}}', r"^d3.mix.weights: .*/w.json: " + OTHER),
    ("weights: w.json", '{"weights": {"web": 1}}',
     r"^d3.mix.weights: .*/w.json: no number for domain code$"),
    ("weights: w.json", '{"weights": {"web": 1, "code": 1, "cod": 1}}',
     r"^d3.mix.weights: .*/w.json.cod: no such domain, did you mean code\?$"),
    ("type: odm, weights: w.json", '{"weights": {"pile": 1, "books": 3}}',
     r"^d3.mix.weights: .*/w.json: " + OTHER),
    ("type: ado, weights: w.json", '{"weights": {"pile": 1, "books": 3}}',
     r"^d3.mix.weights: .*/w.json: " + OTHER),
    ("type: reference_loss, losses: w.json", '{"loss": {"pile": 1, "books": 3}}',
     r"^d3.mix.losses: .*/w.json: " + OTHER),
    ("type: reference_loss, losses: w.json", '{"weights": {"web": 1, "code": 3}}',
     r'^d3.mix.losses: .*w.json holds no {"loss": {name: number}}$'),
])
def test_a_file_of_other_domains_is_refused_by_name(write, tmp_path, mix, content, message):
    (tmp_path / "w.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_config(write(SHORT + f"mix: {{{mix}}}"))


def test_overrides_replace_values(write):
    config = load_config(
        write(FULL), ["mix={type: natural}", "seed=null", "domains.web.order=stored"]
    )
    assert config.mix == MixConfig("natural", params=Natural.Config())
    assert config.seed is None and config.domains["web"].order == "stored"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1", r"run.yaml: got \[1\], expected a mapping with the key domains"),
        ("", r"run.yaml: got null, expected a mapping with the key domains"),
        ("seed: 1", r"^d3.domains: got null, expected a mapping of names to paths$"),
        ("domains: {}", r"^d3.domains: got {}, expected a mapping of names to paths$"),
        ("domains: {'a b': x}", r"^d3.domains: got the name 'a b', expected letters, digits"),
        ("domains: {a/b: x}", r"^d3.domains: got the name 'a/b', expected letters, digits"),
        ("domains: {a: 3}", r"^d3.domains.a: got 3, expected a mapping of settings$"),
        (
            "domains: {a: []}",
            r"^d3.domains.a.paths: got an empty list, expected at least one path$",
        ),
        (
            "domains: {a: {order: stored}}",
            r"^d3.domains.a.paths: missing, expected a list, each a path$",
        ),
        ("domains: {a: {path: x}}", r"^d3.domains.a.path: unknown key, did you mean paths\?$"),
        (
            "domains: {a: {paths: x, order: random}}",
            r"^d3.domains.a.order: got 'random', expected shuffle or stored$",
        ),
        ("domains: {a: x, a: y}", r"run.yaml, line 1: the key a is given twice$"),
        (SHORT + "domain: {}", r"^d3.domain: unknown key, did you mean domains\?$"),
        (SHORT + "valid_fraction: 1", r"^d3.valid_fraction: got 1, expected a number in \[0, 1\)$"),
        (SHORT + "round_steps: 0", r"^d3.round_steps: got 0, expected an integer in \[1, inf\)$"),
        (SHORT + "seed: x", r"^d3.seed: got 'x', expected an integer or null$"),
        (
            SHORT + "sampling: random",
            r"^d3.sampling: got 'random', expected apportion or multinomial$",
        ),
        (SHORT + "mix: static", r"^d3.mix: got 'static', expected a mapping of settings$"),
        (SHORT + "mix: {type: statik}", r"^d3.mix.type: no mixer statik, did you mean static\?$"),
        (SHORT + "mix: {type: 3}", r"^d3.mix.type: got 3, expected a text$"),
        (
            SHORT + "mix: {weigths: {}}",
            r"^d3.mix.weigths: unknown key for type static, did you mean weights\?$",
        ),
        (
            SHORT + "mix: {max_epoch: 3}",
            r"^d3.mix.max_epoch: unknown key for type static, did you mean max_epochs\?$",
        ),
        (
            SHORT + "mix: {type: natural, weights: {}}",
            (
                r"^d3.mix.weights: unknown key for type natural, it belongs to static, odm, ado,"
                r" reference_loss; leave it out, or set the whole entry, e.g. --d3-set"
                r" 'mix={type: natural}'$"
            ),
        ),
        (
            SHORT + "mix: {max_epochs: 0}",
            r"^d3.mix.max_epochs: got 0, expected a number in \(0, inf\]$",
        ),
        (
            SHORT + "mix: {max_epochs: {web: -1}}",
            r"^d3.mix.max_epochs.web: got -1, expected a number in \(0, inf\]$",
        ),
        (
            SHORT + "mix: {exhausted: never}",
            r"^d3.mix.exhausted: got 'never', expected redistribute or repeat or stop$",
        ),
        (
            SHORT + "mix: {type: temperature}",
            r"^d3.mix.temperature: missing, expected a number in \(0, inf\]$",
        ),
        (
            SHORT + "mix: {type: unimax}",
            r"^d3.mix.max_epochs: missing, expected a number in \(0, inf\]",
        ),
        (
            SHORT + "mix: {weights: {web: one}}",
            r"^d3.mix.weights.web: got 'one', expected a number$",
        ),
        (SHORT + "mix: {weights: none.json}", r"^d3.mix.weights: cannot read .*/none.json"),
    ],
)
def test_what_cannot_be_used_is_refused(write, text, message):
    with pytest.raises(ConfigError, match=message):
        load_config(write(text))


def test_the_order_is_left_out_of_a_plan_that_has_none(write):
    assert load_config(write(SHORT)).order is None
    assert load_config(write(SHORT + "order: null")).order is None
    assert "order" not in load_config(write(SHORT)).to_dict()
    config = load_config(write(SHORT + "order: {type: d3}"))
    assert config.order == OrderConfig("d3", D3Config())
    assert list(config.to_dict())[-1] == "order"
    assert list(config.to_dict()["order"])[:3] == ["type", "window", "estimator"]


def test_settings_of_the_order_may_be_replaced_and_come_from_a_preset(write):
    path = write(SHORT + "order: {type: d3, preset: paper, probes: 4}")
    order = load_config(path, ["order.window=30", "order.sketch.dim=100"]).order
    assert order.params.window == 30 and order.params.probes == 4
    assert (order.params.solver, order.params.sketch.type) == ("rsr", "gaussian")
    assert order.params.sketch.dim == 100
    assert load_config(path, ["order=null"]).order is None
    assert load_config(write(SHORT), ["order.type=d3"]).order == OrderConfig("d3", D3Config())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("order: d3", r"^d3.order: got 'd3', expected a mapping of settings, or null for the order"),
        ("order: {window: 60}", r"^d3.order.type: missing, expected d3$"),
        ("order: {type: D3}", r"^d3.order.type: got 'D3', expected d3$"),
        ("order: {type: [d3]}", r"^d3.order.type: got \['d3'\], expected d3$"),
        ("order: {type: d3, windows: 6}", r"^d3.order.windows: unknown key, did you mean window\?$"),
        ("order: {type: d3, window: 0}", r"^d3.order.window: got 0, expected an integer in \[1, inf"),
        (
            "order: {type: d3}\nround_steps: 2",
            r"^d3.round_steps: got 2, expected 1 with d3.order: each global batch is a unit",
        ),
    ],
)
def test_an_order_that_cannot_be_used_is_refused(write, text, message):
    with pytest.raises(ConfigError, match=message):
        load_config(write(SHORT + text))


def test_more_domains_than_the_plan_can_number():
    content = {"domains": {f"d{index}": "x" for index in range(32768)}}
    with pytest.raises(ConfigError, match=r"^d3.domains: got 32768 domains, expected at most"):
        parse_config(content, folder=Path("/data"))


def test_the_reference_in_docs_is_the_code_s():
    path = Path(__file__).parents[1] / "docs" / "config.md"
    assert path.read_text() == render(), (
        "run: python -m megatron_d3.config_reference > docs/config.md"
    )


def test_every_key_is_documented():
    entries = [line for line in render().splitlines() if line.startswith("- **")]
    texts = [line for line in render().splitlines() if line.startswith("  ") and line.strip()]
    assert len(entries) >= 15
    assert all(len(text.split()) >= 3 for text in texts)
