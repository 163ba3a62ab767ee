"""The mean token loss of every document under a Megatron checkpoint: `score --loss-of`.

Every process of a `torchrun` calls :func:`document_losses`. Shards of documents go round the
data-parallel replicas; each replica runs its own through Megatron's forward-only schedule, on
whatever tensor- and pipeline-parallel layout the flags ask for, and writes the losses of a finished
shard to a folder, from which an interrupted run goes on. Shape, precision, sequence length and
vocabulary are those of the checkpoint, so that no tokenizer is opened.

Every rank reads the corpus itself: all nodes need the file system it lies on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_d3.corpus.derive import ORIGIN_SUFFIX
from megatron_d3.corpus.index import Index, read_index, suffixed
from megatron_d3.corpus.parts import LOSS_PARTS, finished, hold, remove
from megatron_d3.corpus.progress import Progress
from megatron_d3.corpus.windows import (
    Batch,
    batches,
    cut_shards,
    cut_windows,
    mean_losses,
    refuse_unknown_tokens,
)
from megatron_d3.errors import ConfigError, CorpusError
from megatron_d3.mcore import cpu

VERSION = 1
WHERE = "--loss-of"
_PART = ".loss"  # of a finished shard: float64, little-endian, one a document
_MICRO_BATCH_SIZE = 4
# Micro-batches that are in a pipeline at a time, for each of its stages: 1 / (1 + 4) stands idle.
_PER_STAGE = 4


@dataclass(frozen=True)
class LossJob:
    """What to score.

    Attributes:
        prefix: the corpus.
        checkpoint: a Megatron `--save` folder, or one of its `iter_*` folders.
        flags: Megatron's, for layout and micro-batch size; shape flags are read and not used.
        is_replacing: drop what an unfinished run with other settings left.
    """

    prefix: Path
    checkpoint: Path
    flags: tuple[str, ...] = ()
    is_replacing: bool = False


@contextlib.contextmanager
def document_losses(job: LossJob) -> Iterator[np.ndarray | None]:
    """Compute the scores; the context's end removes the finished shards, its failure keeps them.

    Args:
        job: the same on every rank.

    Yields:
        (D,) float64 in nats a token on rank 0, None elsewhere. Documents of less than two tokens,
        in which nothing is predicted, have 0.

    Raises:
        ConfigError: no checkpoint, one that does not fit the layout, a flag that cannot be.
        CorpusError: a corpus that cannot be read, or has tokens that the model has not.
    """
    folder = suffixed(job.prefix, LOSS_PARTS)
    with contextlib.ExitStack() as stack:
        with contextlib.redirect_stdout(sys.stderr):  # of Megatron's own words
            values = _run(job, folder, stack)
        yield values
        if values is not None:
            remove(folder)


def _run(job: LossJob, folder: Path, stack: contextlib.ExitStack) -> np.ndarray | None:
    if cpu.wanted():
        cpu.enable()
    # Imported here and not above: Megatron reads torch.cuda while it is imported.
    import torch
    from megatron.training.initialize import initialize_megatron

    from megatron_d3.mcore import collective, compat
    from megatron_d3.mcore.reference_model import ReferenceModel, find_checkpoint, require_layout
    from megatron_d3.mix.doremi import latest_checkpoint

    index = read_index(job.prefix)
    path = latest_checkpoint(job.checkpoint) or job.checkpoint
    checkpoint = find_checkpoint(path, where=WHERE)
    _require_vocabulary(index, checkpoint.args.padded_vocab_size)
    compat.check()
    compat.use_prebuilt_helpers()
    args = _parse(job.flags, checkpoint)
    require_layout(checkpoint, args)
    initialize_megatron()

    def begin() -> set[int]:
        stack.enter_context(hold(
            folder, _fingerprint(index, path, args), is_replacing=job.is_replacing))
        return finished(folder)

    done = collective.on_rank_0(begin)
    bounds = cut_shards(index)
    pending = [number for number in range(len(bounds) - 1) if number not in done]
    if pending:
        scorer = _Scorer(index, ReferenceModel(checkpoint, args), args)
        scorer.score(bounds, pending, folder)
    torch.distributed.barrier()
    if torch.distributed.get_rank() != 0:
        return None
    parts = [np.fromfile(_part(folder, number), "<f8") for number in range(len(bounds) - 1)]
    return np.concatenate([np.empty(0), *parts])


class _Scorer:
    """This rank's part of the work."""

    def __init__(self, index: Index, model: Any, args: argparse.Namespace) -> None:
        from megatron.core import mpu

        self._index = index
        self._model = model
        self._args = args
        stages: int = mpu.get_pipeline_model_parallel_world_size()
        self._num_microbatches = 1 if stages == 1 else _PER_STAGE * stages
        self._num_stages = stages
        self._replica: int = mpu.get_data_parallel_rank()
        self._num_replicas: int = mpu.get_data_parallel_world_size()
        self._is_last: bool = mpu.is_pipeline_last_stage(ignore_virtual=True)
        self._is_writer = self._is_last and mpu.get_tensor_model_parallel_rank() == 0

    def score(self, bounds: np.ndarray, pending: Sequence[int], folder: Path) -> None:
        """Score this replica's share of the pending shards and write each when it is done."""
        mine = pending[self._replica :: self._num_replicas]
        itemsize = self._index.dtype.itemsize
        progress = Progress(
            self._index.bin_bytes * len(mine) // (len(bounds) - 1),
            label=f"score, replica 0 of {self._num_replicas}",
            is_silent=not self._is_writer or self._replica > 0)
        for number in mine:
            losses, num_tokens = self._shard(int(bounds[number]), int(bounds[number + 1]))
            if self._is_writer:
                _write(_part(folder, number), losses)
            progress.add(num_tokens * itemsize, num_tokens)
        progress.close()

    def _shard(self, first: int, last: int) -> tuple[np.ndarray, int]:
        """Return the loss of each document on the last stage, zeros elsewhere; and tokens read."""
        windows = cut_windows(self._index, first, last, seq_length=self._args.seq_length)
        refuse_unknown_tokens(
            windows, self._args.padded_vocab_size, first=first, index=self._index)
        sums = np.zeros(len(windows.starts))
        waiting: list[Batch] = []
        for batch in batches(windows, batch_size=self._args.micro_batch_size,
                             seq_length=self._args.seq_length):
            waiting.append(batch)
            if len(waiting) == self._num_microbatches:
                self._forward(waiting, sums)
                waiting = []
        if waiting:
            # An interleaved schedule wants whole rounds through the stages.
            waiting += [waiting[-1]] * (-len(waiting) % self._num_stages)
            self._forward(waiting, sums)
        return mean_losses(windows, sums), len(windows.tokens)

    def _forward(self, group: Sequence[Batch], sums: np.ndarray) -> None:
        """Add up the losses of some batches, padded to the longest of them, into (W,) `sums`."""
        length = group[0].inputs.shape[1]
        iterators = [iter([_fields(batch, length) for batch in group])
                     for _ in range(self._model.num_chunks)]
        found = self._model.token_losses(
            iterators, len(group), lambda iterator, _: (next(iterator), None), seq_length=length)
        for batch, losses in zip(group, found, strict=False):  # nothing before the last stage
            rows = losses[:, : batch.inputs.shape[1]].cpu().numpy().astype(np.float64)
            is_real = batch.windows >= 0
            sums[batch.windows[is_real]] = (rows * batch.is_predicted).sum(axis=1)[is_real]


