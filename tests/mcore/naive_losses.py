"""Mean token losses of documents under a checkpoint, the slow way: one window at a time, from logits.

Apart from the product: stock Megatron builds and loads the model, a loss is a log-softmax by hand.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch

from tests.corpus_helpers import read_documents


def main() -> None:
    """Write the losses of the corpus $D3_TEST_CORPUS to $D3_TEST_CORPUS.naive.npy."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.utils import unwrap_model
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.checkpointing import load_checkpoint
    from megatron.training.initialize import initialize_megatron

    from megatron_d3.mcore import compat
    from megatron_d3.mcore.args import use_cpu_defaults

    compat.use_prebuilt_helpers()

    def add_arguments(parser):
        use_cpu_defaults(parser)
        return parser

    args = parse_and_validate_args(add_arguments)
    initialize_megatron()
    config = gpt_config_from_args(args)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    models = config.get_builder_cls()(config).build_distributed_models(groups, wrap_with_ddp=False)
    load_checkpoint(models, None, None)
    (model,) = unwrap_model(models)
    model.eval()
    prefix = Path(os.environ["D3_TEST_CORPUS"])
    with torch.no_grad():
        losses = [document_loss(model, doc, args.seq_length) for doc in read_documents(prefix)]
    np.save(f"{prefix}.naive.npy", np.array(losses))


def document_loss(model: torch.nn.Module, tokens: list[int], seq_length: int) -> float:
    """Mean of -ln p over all tokens but the first; 0 if there is none."""
    losses: list[float] = []
    for start in range(0, len(tokens) - 1, seq_length):
        inputs = torch.tensor(tokens[start : start + seq_length][: len(tokens) - 1 - start])
        labels = tokens[start + 1 : start + 1 + len(inputs)]
        logits = model(inputs[None], torch.arange(len(inputs))[None], None)[0]  # (L, V)
        chances = torch.log_softmax(logits.double(), dim=-1)
        losses += [-float(chances[place, label]) for place, label in enumerate(labels)]
    return float(np.mean(losses)) if losses else 0.0


def score() -> None:
    """`megatron-d3 VERB ...` as a rank of torchrun."""
    from megatron_d3.cli.main import main as cli

    sys.exit(cli())


def kill_at_the_fifth_shard() -> None:
    """A fault: SIGKILL in place of the fifth finished shard."""
    from megatron_d3.mcore import score_losses

    write, calls = score_losses._write, []

    def killing(path: Path, losses: np.ndarray) -> None:
        calls.append(path)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, losses)

    score_losses._write = killing


def keep_parts() -> None:
    """Leave the finished shards, so that a test can look at them."""
    from megatron_d3.mcore import score_losses

    score_losses.remove = lambda folder: None
