"""The pages of running sequences: takes them, grows them, shows full ones to the prefix cache, gives them
back.

Collects the changes of the page tables, which the next `StepPlan` carries to the ranks. Invariant: a
sequence's pages cover at least its `num_computed` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from firstlight.engine.scheduler.pages import PageAllocator
from firstlight.engine.scheduler.prefix_cache import Node, PrefixCache
from firstlight.engine.scheduler.sequence import Sequence

PageChange = tuple[int, int, list[int]]  # slot, index of the first page in the sequence, page ids


@dataclass
class Changes:
    """What a plan tells the ranks of their page tables and of slots whose content moves; see `StepPlan`."""

    pages: list[PageChange] = field(default_factory=list)
    moves: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))


class SequenceMemory:
    """See the module."""

    def __init__(self, num_pages: int, page_size_tokens: int, *, prefix_cache: bool) -> None:
        self.page_size_tokens = page_size_tokens
        self.prefix = PrefixCache(PageAllocator(num_pages), page_size_tokens, enabled=prefix_cache)
        self._changes = Changes()

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size_tokens)

    def cached_path(self, sequence: Sequence) -> list[Node]:
        """The cached prefix of its tokens, never all of them: the last token's logits must be computed."""
        return self.prefix.match(sequence.tokens, (len(sequence.tokens) - 1) // self.page_size_tokens)

    def num_cached(self, sequence: Sequence) -> int:
        """How many pages of a waiting sequence are in the cache."""
        return len(self.cached_path(sequence))

    def num_missing(self, sequence: Sequence) -> int:
        """Pages that a running sequence still needs for the tokens it has."""
        return max(0, self.pages_for(len(sequence.tokens)) - len(sequence.pages))

    def is_computing(self, other: Sequence, sequence: Sequence, path: list[Node]) -> bool:
        """Whether `other`, a running prompt, is about to fill the page that comes after `path`."""
        start, size = len(path) * self.page_size_tokens, self.page_size_tokens
        if not self.prefix.enabled or start + size >= len(sequence.tokens):
            return False
        node = path[-1] if path else self.prefix.root
        page = slice(start, start + size)
        return other.node is node and other.tokens[page] == sequence.tokens[page]

    def fits_whole(self, sequence: Sequence, path: list[Node], reserved: int = 0) -> bool:
        """Whether all its tokens fit beside what runs, given its cached prefix and `reserved` pages."""
        # Idle pages of the path are about to be held, so they are not available for the rest.
        idle = sum(self.prefix.is_idle(node.page) for node in path)
        missing = self.pages_for(len(sequence.tokens)) - len(path)
        return missing <= self.prefix.num_available - idle - reserved

    def start(self, sequence: Sequence, path: list[Node]) -> None:
        """Gives a sequence (which has a slot) its cached prefix."""
        sequence.pages = self.prefix.retain(path)
        sequence.node = path[-1] if path else self.prefix.root
        sequence.num_registered = len(path)
        sequence.num_computed = len(path) * self.page_size_tokens
        if path:
            self._changes.pages.append((sequence.slot, 0, list(sequence.pages)))

    def grow(self, sequence: Sequence, num: int) -> bool:
        """Gives it pages for `num` more tokens; False if they ran out (what it got, it keeps)."""
        first = len(sequence.pages)
        wanted = self.pages_for(sequence.num_computed + num)
        while len(sequence.pages) < wanted:
            page = self.prefix.allocate()
            if page is None:
                break
            sequence.pages.append(page)
        if len(sequence.pages) > first:
            self._changes.pages.append((sequence.slot, first, sequence.pages[first:]))
        return len(sequence.pages) >= wanted

    def register(self, sequence: Sequence) -> None:
        """Shows the cache the pages that became full; changes over to a twin's page where one exists."""
        if not self.prefix.enabled:
            return
        size = self.page_size_tokens
        for index in range(sequence.num_registered, sequence.num_computed // size):
            assert sequence.node is not None, "a running sequence has a place in the cache"
            page = sequence.pages[index]
            node = self.prefix.insert(sequence.node, sequence.tokens[index * size : (index + 1) * size], page)
            if node.page != page:
                sequence.pages[index] = self.prefix.retain([node])[0]
                self.prefix.release([page])
                self._changes.pages.append((sequence.slot, index, [node.page]))
            sequence.node = node
            sequence.num_registered = index + 1

    def has_spare_pages(self, sequence: Sequence, num_drafts: int, reserved: int) -> bool:
        """Whether drafts behind its tokens have pages, or get them beside `reserved` that others may need."""
        missing = self.pages_for(len(sequence.tokens) + num_drafts) - len(sequence.pages)
        return missing <= 0 or missing + reserved <= self.prefix.num_available

    def gather(self, sequence: Sequence, path: list[int]) -> None:
        """Accepted drafts of a tree, by their places in it, move to the slots of their positions."""
        size, computed = self.page_size_tokens, sequence.num_computed
        for place, was in enumerate(path):
            if was == place:
                continue
            for slots, at in zip(self._changes.moves, (computed + was, computed + place), strict=True):
                slots.append(sequence.pages[at // size] * size + at % size)

    def settle(self, sequence: Sequence, num_accepted: int) -> None:
        """Drafts were verified: accepted ones are computed, and the others leave no page."""
        sequence.num_computed += num_accepted
        if sequence.num_computed // self.page_size_tokens > sequence.num_registered:
            self.register(sequence)
        kept = self.pages_for(sequence.num_computed)
        if len(sequence.pages) > kept:
            self.prefix.release(sequence.pages[kept:])
            del sequence.pages[kept:]

    def release(self, sequence: Sequence) -> None:
        self.prefix.release(sequence.pages)
        sequence.pages = []
        sequence.node = None
        sequence.num_registered = 0
        sequence.num_computed = 0

    def take_changes(self) -> Changes:
        """Changes since the last call, in order; where a slot changed hands, the new owner's come last."""
        changes, self._changes = self._changes, Changes()
        return changes

    @property
    def moves(self) -> tuple[list[int], list[int]]:
        """Slots whose content moves, and where to, since changes were taken."""
        return self._changes.moves
