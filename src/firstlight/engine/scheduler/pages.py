"""KV pages as integers with reference counts.

Page 0 is the null page: it is never handed out, the pool keeps it zero, and padded attention columns point at
it. Invariant: a page is free, or its reference count is positive; `num_free + pages in use == num_pages - 1`.
"""

from __future__ import annotations

NULL_PAGE = 0


class PageAllocator:
    """Hands out pages, last freed first, so that a lightly loaded server keeps touching the same memory."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a page pool needs the null page and one more, not {num_pages}")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._references = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def references(self, page: int) -> int:
        return self._references[page]

    def allocate(self) -> int:
        """A free page with one reference. The caller checked `num_free`."""
        page = self._free.pop()
        self._references[page] = 1
        return page

    def retain(self, page: int) -> None:
        assert self._references[page] > 0, f"page {page} is free"
        self._references[page] += 1

    def release(self, page: int) -> int:
        """Gives one reference back; returns how many are left. At 0 the page is free."""
        left = self._references[page] - 1
        assert left >= 0, f"page {page} was released more often than retained"
        self._references[page] = left
        if left == 0:
            self._free.append(page)
        return left
