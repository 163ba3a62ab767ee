"""Mixers: how many samples of each domain come next.

    domains, total samples -> Mixer(config, domains)    state = init()
    signals of one step    -> state = update(state, signals)
    step, position         -> weights(state, context)   (K,) on the simplex -> EpochCap.cap -> plan

    Static        weights as written, from a file, or uniform
    Natural       in proportion to tokens
    Temperature   in proportion to tokens ** (1 / T)
    UniMax        uniform, but none repeated more than max_epochs
    Schedule      weights at given steps, constant, linear or cosine between them
    ODM           a bandit rewarded by the loss                                       (online)
    ADO           in proportion to the slope of each domain's scaling law             (online)
    ReferenceLoss more of what is above the loss of a former run                      (online)
    DoReMi        uniform; its weights go to the loss of a proxy model                (online)
    EpochCap      max_epochs around any of them

A mixer is a class with `VERSION`, a frozen dataclass `Config`, `is_online`, and the three functions
above over named arrays; nothing to inherit. `MIXERS` holds them by the word a user writes in
`mix: {type: ...}`.
"""

from __future__ import annotations

from megatron_d3.mix.ado import ADO
from megatron_d3.mix.caps import EpochCap, project, rehearse
from megatron_d3.mix.doremi import DoReMi
from megatron_d3.mix.natural import Natural
from megatron_d3.mix.odm import ODM
from megatron_d3.mix.reference_loss import ReferenceLoss
from megatron_d3.mix.schedule import Schedule
from megatron_d3.mix.static import Static
from megatron_d3.mix.temperature import Temperature
from megatron_d3.mix.unimax import UniMax

MIXERS: dict[str, type] = {
    "static": Static,
    "natural": Natural,
    "temperature": Temperature,
    "unimax": UniMax,
    "schedule": Schedule,
    "odm": ODM,
    "ado": ADO,
    "reference_loss": ReferenceLoss,
    "doremi": DoReMi,
}

__all__ = [
    "ADO",
    "MIXERS",
    "ODM",
    "DoReMi",
    "EpochCap",
    "Natural",
    "ReferenceLoss",
    "Schedule",
    "Static",
    "Temperature",
    "UniMax",
    "project",
    "rehearse",
]
