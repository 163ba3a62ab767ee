"""The reference's token losses from disk, and the run that puts them there.

:func:`store` runs the reference over every sample that a proxy's run will draw: it samples
uniformly, so its draws are known in advance. `mcore/store_losses.py` is its door.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import mpu
from torch.utils.data import Dataset

from megatron_d3.corpus.domain import Domain
from megatron_d3.errors import ConfigError
from megatron_d3.mcore import collective
from megatron_d3.mcore.datasets import SampleMaker
from megatron_d3.mcore.proxy import LocalBatch, ModelLosses, Samples, local_positions
from megatron_d3.mcore.stock_data import is_built_on_this_rank
from megatron_d3.plan.decide import Decider
from megatron_d3.plan.header import RunHeader
from megatron_d3.plan.token_losses import TokenLosses, TokenLossWriter


class StoredLosses:
    """Reads the reference's token losses instead of running it.

    Args:
        folder: of the stored losses.
        header: of this run.

    Raises:
        ConfigError: they are missing or belong to other samples.
    """

    def __init__(self, folder: Path, header: RunHeader) -> None:
        self._losses = TokenLosses(folder, header)

    def open(self) -> None:
        """Nothing to load."""

    def of_batch(self, batch: LocalBatch, dataset: Samples | None) -> list[torch.Tensor]:
        """Read the rows of the step's samples."""
        if not mpu.is_pipeline_last_stage(ignore_virtual=True):
            return []
        device = torch.device("cuda", torch.cuda.current_device())
        rows = [np.stack([self._losses.read(int(d), int(o)) for d, o in zip(*pair, strict=True)])
                for pair in zip(batch.domains, batch.ordinals, strict=True)]  # M times (B, S)
        return [torch.from_numpy(row).to(device) for row in rows]


class _Draws(Dataset[dict[str, torch.Tensor]]):
    """The draws of all domains, one after the other."""

    def __init__(self, domains: list[Domain], maker: SampleMaker, num_draws: np.ndarray) -> None:
        self._domains = domains
        self._maker = maker
        self.owners = np.repeat(np.arange(len(num_draws)), num_draws)  # (N,)
        self.ordinals = np.concatenate([np.arange(n) for n in num_draws])  # (N,)

    def __len__(self) -> int:
        return len(self.owners)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        domain, ordinal = int(self.owners[index]), int(self.ordinals[index])
        fields = self._maker.fields(self._domains[domain].train_tokens(ordinal))
        return fields | {"origin": torch.tensor([domain, index])}


def count_draws(decider: Decider) -> np.ndarray:
    """Return (K,) int64: how many samples of each domain the whole run draws."""
    state = decider.init()
    while (decided := decider.decide(state)) is not None:
        state = decided[0]
    return state.cursors


def store(setup: Any, args: Any) -> None:
    """Run the reference over all draws of the run that `setup` describes, and store its losses.

    Args:
        setup: a :class:`megatron_d3.mcore.planned_setup.PlannedSetup` with a reference model.
        args: Megatron's arguments; its process groups exist.
    """
    reference = setup.proxy.reference if setup.proxy is not None else None
    if not isinstance(reference, ModelLosses):
        raise ConfigError("megatron-d3 doremi losses: needs mix: {type: doremi, reference: PATH}")
    num_draws = count_draws(
        setup.make_decider(setup.header, tuple(range(len(setup.domains)))))
    writer = TokenLossWriter(setup.args.plan_dir, setup.header, num_draws.tolist())
    collective.on_rank_0(writer.create)
    reference.open()
    draws = _Draws(setup.domains, setup.maker, num_draws)
    size = setup.args.batch_schedule.size_at(0)
    is_writer = (mpu.get_tensor_model_parallel_rank() == 0
                 and mpu.is_pipeline_last_stage(ignore_virtual=True))
    for start in range(0, len(draws), size):
        indices = start + local_positions(size, setup.args.micro_batch_size)  # (M, B)
        indices = np.minimum(indices, len(draws) - 1)  # the last batch repeats its last draw
        batch = LocalBatch(start, indices, draws.owners[indices], draws.ordinals[indices],
                           np.zeros(len(num_draws), np.int64))
        losses = reference.of_batch(batch, draws if is_built_on_this_rank() else None)
        if is_writer:
            for row, rows in zip(indices, losses, strict=True):
                for index, loss in zip(row, rows.cpu().numpy(), strict=True):
                    writer.write(int(draws.owners[index]), int(draws.ordinals[index]), loss)
    writer.flush()
    torch.distributed.barrier()
    params = setup.config.mix.params
    collective.on_rank_0(lambda: writer.publish(reference=str(params.reference)))
