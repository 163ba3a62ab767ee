"""A minimal GPT pretraining script of stock Megatron, written apart from the product.

No tally, no hooks, no sharing of code with `megatron_d3`: what the product must equal when it has
no plan. Tensor parallelism of one only, so that a batch needs no broadcast.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch


def main() -> None:
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.enums import ModelType
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import get_args, pretrain
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.utils import get_blend_and_blend_per_split

    from megatron_d3.mcore import compat

    compat.use_prebuilt_helpers()  # the wheel has no Makefile; nothing of it touches the data

    def datasets(num_samples: list[int], vp_stage: int | None = None) -> Any:
        args = get_args()
        blend, per_split = get_blend_and_blend_per_split(args)
        config = GPTDatasetConfig(
            random_seed=args.seed, sequence_length=args.seq_length, blend=blend,
            blend_per_split=per_split, split=args.split, path_to_cache=args.data_cache_path,
            tokenizer=build_tokenizer(args), reset_position_ids=args.reset_position_ids,
            reset_attention_mask=args.reset_attention_mask, eod_mask_loss=args.eod_mask_loss,
            mid_level_dataset_surplus=args.mid_level_dataset_surplus)
        return BlendedMegatronDatasetBuilder(GPTDataset, num_samples, lambda: True, config).build()

    datasets.is_distributed = True  # type: ignore[attr-defined]

    def loss_of(mask: torch.Tensor, output: torch.Tensor) -> Any:
        mask = mask.view(-1).float()
        loss = torch.sum(output.view(-1).float() * mask)
        count = mask.sum().detach().to(torch.int)
        return loss, count, {"lm loss": torch.cat([loss.detach().view(1), count.view(1)])}

    def forward_step(iterator: Any, model: Any) -> Any:
        batch = next(iterator)
        output = model(batch["tokens"], batch["position_ids"], batch.get("attention_mask"),
                       labels=batch["labels"], loss_mask=batch["loss_mask"])
        return output, partial(loss_of, batch["loss_mask"])

    args = parse_and_validate_args()
    pretrain(pretrain_cfg_container_from_args(args, gpt_config_from_args(args)), datasets,
             ModelType.encoder_or_decoder, forward_step)
