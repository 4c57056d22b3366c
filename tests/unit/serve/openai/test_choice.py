"""The text of a sequence: however the engine's tokens are grouped, the same text, tokens and end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from firstlight.engine.messages import FINISH_LENGTH, SequenceOutput, TokenLogprobs
from firstlight.engine.params import SamplingParams
from firstlight.serve.openai.choice import Choice, Delta, TextOptions
from support.byte_text import END, byte_text

TEXT = byte_text()
GROUPS = st.lists(st.lists(st.sampled_from([*b"ab\n", 0xC3, 0xA9, END]), max_size=5), min_size=1, max_size=8)
STOPS = st.lists(st.sampled_from(["ab", "b", "aab", "é", "\n\n", "éa"]), max_size=2)


def run(
    groups: list[list[int]], stops: list[str], include: bool, min_tokens: int = 0
) -> tuple[Choice, list[Delta]]:
    params = SamplingParams(stop=tuple(stops), logprobs=0, min_tokens=min_tokens)
    options = TextOptions(include_stop=include, token_ids=True)
    choice = Choice(TEXT, params, options, frozenset({END}))
    deltas: list[Delta] = []
    for number, group in enumerate(groups):
        reason = FINISH_LENGTH if number == len(groups) - 1 else None
        logprobs = [TokenLogprobs(token, -1.0, 1, []) for token in group]
        deltas.append(choice.push(SequenceOutput("r", list(group), logprobs, reason)))
        if choice.is_finished:
            break
    return choice, deltas


def summary(choice: Choice, deltas: list[Delta]) -> tuple[object, ...]:
    text = "".join(delta.text for delta in deltas)
    ids = [token for delta in deltas for token in delta.token_ids]
    offsets = [offset for delta in deltas for offset in delta.offsets]
    last = deltas[-1]
    return text, ids, offsets, choice.num_tokens, last.finish_reason, last.stop_reason


@given(GROUPS, STOPS, st.booleans(), st.integers(0, 4))
def test_grouping_changes_nothing(
    groups: list[list[int]], stops: list[str], include: bool, min_tokens: int
) -> None:
    flat = [token for group in groups for token in group]
    one_by_one = [[token] for token in flat] or [[]]
    expected = summary(*run([flat], stops, include, min_tokens))
    assert summary(*run(groups, stops, include, min_tokens)) == expected
    assert summary(*run(one_by_one, stops, include, min_tokens)) == expected


@given(GROUPS, STOPS)
def test_tokens_never_precede_their_text(groups: list[list[int]], stops: list[str]) -> None:
    _, deltas = run(groups, stops, include=False)
    sent = 0
    for delta in deltas:
        sent += len(delta.text)
        if delta.finish_reason is None:
            assert all(offset < sent for offset in delta.offsets)


@given(GROUPS, STOPS)
def test_no_stop_string_is_left_in_the_text(groups: list[list[int]], stops: list[str]) -> None:
    _, deltas = run(groups, stops, include=False)
    text = "".join(delta.text for delta in deltas)
    assert not any(stop in text for stop in stops)


def test_without_logprobs_or_ids_no_tokens_are_kept() -> None:
    choice = Choice(TEXT, SamplingParams(), TextOptions(), frozenset())
    delta = choice.push(SequenceOutput("r", list(b"abc")))
    assert (delta.text, delta.token_ids, delta.offsets) == ("abc", [], [])
    assert not choice.push(SequenceOutput("r", [0xC3]))
