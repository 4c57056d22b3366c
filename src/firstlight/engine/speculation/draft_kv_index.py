"""Which keys a draft model has: for each page, the text that it ran over.

A draft model runs only when it drafts, and so finds pages that it never saw. A page is known by the text
before it and the tokens in it, not by who holds it: so it does not matter that pages change hands while
nobody looks. Invariant: what is said to be held was written by the drafter for this very text.
"""

from __future__ import annotations

from dataclasses import dataclass

from firstlight.engine.scheduler.sequence import Sequence
from firstlight.engine.speculation.common_prefix import common_prefix
from firstlight.engine.speculation.draft_memory import memory_of


@dataclass(frozen=True)
class _Page:
    before: int  # a hash of all the text before the page
    tokens: tuple[int, ...]
    after: int  # of the text with the page, where it is full


class Held:
    """See the module."""

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._pages: dict[int, _Page] = {}

    def count(self, sequence: Sequence) -> int:
        """How many of the computed tokens, from the first one on, have keys in the sequence's pages."""
        computed, size = len(sequence.tokens) - 1, self._size
        chain = self._chain(sequence)
        num = 0
        for index, page in enumerate(sequence.pages):
            known = self._pages.get(page)
            if known is None or known.before != chain[index] or num >= computed:
                break
            if len(known.tokens) == size and index + 1 < len(chain) and known.after == chain[index + 1]:
                num += size
                continue
            num += common_prefix(sequence.tokens[num : num + size], known.tokens)
            break
        return min(num, computed)

    def written(self, sequence: Sequence, first: int, end: int) -> None:
        """Keys of the tokens at positions [first, end) were written."""
        size, chain = self._size, self._chain(sequence)
        for index in range(first // size, -(-end // size)):
            tokens = tuple(sequence.tokens[index * size : min(end, (index + 1) * size)])
            before = chain[index]
            self._pages[sequence.pages[index]] = _Page(before, tokens, hash((before, tokens)))

    def _chain(self, sequence: Sequence) -> list[int]:
        """The hash of the text before each page of computed tokens, and after the last full one."""
        memory, size = memory_of(sequence), self._size
        if not isinstance(memory.own, list):
            memory.own = [0]
        chain: list[int] = memory.own
        while len(chain) * size < len(sequence.tokens):
            start = (len(chain) - 1) * size
            chain.append(hash((chain[-1], tuple(sequence.tokens[start : start + size]))))
        return chain
