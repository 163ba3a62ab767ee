"""Token corpora on disk, and the samples that training reads from them. No torch here.

text files -> tokenizer -> IndexWriter -> PREFIX.bin + PREFIX.idx     (demo.py builds a real one)
PREFIX.bin + PREFIX.idx -> Index -> SampleCutter -> Domain -> (seq_length + 1,) tokens

index.py      `read_index`: Megatron's pair of files, memory-mapped and checked
writer.py     `IndexWriter`: the same files, byte for byte, written as a stream
samples.py    `SampleCutter`: documents in stored order, cut into samples without an index build
shuffle.py    `permute`: a seeded permutation of [0, n) that is computed, never stored
domain.py     `Domain`: a named source with a training part and a held-out part
tokenizer.py  SentencePiece, trained and applied deterministically
demo.py       a multi-domain corpus of the text that every Python installation has, chosen by
              demo_text.py (where text is) and demo_documents.py (which of it is taken)
"""

from megatron_d3.corpus.domain import Domain, open_domain
from megatron_d3.corpus.index import Index, dtype_for_vocab, read_index
from megatron_d3.corpus.samples import SampleCutter
from megatron_d3.corpus.shuffle import permute
from megatron_d3.corpus.writer import IndexWriter

__all__ = [
    "Domain",
    "Index",
    "IndexWriter",
    "SampleCutter",
    "dtype_for_vocab",
    "open_domain",
    "permute",
    "read_index",
]
