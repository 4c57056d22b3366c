"""PageAllocator: counts add up, the null page stays, pages come back in a fixed order."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firstlight.engine.scheduler.pages import NULL_PAGE, PageAllocator


def test_every_page_but_the_null_page_is_handed_out_once() -> None:
    allocator = PageAllocator(5)
    pages = [allocator.allocate() for _ in range(4)]
    assert sorted(pages) == [1, 2, 3, 4]
    assert NULL_PAGE not in pages
    assert allocator.num_free == 0


def test_the_last_freed_page_is_handed_out_first() -> None:
    allocator = PageAllocator(8)
    first, second = allocator.allocate(), allocator.allocate()
    allocator.release(first)
    allocator.release(second)
    assert [allocator.allocate(), allocator.allocate()] == [second, first]


def test_a_page_is_free_only_when_every_reference_is_back() -> None:
    allocator = PageAllocator(3)
    page = allocator.allocate()
    allocator.retain(page)
    assert allocator.references(page) == 2
    assert allocator.release(page) == 1
    assert allocator.num_free == 1
    assert allocator.release(page) == 0
    assert allocator.num_free == 2


def test_misuse_is_caught() -> None:
    allocator = PageAllocator(3)
    page = allocator.allocate()
    allocator.release(page)
    with pytest.raises(AssertionError, match="released more often"):
        allocator.release(page)
    with pytest.raises(AssertionError, match="is free"):
        allocator.retain(page)
    with pytest.raises(ValueError, match="null page"):
        PageAllocator(1)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.sampled_from(["allocate", "retain", "release"]), st.integers(0, 20)), max_size=80)
)
def test_counts_add_up_after_any_history(history: list[tuple[str, int]]) -> None:
    allocator = PageAllocator(7)
    held: list[int] = []  # one entry a reference
    for action, choice in history:
        if action == "allocate" and allocator.num_free:
            page = allocator.allocate()
            assert page not in held
            held.append(page)
        elif held:
            page = held[choice % len(held)]
            if action == "retain":
                allocator.retain(page)
                held.append(page)
            elif action == "release":
                held.remove(page)
                assert allocator.release(page) == held.count(page)
        assert allocator.num_free == 6 - len(set(held))
        assert all(allocator.references(page) == held.count(page) for page in range(1, 7))