def _fields(batch: Batch, length: int) -> dict[str, Any]:
    """Return what Megatron's model takes; causal attention needs no mask, padding comes last."""
    import torch

    width = ((0, 0), (0, length - batch.inputs.shape[1]))
    device = torch.device("cuda", torch.cuda.current_device())
    fields = {"tokens": batch.inputs, "labels": batch.labels, "loss_mask": batch.is_predicted,
              "position_ids": np.broadcast_to(np.arange(length), (len(batch.inputs), length))}
    tensors = {
        name: torch.from_numpy(np.pad(values, width) if values.shape[1] < length
                               else np.ascontiguousarray(values)).to(device)
        for name, values in fields.items()}
    return {**tensors, "loss_mask": tensors["loss_mask"].float(), "attention_mask": None}


def _parse(flags: Sequence[str], checkpoint: Any) -> argparse.Namespace:
    """Return Megatron's validated arguments: its flags over what the checkpoint's run had.

    Raises:
        ConfigError: context parallelism, a world that the layout does not divide, a sequence length
            beyond the learned positions, or what a CPU cannot do.
    """
    from megatron.training.arguments import parse_and_validate_args, parse_args

    from megatron_d3.mcore import args as d3_args
    from megatron_d3.mcore.reference_model import SHAPE

    theirs = checkpoint.args

    def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        if cpu.wanted():
            d3_args.use_cpu_defaults(parser)
        known = {action.dest for action in parser._actions}
        kept: tuple[str, ...] = (*SHAPE, "seq_length", "padded_vocab_size", "make_vocab_size_divisible_by")
        is_half = any(flag in flags for flag in ("--bf16", "--fp16"))
        kept += () if is_half else ("bf16", "fp16")
        found = {name: getattr(theirs, name) for name in kept
                 if name in known and hasattr(theirs, name) and name != "encoder_num_layers"}
        parser.set_defaults(
            **found, micro_batch_size=_MICRO_BATCH_SIZE, tokenizer_type="NullTokenizer",
            vocab_size=theirs.padded_vocab_size - 1)
        return parser

    before, sys.argv = sys.argv, [sys.argv[0], *flags]
    try:
        asked = parse_args(add_arguments)
        _require_layout(asked, checkpoint)
        if cpu.wanted():
            d3_args.check_cpu_args(asked)
        return parse_and_validate_args(extra_args_provider=add_arguments)
    finally:
        sys.argv = before


