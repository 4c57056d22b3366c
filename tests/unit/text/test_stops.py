"""Stop strings are found wherever the text is cut, and nothing else is held back."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from firstlight.text.stops import StopMatch, StopMatcher

LETTERS = st.text(alphabet="ab", max_size=12)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3)


def search(text: str, stops: list[str]) -> StopMatch | None:
    """The match that ends first; of several there, the longest. By trying everything."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return StopMatch(stop, end - len(stop), end)
    return None


def feed(matcher: StopMatcher, pieces: list[str]) -> str:
    parts: list[str] = []
    for piece in pieces:
        parts.append(matcher.push(piece))
        if matcher.match is not None:
            return "".join(parts)
    return "".join([*parts, matcher.flush()])


@given(st.lists(LETTERS), STOPS, st.booleans())
@example(["aab"], ["aab", "b"], False)
@example(["a", "a", "b"], ["ab", "aab"], False)
def test_any_cut_gives_what_a_search_of_the_whole_gives(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    text = "".join(pieces)
    expected = search(text, stops)
    matcher = StopMatcher(stops, include=include)
    given_out = feed(matcher, pieces)
    assert matcher.match == expected
    if expected is None:
        assert given_out == text
    else:
        assert given_out == text[: expected.end if include else expected.start]


@given(st.lists(LETTERS), STOPS)
def test_only_a_possible_beginning_is_held(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    text = ""
    for piece in pieces:
        matcher.push(piece)
        text += piece
        if matcher.match is not None:
            return
        held = text[matcher.released :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_false_start_is_given_out() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert [matcher.push(piece) for piece in ("a\n", "\nU", "x")] == ["a", "", "\n\nUx"]


def test_skipped_text_counts_but_is_not_searched() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.skip("xab") == "xab"
    assert matcher.push("cab") == "c"
    assert matcher.match == StopMatch("ab", 4, 6)
