"""PrefixCache: matching, eviction order, twins, and its integrity after any history."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from firstlight.engine.scheduler.pages import PageAllocator
from firstlight.engine.scheduler.prefix_cache import Node, PrefixCache

SIZE = 2  # tokens a page
NUM_PAGES = 13


class Holder:
    """A sequence as the scheduler keeps one: its tokens, its pages, and how many of them are registered."""

    def __init__(self, cache: PrefixCache, tokens: list[int]) -> None:
        self.cache = cache
        self.tokens = tokens
        path = cache.match(tokens, len(tokens) // SIZE)
        self.pages = cache.retain(path)
        self.num_cached = len(path)
        self.node = path[-1] if path else cache.root
        self.num_registered = len(path)

    def compute(self) -> bool:
        """Pages for all tokens, and the full ones registered; False if pages ran out."""
        while len(self.pages) < -(-len(self.tokens) // SIZE):
            page = self.cache.allocate()
            if page is None:
                return False
            self.pages.append(page)
        for index in range(self.num_registered, len(self.tokens) // SIZE):
            self._register(index)
        return True

    def _register(self, index: int) -> None:
        page = self.pages[index]
        node = self.cache.insert(self.node, self.tokens[index * SIZE : (index + 1) * SIZE], page)
        if node.page != page:
            self.pages[index] = self.cache.retain([node])[0]
            self.cache.release([page])
        self.node, self.num_registered = node, index + 1

    def release(self) -> None:
        self.cache.release(self.pages)
        self.pages = []


def make_cache(num_pages: int = NUM_PAGES, *, enabled: bool = True) -> PrefixCache:
    return PrefixCache(PageAllocator(num_pages), SIZE, enabled=enabled)


def run_once(cache: PrefixCache, tokens: list[int]) -> list[int]:
    """A sequence that comes, is computed and goes; its pages."""
    holder = Holder(cache, tokens)
    assert holder.compute()
    pages = list(holder.pages)
    holder.release()
    return pages


def cached_tokens(cache: PrefixCache, tokens: list[int]) -> int:
    return len(cache.match(tokens, len(tokens) // SIZE)) * SIZE


def test_a_second_sequence_finds_the_full_pages_of_the_first() -> None:
    cache = make_cache()
    pages = run_once(cache, [1, 2, 3, 4, 5])
    path = cache.match([1, 2, 3, 4, 9, 9], 3)
    assert [node.page for node in path] == pages[:2]
    assert cached_tokens(cache, [1, 2, 9]) == 2
    assert cached_tokens(cache, [9, 2, 3, 4]) == 0
    cache.check()


def test_match_stops_at_the_limit_and_retains_nothing() -> None:
    cache = make_cache()
    run_once(cache, [1, 2, 3, 4])
    available = cache.num_available
    assert len(cache.match([1, 2, 3, 4], 1)) == 1
    assert cache.num_available == available == NUM_PAGES - 1


def test_equal_pages_after_different_prefixes_are_different() -> None:
    cache = make_cache()
    run_once(cache, [1, 2, 7, 8])
    run_once(cache, [3, 4, 7, 8])
    assert len({node.page for node in (*cache.match([1, 2, 7, 8], 2), *cache.match([3, 4, 7, 8], 2))}) == 4


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = make_cache(num_pages=4)  # three pages
    for tokens in ([1, 1], [2, 2], [3, 3]):
        run_once(cache, tokens)
    run_once(cache, [1, 1])  # a hit makes it the youngest
    assert cache.num_idle == 3
    run_once(cache, [4, 4])
    assert [cached_tokens(cache, [n, n]) for n in (1, 2, 3, 4)] == [2, 0, 2, 2]
    run_once(cache, [5, 5])
    assert [cached_tokens(cache, [n, n]) for n in (1, 3, 4, 5)] == [2, 0, 2, 2]
    cache.check()


def test_a_parent_goes_after_its_children() -> None:
    cache = make_cache(num_pages=4)
    run_once(cache, [1, 1, 2, 2, 3, 3])
    run_once(cache, [9, 9])
    assert cached_tokens(cache, [1, 1, 2, 2, 3, 3]) == 4
    cache.check()


def test_what_is_held_is_never_evicted() -> None:
    cache = make_cache(num_pages=3)
    holder = Holder(cache, [1, 1, 2, 2])
    assert holder.compute()
    assert cache.allocate() is None
    assert (cache.num_available, cache.num_used) == (0, 2)
    holder.release()
    assert cache.allocate() is not None
    cache.check()


def test_a_twin_changes_over_to_the_page_that_was_there_first() -> None:
    cache = make_cache()
    one, other = Holder(cache, [1, 2, 3, 4, 5]), Holder(cache, [1, 2, 3, 4, 6])
    assert one.num_cached == other.num_cached == 0  # both were admitted before either was computed
    assert one.compute()
    assert other.compute()
    assert one.pages[:2] == other.pages[:2]
    assert one.pages[2] != other.pages[2]
    assert cache.num_used == 4
    cache.check()
    one.release()
    cache.check()
    other.release()
    assert (cache.num_used, cache.num_idle) == (0, 2)
    cache.check()


def test_switched_off_it_only_allocates() -> None:
    cache = make_cache(enabled=False)
    page = cache.allocate()
    assert page is not None
    cache.release([page])
    assert cache.match([1, 2], 1) == []
    assert (cache.num_idle, cache.num_available) == (0, NUM_PAGES - 1)


def test_clear_drops_what_nobody_holds() -> None:
    cache = make_cache()
    run_once(cache, [5, 5, 6, 6])
    holder = Holder(cache, [1, 1, 2, 2])
    assert holder.compute()
    cache.clear()
    assert (cached_tokens(cache, [5, 5, 6, 6]), cached_tokens(cache, [1, 1, 2, 2])) == (0, 4)
    cache.check()


def test_hits_without_eviction_do_not_make_it_grow() -> None:
    cache = make_cache()
    for _ in range(2000):
        run_once(cache, [1, 1, 2, 2])
    assert len(cache._heap) < 200


class Histories(RuleBasedStateMachine):
    """Random sequences that come, grow and go over few pages, with few token values, so that they share."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache()
        self.running: list[Holder] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8))
    def admit(self, tokens: list[int]) -> None:
        self.running.append(Holder(self.cache, tokens))

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 99))
    def compute(self, choice: int) -> None:
        holder = self.running[choice % len(self.running)]
        if not holder.compute():
            assert self.cache.num_available == 0

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 99), more=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def append(self, choice: int, more: list[int]) -> None:
        self.running[choice % len(self.running)].tokens.extend(more)

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 99))
    def free(self, choice: int) -> None:
        self.running.pop(choice % len(self.running)).release()

    @rule()
    def evict_one(self) -> None:
        page = self.cache.allocate()
        if page is not None:
            self.cache.release([page])

    @invariant()
    def counts_add_up(self) -> None:
        self.cache.check()
        held = {page for holder in self.running for page in holder.pages}
        assert self.cache.num_used == len(held)
        assert self.cache.num_available == NUM_PAGES - 1 - len(held)

    @invariant()
    def a_cached_path_has_the_content_of_its_tokens(self) -> None:
        for holder in self.running:
            node: Node | None = holder.node
            for index in reversed(range(holder.num_registered)):
                assert node is not None
                assert node.key == tuple(holder.tokens[index * SIZE : (index + 1) * SIZE])
                assert node.page == holder.pages[index]
                node = node.parent
            assert node is self.cache.root

    def teardown(self) -> None:
        for holder in self.running:
            holder.release()
        assert self.cache.num_used == 0
        self.cache.clear()
        assert self.cache.num_idle == 0


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
