"""The pass over an index: sums, soundness, and a checksum that any change moves."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_d3.corpus.samples import block_sums
from megatron_d3.corpus.scan import Scan, scan

ITEMSIZE = 2


def corpus(num_sequences: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, int]:
    """Lengths, pointers in place, and the size of the `.bin`."""
    lengths = np.random.default_rng(seed).integers(0, 9, num_sequences).astype(np.int32)
    ends = lengths.cumsum(dtype=np.int64) * ITEMSIZE
    return lengths, np.concatenate([[0], ends])[:-1], int(ends[-1]) if num_sequences else 0


def look(lengths: np.ndarray, pointers: np.ndarray, bin_bytes: int) -> Scan:
    return scan(lengths, pointers, itemsize=ITEMSIZE, bin_bytes=bin_bytes)


# Below, at and beyond the borders of blocks, chunks (32 Ki) and tasks of threads (512 Ki).
@pytest.mark.parametrize("num_sequences", [0, 1, 1023, 1024, 32768, 32769, 524288, 1200001])
def test_sums_equal_the_plain_ones_and_sound_is_sound(num_sequences: int) -> None:
    lengths, pointers, bin_bytes = corpus(num_sequences)
    found = look(lengths, pointers, bin_bytes)
    assert found.is_sound
    np.testing.assert_array_equal(found.block_sums, block_sums(lengths))


@pytest.mark.parametrize("at", [0, 1000, 32767, 32768, 600000, 699999])
@pytest.mark.parametrize("is_reordered", [False, True])
def test_one_bad_sequence_anywhere_is_seen(at: int, is_reordered: bool) -> None:
    lengths, pointers, bin_bytes = corpus(700_000)
    if is_reordered:
        order = np.random.default_rng(1).permutation(len(lengths))
        lengths, pointers = lengths[order], pointers[order]
    assert look(lengths, pointers, bin_bytes).is_sound
    for array, value in ((lengths, -1), (lengths, 1 << 30), (pointers, -2),
                         (pointers, bin_bytes + 2), (pointers, -(1 << 62))):
        kept = array[at]
        array[at] = value
        assert not look(lengths, pointers, bin_bytes).is_sound, (at, value)
        array[at] = kept


def test_the_checksum_follows_every_length_and_pointer() -> None:
    lengths, pointers, bin_bytes = corpus(40_000)
    seen = {look(lengths, pointers, bin_bytes).checksum}
    swapped = pointers.copy()
    swapped[[5, 39_000]] = swapped[[39_000, 5]]
    longer = lengths.copy()
    longer[17] += 1
    for changed in ((lengths, swapped), (longer, pointers), (lengths[:-1], pointers[:-1]),
                    (lengths, pointers + 2)):
        seen.add(look(*changed, bin_bytes).checksum)
    assert len(seen) == 5
    assert look(lengths.copy(), pointers.copy(), bin_bytes).checksum in seen
