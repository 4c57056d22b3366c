"""The prefix cache: a radix tree whose edges are whole pages of token ids.

The scheduler asks it for the longest cached prefix of a prompt, hands it pages as they fill, and asks it for
pages (it evicts the least recently used leaf when none is free). The tree holds one reference on each of its
pages. Invariants: a page's content is determined by the path to it; a node is evicted only while it is a leaf
and nobody but the tree holds its page.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count

from firstlight.engine.scheduler.pages import PageAllocator


class Node:
    """One cached page. The root has page -1 and no parent."""

    __slots__ = ("children", "key", "last_used", "page", "parent")

    def __init__(self, page: int, key: tuple[int, ...], parent: Node | None) -> None:
        self.page = page
        self.key = key
        self.parent = parent
        self.children: dict[tuple[int, ...], Node] = {}
        self.last_used = 0


class PrefixCache:
    """Prefix reuse over a `PageAllocator`; with `enabled` false it only allocates and releases."""

    def __init__(self, allocator: PageAllocator, page_size_tokens: int, *, enabled: bool = True) -> None:
        self.page_size_tokens = page_size_tokens
        self.root = Node(-1, (), None)
        self.enabled = enabled
        self._allocator = allocator
        self._nodes: dict[int, Node] = {}  # page -> node
        self._idle: set[int] = set()  # cached pages that nobody else holds
        self._clock = count(1)
        # (last_used, tie-break, node); entries go stale and are checked when they are popped.
        self._heap: list[tuple[int, int, Node]] = []

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can still give: free ones, and cached ones that nobody holds."""
        return self._allocator.num_free + len(self._idle)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def is_idle(self, page: int) -> bool:
        """Whether only the cache holds this page."""
        return page in self._idle

    @property
    def num_used(self) -> int:
        """Pages held by sequences."""
        return self._allocator.num_pages - 1 - self.num_available

    def match(self, tokens: Sequence[int], max_pages: int) -> list[Node]:
        """The cached nodes of the longest prefix of `tokens`, at most `max_pages`; retains nothing."""
        size = self.page_size_tokens
        node = self.root
        path: list[Node] = []
        if not self.enabled:
            return path
        for start in range(0, max_pages * size, size):
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def retain(self, path: Sequence[Node]) -> list[int]:
        """Takes a reference on each page of a matched path for a sequence, and returns the pages."""
        now = next(self._clock)
        for node in path:
            node.last_used = now
            self._allocator.retain(node.page)
            self._idle.discard(node.page)
        return [node.page for node in path]

    def insert(self, parent: Node, tokens: Sequence[int], page: int) -> Node:
        """Enters a full page under `parent`. Returns its node, or the twin that was there first.

        With a twin the caller changes over to the twin's page, so that equal content is resident once and
        every node above a held page is held too.
        """
        key = tuple(tokens)
        twin = parent.children.get(key)
        if twin is not None:
            return twin
        node = Node(page, key, parent)
        node.last_used = next(self._clock)
        parent.children[key] = node
        self._nodes[page] = node
        self._allocator.retain(page)
        return node

    def allocate(self) -> int | None:
        """One page with one reference, evicting if none is free; None when every page is held."""
        if not self._allocator.num_free and not self._evict():
            return None
        return self._allocator.allocate()

    def release(self, pages: Sequence[int]) -> None:
        """Gives a sequence's pages back; cached ones stay until they are evicted."""
        # Deepest first, so that a parent is looked at after its children.
        for page in reversed(pages):
            left = self._allocator.release(page)
            node = self._nodes.get(page)
            if node is not None and left == 1:
                self._idle.add(page)
                self._offer(node)

    def clear(self) -> None:
        """Drops every cached page that nobody holds."""
        while self._evict():
            pass

    def check(self) -> None:
        """Asserts the integrity of the tree against the allocator (tests and debugging)."""
        for page, node in self._nodes.items():
            assert node.page == page, "a node is filed under another page"
            assert node.parent is not None, "a cached node has no parent"
            assert node.parent.children.get(node.key) is node, "a cached node hangs in the air"
            assert self._allocator.references(page) >= 1, "a cached page is free"
            idle = self._allocator.references(page) == 1
            assert idle == (page in self._idle), "the idle set disagrees with the reference counts"

    def _offer(self, node: Node) -> None:
        if node.children:
            return
        heapq.heappush(self._heap, (node.last_used, node.page, node))
        if len(self._heap) > 2 * len(self._idle) + 64:
            # Every reuse leaves a stale entry behind; a pool that never runs short would never pop them.
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def _is_current(self, entry: tuple[int, int, Node]) -> bool:
        last_used, _, node = entry
        filed = self._nodes.get(node.page) is node and node.last_used == last_used
        return filed and not node.children and node.page in self._idle

    def _evict(self) -> bool:
        while self._heap:
            entry = heapq.heappop(self._heap)
            if not self._is_current(entry):
                continue
            node = entry[2]
            parent = node.parent
            assert parent is not None, "only cached nodes are offered for eviction"
            del parent.children[node.key]
            del self._nodes[node.page]
            self._idle.discard(node.page)
            self._allocator.release(node.page)
            if parent.page in self._idle:
                self._offer(parent)
            return True
        return False
