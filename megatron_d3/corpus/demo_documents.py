"""Choose the documents of the demo corpus: each text once, domains of usable size, a held-out part."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass

from megatron_d3.corpus.demo_text import Source
from megatron_d3.corpus.tokenizer import SPACE_MARK
from megatron_d3.errors import CorpusError

MIN_DOMAINS = 5
_MIN_DOCUMENT_BYTES = 200
_MAX_DOCUMENT_BYTES = 64_000
# A domain below this part of its limit is left out, below half of it is only remarked upon.
_USABLE_SHARE, _MAX_USABLE_BYTES = 4, 500_000

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Document:
    """A text to tokenize.

    Attributes:
        digest: hash of its words, 32 hex digits.
        text: the text, cut after a complete line.
        num_bytes: its size in UTF-8.
    """

    digest: str
    text: str
    num_bytes: int


def collect(sources: dict[str, list[Source]], max_bytes: int) -> dict[str, list[Document]]:
    """Read sources until each domain is full; each text counts once, wherever it stands.

    Args:
        sources: the sources of each domain, in the order in which they are to be taken.
        max_bytes: UTF-8 bytes at which a domain is full.

    Returns:
        the documents of each domain, ordered by their digest.
    """
    limit = min(_MAX_DOCUMENT_BYTES, max_bytes // 40)
    seen: set[str] = set()
    documents: dict[str, list[Document]] = {}
    for domain, candidates in sources.items():
        documents[domain] = []
        total = 0
        for source in candidates:
            if total >= max_bytes:
                break
            text = source.read()
            if text is None or SPACE_MARK in text:
                continue
            # The whole text counts as well: a copy with other spaces is cut at another place.
            whole, text = _digest(text), _truncate(text, limit)
            digest, num_bytes = _digest(text), len(text.encode())
            if num_bytes < _MIN_DOCUMENT_BYTES or digest in seen or whole in seen:
                continue
            seen |= {digest, whole}
            documents[domain].append(Document(digest, text, num_bytes))
            total += num_bytes
        documents[domain].sort(key=lambda document: document.digest)
    return documents


def _digest(text: str) -> str:
    """Hash the words of a text, whatever stands between them."""
    return hashlib.blake2b(" ".join(text.split()).encode(), digest_size=16).hexdigest()


def _truncate(text: str, max_bytes: int) -> str:
    """Cut a text to so many bytes, after its last complete line if there is one."""
    data = text.encode()
    if len(data) <= max_bytes:
        return text
    cut = data[:max_bytes].decode("utf-8", errors="ignore")
    head, newline, _ = cut.rpartition("\n")
    return head + newline if newline else cut


def drop_unusable(
    documents: dict[str, list[Document]], max_bytes: int
) -> dict[str, list[Document]]:
    """Leave out domains that are too small.

    Raises:
        CorpusError: fewer than five are left.
    """
    least = min(max_bytes // _USABLE_SHARE, _MAX_USABLE_BYTES)
    usable, sizes = {}, {}
    for domain, found in documents.items():
        sizes[domain] = sum(document.num_bytes for document in found)
        if sizes[domain] < least or len(found) < 2:
            _log.warning("demo corpus: only %s bytes of %s, left out", f"{sizes[domain]:,}", domain)
            continue
        if sizes[domain] < max_bytes // 2:
            _log.warning("demo corpus: only %s bytes of %s", f"{sizes[domain]:,}", domain)
        usable[domain] = found
    if len(usable) < MIN_DOMAINS:
        table = ", ".join(f"{domain} {size:,}" for domain, size in sizes.items())
        raise CorpusError(
            f"demo corpus: {len(usable)} domains with {least:,} bytes of text or more, expected "
            f"{MIN_DOMAINS} (found: {table}); install torch, numpy and matplotlib, or lower "
            f"max_bytes_per_domain"
        )
    return usable


def hold_out(
    documents: list[Document], valid_fraction: float
) -> tuple[list[Document], list[Document]]:
    """Return (training, held-out) documents; the latter are the fewest of lowest digest that have
    `valid_fraction` of the bytes, but never all.
    """
    wanted = valid_fraction * sum(document.num_bytes for document in documents)
    count = total = 0
    while total < wanted and count < len(documents) - 1:
        total += documents[count].num_bytes
        count += 1
    return documents[count:], documents[:count]
