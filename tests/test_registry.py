"""Plug-ins and the building of mixer and cap."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from megatron_d3.config import MixConfig, parse_config
from megatron_d3.errors import ConfigError
from megatron_d3.mix import MIXERS, Natural, Schedule, Static, UniMax
from megatron_d3.registry import build_mix, load_plugins
from megatron_d3.types import DomainInfo

DOMAINS = [DomainInfo("a", 40, 400), DomainInfo("b", 60, 600)]


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        return name

    return write


def test_a_plugin_adds_a_mixer_to_the_configuration(plugin):
    name = plugin(
        "d3_test_mixers_a",
        """
        from dataclasses import dataclass
        from megatron_d3.mix import Static

        class Mine(Static):
            @dataclass(frozen=True)
            class Config:
                strength: float = 1.0

        MIXERS = {"mine": Mine}
        """,
    )
    mixers = load_plugins([name])
    assert list(mixers) == [*MIXERS, "mine"] and "mine" not in MIXERS
    content = {"domains": {"a": "x"}, "mix": {"type": "mine", "strength": 2}}
    config = parse_config(content, folder=Path("/data"), mixers=mixers)
    assert config.mix.params.strength == 2.0
    assert load_plugins([]) == MIXERS


def test_a_plugin_without_mixers_is_only_imported(plugin):
    assert load_plugins([plugin("d3_test_mixers_b", "x = 1")]) == MIXERS


MIXER = """
    from dataclasses import dataclass
    class M:
        VERSION = 1; is_online = False
        def init(self): ...
        def update(self, state, signals): ...
        def weights(self, state, context): ...
        {config}
    MIXERS = {{"m": M}}
    """


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "c",
            "1 / 0",
            r"^--d3-plugin d3_test_mixers_c: cannot be imported: ZeroDivisionError: division",
        ),
        (
            "d",
            "MIXERS = [1]",
            r"^--d3-plugin d3_test_mixers_d: MIXERS is \[1\], expected a dict of names",
        ),
        ("e", "MIXERS = {'static': 1}", r"there is a mixer static already, choose another name$"),
        (
            "f",
            "MIXERS = {'m': 1}",
            r"mixer m: lacks VERSION, Config, is_online, init, update, weights$",
        ),
        ("g", MIXER.format(config="Config = 1"), r"mixer m: its Config is no dataclass$"),
        (
            "h",
            MIXER.format(
                config="Config = dataclass(type('Config', (), {'__annotations__': {'type': int}}))"
            ),
            r"mixer m: its Config has type, a key of every mixer$",
        ),
    ],
)
def test_a_bad_plugin_is_refused(plugin, name, text, message):
    module = plugin(f"d3_test_mixers_{name}", text)
    with pytest.raises(ConfigError, match=message):
        load_plugins([module])


def test_a_missing_plugin_is_refused():
    with pytest.raises(
        ConfigError, match=r"^--d3-plugin no.such: cannot be imported: ModuleNotFound"
    ):
        load_plugins(["no.such"])


def test_mixer_and_cap_are_built():
    mixer, cap, note = build_mix(
        MixConfig("natural", params=Natural.Config()), DOMAINS, total_samples=500
    )
    assert isinstance(mixer, Natural) and cap is None and note is None
    mixer, cap, note = build_mix(
        MixConfig("unimax", 2.0, "repeat", UniMax.Config(2.0)), DOMAINS, total_samples=300
    )
    assert cap.budgets.tolist() == [80, 120] and mixer.unspent_samples == 100
    assert note == "d3.mix.max_epochs: 100 of 300 samples repeat beyond max_epochs"


def test_a_run_too_long_for_its_caps_is_refused_at_the_start():
    config = MixConfig("static", 1.0, params=Static.Config())
    with pytest.raises(ConfigError, match="the largest feasible run has 100 samples"):
        build_mix(config, DOMAINS, total_samples=101)
    knots = ((0, {"a": 1.0, "b": 0.0}), (5, {"a": 0.0, "b": 1.0}))
    config = MixConfig("schedule", 1.0, params=Schedule.Config(knots))
    with pytest.raises(
        ConfigError, match="the largest feasible run has about 40 of the 100 samples"
    ):
        build_mix(config, DOMAINS, total_samples=100, step_at=lambda position: position // 10)