def _require_layout(asked: argparse.Namespace, checkpoint: Any) -> None:
    """Refuse by name what Megatron's validation would assert, or what is not possible here."""
    if asked.context_parallel_size > 1:
        raise ConfigError(f"{WHERE}: not possible with --context-parallel-size; use 1")
    model_size = asked.tensor_model_parallel_size * asked.pipeline_model_parallel_size
    if asked.world_size % model_size:
        raise ConfigError(
            f"{WHERE}: {asked.world_size} processes are no multiple of tensor parallel "
            f"{asked.tensor_model_parallel_size} x pipeline parallel "
            f"{asked.pipeline_model_parallel_size}")
    if checkpoint.args.num_layers % asked.pipeline_model_parallel_size:
        raise ConfigError(
            f"{WHERE}: {checkpoint.folder} has {checkpoint.args.num_layers} layers, which do not "
            f"divide into {asked.pipeline_model_parallel_size} pipeline stages")
    is_learned = asked.position_embedding_type == "learned_absolute"
    if is_learned and asked.seq_length > asked.max_position_embeddings:
        raise ConfigError(
            f"--seq-length {asked.seq_length}: the model has learned "
            f"{asked.max_position_embeddings} positions")


def _require_vocabulary(index: Index, vocab_size: int) -> None:
    """Refuse a corpus whose tokenizer has more ids than the model, where `tokenize` left word."""
    origin = suffixed(index.prefix, ORIGIN_SUFFIX)
    if not origin.is_file():
        return
    found = json.loads(origin.read_bytes()).get("vocab_size")
    if isinstance(found, int) and found > vocab_size:
        raise CorpusError(
            f"{index.prefix}: its tokenizer has {found:,} tokens, but the model's vocabulary is "
            f"{vocab_size:,}; it was trained with another tokenizer")


def _fingerprint(index: Index, path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return what a run that goes on from finished shards must agree in."""
    files = sorted(file for file in path.iterdir() if file.is_file())
    stats = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return {
        "version": VERSION, "index": index.digest, "checkpoint": str(path.resolve()),
        "files": stats, "seq-length": args.seq_length, "precision": str(args.params_dtype)}


def _part(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}{_PART}"


def _write(path: Path, losses: np.ndarray) -> None:
    """Write a finished shard: aside, flushed, renamed."""
    aside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with open(aside, "wb") as file:
            file.write(losses.astype("<f8", copy=False).tobytes())
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        raise CorpusError(f"{path}: cannot be written: {error.strerror}") from error
