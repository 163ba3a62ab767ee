"""A domain: a named source of samples, with a training part and a held-out part.

The plan knows a domain's draws by their ordinal 0, 1, 2, ...: ordinal o is place o mod n of epoch
o // n, with n samples an epoch. Which sample stands at that place is a seeded permutation per
(seed, name, epoch), or the place itself under `order: stored`. Either way every sample comes once
an epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Literal, cast
from zlib import crc32

import numpy as np

from megatron_d3.corpus.index import Index, read_index
from megatron_d3.corpus.samples import SampleCutter, require_one_dtype
from megatron_d3.corpus.scan import BLOCK
from megatron_d3.corpus.shuffle import permutation
from megatron_d3.errors import CorpusError
from megatron_d3.types import DomainInfo

Order = Literal["shuffle", "stored"]


@dataclass(frozen=True, eq=False)
class Domain:
    """An opened domain; cheap to pickle and safe to fork. Made by `open_domain`.

    Attributes:
        name: key of the domain in every table.
        order: "shuffle" (a new permutation every epoch) or "stored".
        seed: seed of the permutations.
        train: samples of the training part, at least one.
        valid: samples of the held-out part, at least one; None if nothing is held out.
    """

    name: str
    order: Order
    seed: int
    train: SampleCutter
    valid: SampleCutter | None

    @cached_property
    def info(self) -> DomainInfo:
        """What mixers may know."""
        return DomainInfo(self.name, self.train.num_samples, self.train.num_tokens)

    def locate(self, ordinal: int) -> tuple[int, int]:
        """Return (epoch, sample) of the domain's draw number `ordinal`, counted from 0."""
        epoch, place = divmod(int(ordinal), self.train.num_samples)
        if self.order == "stored":
            return epoch, place
        key = (self.seed, crc32(self.name.encode()), epoch)
        return epoch, permutation(self.train.num_samples, key).at(place)

    def train_tokens(self, ordinal: int) -> np.ndarray:
        """Return the sample of draw number `ordinal`: (seq_length + 1,) int64."""
        return self.train.tokens(self.locate(ordinal)[1])

    def valid_tokens(self, sample: int) -> np.ndarray:
        """Return held-out sample number `sample`, in stored order: (seq_length + 1,) int64.

        Raises:
            CorpusError: the domain has no held-out part.
        """
        if self.valid is None:
            raise CorpusError(f"domain {self.name}: nothing is held out")
        return self.valid.tokens(sample)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that fixes the domain's tokens and their order, 32 hex digits.

        Covers the dtype, every length and every pointer of every `.idx`, the size of every `.bin`,
        which sequences are trained on and which held out, and `order`; not the paths, so that a
        corpus may be moved, and not the name, seed and seq_length, which the plan compares on
        their own. Costs nothing beyond the scan that opening does.
        """
        digest = hashlib.blake2b(digest_size=16, person=b"d3-domain")
        digest.update(self.order.encode())
        for cutter in (self.train, self.valid):
            digest.update(f"|{len(cutter.indexes) if cutter else 0}".encode())
            if cutter is None:
                continue
            for index, (start, stop) in zip(cutter.indexes, cutter.sequences, strict=True):
                digest.update(f"|{index.dtype},{start},{stop},{index.bin_bytes}:".encode())
                digest.update(index.scan.checksum)
        return digest.hexdigest()


def open_domain(
    name: str,
    *,
    paths: Sequence[str | Path],
    valid_paths: Sequence[str | Path] = (),
    valid_fraction: float = 0.01,
    order: str = "shuffle",
    seq_length: int,
    seed: int,
) -> Domain:
    """Open a domain's corpora, and hold a part out.

    Unless `valid_paths` name a held-out part, it is the last documents of each prefix in stored
    order: the fewest that hold `valid_fraction` of its tokens, or enough for one sample of the
    domain where that is more. A prefix of one document is trained on whole.

    Args:
        name: unique name; part of the shuffle's key.
        paths: prefixes to train on, all of one dtype.
        valid_paths: prefixes to hold out, of the same dtype.
        valid_fraction: in [0, 1); 0 holds nothing out. Ignored with `valid_paths`.
        order: "shuffle" or "stored".
        seq_length: tokens of a sample without its last label.
        seed: seed of the shuffle.

    Raises:
        CorpusError: naming the domain: a corpus that cannot be read, mixed dtypes, a prefix named
            twice, an empty domain, a training or held-out part shorter than one sample.
    """
    try:
        return _open(name, paths, valid_paths, valid_fraction, order, seq_length, seed)
    except CorpusError as error:
        raise CorpusError(f"domain {name}: {error}") from error


def _open(
    name: str,
    paths: Sequence[str | Path],
    valid_paths: Sequence[str | Path],
    valid_fraction: float,
    order: str,
    seq_length: int,
    seed: int,
) -> Domain:
    if order not in ("shuffle", "stored"):
        raise CorpusError(f"order: got {order!r}, expected shuffle or stored")
    if not 0 <= valid_fraction < 1:
        raise CorpusError(f"valid_fraction: got {valid_fraction}, expected a number in [0, 1)")
    _refuse_repeats([*paths, *valid_paths])
    indexes = [read_index(path) for path in paths]
    whole = SampleCutter(indexes, seq_length=seq_length)
    if whole.num_tokens == 0:
        raise CorpusError(f"no tokens in {', '.join(map(str, paths))}")
    valid: SampleCutter | None
    if valid_paths:
        held_out = [read_index(path) for path in valid_paths]
        require_one_dtype([*indexes, *held_out])
        train, valid = whole, SampleCutter(held_out, seq_length=seq_length)
    else:
        fraction = _fraction_to_hold_out(valid_fraction, whole)
        cuts = [_first_held_out(index, fraction) for index in indexes]
        train, valid = _split(whole, cuts)
    _refuse_short(train, "training part", "use a shorter seq_length or more text")
    if valid is not None:
        hint = "hold out more, or nothing with valid_fraction: 0"
        _refuse_short(valid, "held-out part", hint)
    return Domain(name, cast(Order, order), seed, train, valid)


def _split(whole: SampleCutter, cuts: Sequence[int]) -> tuple[SampleCutter, SampleCutter | None]:
    """Divide every index at a document; None if nothing is held out."""
    ends = [index.num_documents for index in whole.indexes]
    if list(cuts) == ends:
        return whole, None
    train = [(0, cut) for cut in cuts]
    valid = list(zip(cuts, ends, strict=True))
    return (
        SampleCutter(whole.indexes, seq_length=whole.seq_length, documents=train),
        SampleCutter(whole.indexes, seq_length=whole.seq_length, documents=valid),
    )


def _fraction_to_hold_out(valid_fraction: float, whole: SampleCutter) -> Fraction:
    """Raise the fraction, if not 0, to what one sample of the domain takes."""
    if valid_fraction == 0:
        return Fraction(0)
    one_sample = Fraction(whole.seq_length + 1, whole.num_tokens)
    asked = Fraction(repr(float(valid_fraction)))  # 0.2 means a fifth, not its nearest double
    return min(max(asked, one_sample), Fraction(1))


def _first_held_out(index: Index, fraction: Fraction) -> int:
    """Return the first document of the shortest tail that holds `fraction` of the tokens.

    At least one document is held out and one is left; none is where there are fewer than two.
    """
    if fraction == 0 or index.num_documents < 2:
        return index.num_documents
    sums = index.scan.block_sums
    ends = sums.cumsum()
    num_tokens = int(ends[-1]) if len(ends) else 0
    cut = int(num_tokens * (1 - fraction))  # the tail must begin at or before this token
    block = int(np.searchsorted(ends, cut, side="right"))  # the block that holds it
    if block == len(ends):  # no tokens
        return index.num_documents - 1
    lengths = index.lengths[block * BLOCK : (block + 1) * BLOCK].cumsum(dtype=np.int64)
    inside = cut - int(ends[block] - sums[block])
    sequence = block * BLOCK + int(np.searchsorted(lengths, inside, side="right"))
    document = int(np.searchsorted(index.document_indices, sequence, side="right")) - 1
    return min(max(document, 1), index.num_documents - 1)


def _refuse_repeats(paths: Sequence[str | Path]) -> None:
    seen: set[Path] = set()
    for path in paths:
        real = Path(path).resolve()
        if real in seen:
            raise CorpusError(f"{path}: named twice; its samples would come twice an epoch")
        seen.add(real)


def _refuse_short(cutter: SampleCutter, what: str, hint: str) -> None:
    if cutter.num_samples == 0:
        raise CorpusError(
            f"its {what} has {cutter.num_tokens:,} tokens, shorter than one sample of seq_length "
            f"{cutter.seq_length:,} + 1; {hint}"
        )
