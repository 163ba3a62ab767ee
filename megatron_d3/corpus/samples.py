"""Cut the documents of a domain into samples, in stored order, without building an index.

Sample s is the tokens [s * L, s * L + L + 1) of all documents laid end to end: L inputs and, one
further on, L labels. This is what Megatron's `GPTDataset` gives in one epoch of an unshuffled
document order; it stores an index entry a sample, here the place is searched for: the first token
of every 1,024th sequence is kept (8 bytes), the rest is one cumulative sum of 1,024 lengths.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from megatron_d3.corpus.index import Index
from megatron_d3.corpus.scan import BLOCK
from megatron_d3.errors import CorpusError

# Lengths summed at a time, so that their int64 copy stays in the L2 cache.
_SUM_BLOCKS = 32


class SampleCutter:
    """Samples of a run of documents; cheap to pickle and safe to fork.

    Args:
        indexes: opened corpora of one dtype, laid end to end in this order.
        seq_length: L, tokens of a sample without its last label.
        documents: the documents [start, stop) of each index to use; default all.

    Raises:
        CorpusError: no indexes, mixed dtypes, seq_length < 1, a document range out of bounds.
    """

    def __init__(
        self,
        indexes: Sequence[Index],
        *,
        seq_length: int,
        documents: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        if not indexes:
            raise CorpusError("no corpus given, expected at least one prefix")
        require_one_dtype(indexes)
        if seq_length < 1:
            raise CorpusError(f"seq_length: got {seq_length}, expected at least 1")
        self.indexes = tuple(indexes)
        self.seq_length = seq_length
        self.dtype = indexes[0].dtype
        self.documents = _document_ranges(self.indexes, documents)
        self.sequences = tuple(
            (int(index.document_indices[start]), int(index.document_indices[stop]))
            for index, (start, stop) in zip(self.indexes, self.documents, strict=True)
        )
        sums = [
            _sums_of(index, start, stop)
            for index, (start, stop) in zip(self.indexes, self.sequences, strict=True)
        ]
        # First block of each index, and first token of each block; both end with the total.
        self._first_blocks = [0, *np.cumsum([len(part) for part in sums]).tolist()]
        self._starts = np.concatenate([[0], *sums]).astype(np.int64).cumsum()
        self.num_tokens = int(self._starts[-1])
        self.num_samples = max(0, (self.num_tokens - 1) // seq_length)

    def tokens(self, sample: int) -> np.ndarray:
        """Return a sample: (L + 1,) int64, inputs `[:-1]` and labels `[1:]`.

        Raises:
            IndexError: sample outside [0, num_samples).
            CorpusError: a `.bin` was changed under the run.
        """
        out = np.empty(self.seq_length + 1, self.dtype)
        filled = 0
        for number, first, skip, counts in self._pieces(sample):
            index = self.indexes[number]
            starts = index.pointers[first : first + len(counts)].copy()  # (n,) bytes
            starts[0] += skip * self.dtype.itemsize
            # Pieces that lie back to back in the file are read at once.
            ends = starts + counts * self.dtype.itemsize
            cuts = np.flatnonzero(starts[1:] != ends[:-1]) + 1
            ranges = np.append(0, counts.cumsum())  # (n + 1,) tokens
            for begin, end in zip([0, *cuts], [*cuts, len(counts)], strict=True):
                piece = out[filled + ranges[begin] : filled + ranges[end]]
                index.read_into(piece, int(starts[begin]))
            filled += int(ranges[-1])
        return out.astype(np.int64)

    def documents_of(self, sample: int) -> list[tuple[int, int, int, int]]:
        """Return the pieces of documents a sample is made of.

        Returns:
            (number of the index, document in it, first token in the document, tokens), in order;
            the tokens sum to L + 1. Documents without tokens are left out.

        Raises:
            IndexError: sample outside [0, num_samples).
        """
        found: list[tuple[int, int, int, int]] = []
        for number, first, skip, counts in self._pieces(sample):
            index = self.indexes[number]
            sequences = np.arange(first, first + len(counts))
            owners = np.searchsorted(index.document_indices, sequences, side="right") - 1
            for sequence, document, count in zip(
                sequences.tolist(), owners.tolist(), counts.tolist(), strict=True
            ):
                if count == 0:
                    continue
                if found and found[-1][:2] == (number, document):
                    found[-1] = (*found[-1][:3], found[-1][3] + count)
                    continue
                begin = int(index.document_indices[document])
                offset = int(index.lengths[begin:sequence].sum(dtype=np.int64))
                found.append((number, document, offset + skip * (sequence == first), count))
        return found

    def _pieces(self, sample: int) -> list[tuple[int, int, int, np.ndarray]]:
        """Return the runs of sequences that hold a sample, at most one a block.

        Returns:
            (number of the index, first sequence, tokens to skip in it, (n,) int64 tokens to take
            from it and from each following sequence).
        """
        if not 0 <= sample < self.num_samples:
            raise IndexError(f"sample {sample} outside [0, {self.num_samples})")
        position = sample * self.seq_length
        left = self.seq_length + 1
        # NOTE: "right" steps over blocks without tokens, which share their start with the next.
        block = int(np.searchsorted(self._starts, position, side="right")) - 1
        pieces = []
        while left:
            number, start, stop = self._block(block)
            lengths = self.indexes[number].lengths[start:stop]
            ends = lengths.cumsum(dtype=np.int64)  # (n,) tokens from the start of the block
            skip = position - int(self._starts[block])
            begin = int(np.searchsorted(ends, skip, side="right"))
            end = min(int(np.searchsorted(ends, skip + left, side="left")) + 1, len(ends))
            if begin < end:
                counts = lengths[begin:end].astype(np.int64)
                skipped = skip - (int(ends[begin]) - int(counts[0]))
                counts[0] -= skipped
                counts[-1] -= max(0, int(ends[end - 1]) - (skip + left))
                taken = int(counts.sum())
                pieces.append((number, start + begin, skipped, counts))
                position += taken
                left -= taken
            block += 1
        return pieces

    def _block(self, block: int) -> tuple[int, int, int]:
        """Return (number of the index, first sequence, one past the last) of a block."""
        number = bisect_right(self._first_blocks, block) - 1
        first, last = self.sequences[number]
        start = first + (block - self._first_blocks[number]) * BLOCK
        return number, start, min(start + BLOCK, last)


def require_one_dtype(indexes: Sequence[Index]) -> None:
    """Raise CorpusError unless all corpora have the same token dtype."""
    for index in indexes:
        if index.dtype != indexes[0].dtype:
            raise CorpusError(
                f"{index.prefix}: {index.dtype.name} tokens, but {indexes[0].prefix} has "
                f"{indexes[0].dtype.name}; all prefixes of a domain must agree"
            )


def block_sums(lengths: np.ndarray) -> np.ndarray:
    """Sum lengths in blocks of 1,024: (S,) int32 -> (ceil(S / 1024),) int64."""
    sums = np.empty(-(-len(lengths) // BLOCK), np.int64)
    step = BLOCK * _SUM_BLOCKS
    for start in range(0, len(lengths), step):
        part = lengths[start : start + step].astype(np.int64)
        first = start // BLOCK
        sums[first : first + _SUM_BLOCKS] = np.add.reduceat(part, np.arange(0, len(part), BLOCK))
    return sums


def _sums_of(index: Index, start: int, stop: int) -> np.ndarray:
    """Sum the lengths of the sequences [start, stop) in blocks, from the index's own sums if it can.

    A range from the first sequence on, as that of a training part, differs in its last block only.
    """
    if start > 0:
        return block_sums(index.lengths[start:stop])
    num_whole = stop // BLOCK
    rest = block_sums(index.lengths[num_whole * BLOCK : stop])
    return np.concatenate([index.scan.block_sums[:num_whole], rest])


def _document_ranges(
    indexes: Sequence[Index], documents: Sequence[tuple[int, int]] | None
) -> tuple[tuple[int, int], ...]:
    if documents is None:
        return tuple((0, index.num_documents) for index in indexes)
    if len(documents) != len(indexes):
        raise CorpusError(f"{len(documents)} document ranges for {len(indexes)} prefixes")
    for index, (start, stop) in zip(indexes, documents, strict=True):
        if not 0 <= start <= stop <= index.num_documents:
            raise CorpusError(
                f"{index.prefix}: documents {start} to {stop}, expected a range in "
                f"[0, {index.num_documents}]"
            )
    return tuple((int(start), int(stop)) for start, stop in documents)
