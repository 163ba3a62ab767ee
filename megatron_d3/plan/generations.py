"""From one generation of a plan to the next: what a change of the settings keeps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_d3.plan.decide import Decider
from megatron_d3.plan.header import Generation, PlanFile, RunHeader
from megatron_d3.plan.state import DeciderState

# The order within windows is recorded, not computed again: how it is found may change.
_ORDER_SEARCH = ("estimators", "objectives", "probe_choice", "solvers")


def next_generation(
    plan: PlanFile, index: int, rewound: DeciderState, header: RunHeader, *, iteration: int,
    round_number: int,
) -> Generation:
    """Return the generation that follows generation `index` of a plan.

    Args:
        plan: the plan.
        index: the generation before.
        rewound: the state at the new generation's first position.
        header: the new settings.
        iteration: training steps done.
        round_number: its first round.
    """
    old = plan.generations[index]
    table, ids = PlanFile(plan.table[:len(old.cursors)], plan.generations).table_with(header)
    cursors = [*old.cursors, *[0] * (len(table) - len(old.cursors))]
    for i, cursor in zip(old.domain_ids, rewound.cursors.tolist(), strict=True):
        cursors[i] = cursor
    return Generation(iteration, rewound.position, round_number, ids, tuple(cursors), header)


def is_replayable(old: RunHeader, new: RunHeader) -> bool:
    """Whether the algorithms of a run that wants `new` can compute what `old` decided."""
    return all(version == new.versions.get(name, version)
               for name, version in old.versions.items() if name not in _ORDER_SEARCH)


def enter(
    state: DeciderState, rewound: DeciderState, old: Generation, new: Generation, decider: Decider
) -> DeciderState:
    """Return the state at the start of a generation.

    A domain that stays keeps its cursor and its carry; if one leaves, all carries start from 0 (what
    it was owed or had too much cannot be made up for). A mixer keeps its state while neither its
    configuration nor the domains change. Another version of an algorithm begins without either.

    Args:
        state: at the end of the generation before, rounds beyond the new start included.
        rewound: the state at the new generation's first position.
        old: the generation before.
        new: the new one.
        decider: of the new one.
    """
    carries = dict(zip(old.domain_ids, rewound.carry.tolist(), strict=True))
    is_same_version = is_replayable(old.header, new.header)
    is_kept = is_same_version and set(old.domain_ids) <= set(new.domain_ids)
    carry = [carries.get(i, 0.0) if is_kept else 0.0 for i in new.domain_ids]
    is_same_mixer = (is_same_version and old.domain_ids == new.domain_ids
                     and old.header.config.get("mix") == new.header.config.get("mix"))
    return replace(
        state, position=new.position, step=new.iteration, consumed=new.position,
        cursors=np.array([new.cursors[i] for i in new.domain_ids], np.int64),
        carry=np.array(carry), weights=np.full(len(new.domain_ids), np.nan),
        mixer=state.mixer if is_same_mixer else decider.mixer.init(), pending=None)
