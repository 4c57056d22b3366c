"""Kimi's markup: what is read of it, and that the same is read however it is cut into pieces."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from firstlight.serve.openai.tool_replies import whole_calls
from firstlight.serve.parsing.answer import AnswerParser
from firstlight.serve.parsing.kimi_k2 import MAX_HEADER_CHARS, KimiK2

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
ONE_SECTION, ONE_SECTION_END = "<|tool_call_section_begin|>", "<|tool_call_section_end|>"
CALL, CALL_END, ARGS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
FAMILY = KimiK2()
TWO = frozenset({"get_weather", "get_time"})
ONE = frozenset({"get_weather"})


def call(head: str = "functions.get_weather:0", arguments: str = '{"city": "Rome"}') -> str:
    return f"{CALL}{head}{ARGS}{arguments}{CALL_END}"


@dataclass
class Read:
    """What came out of an answer. `calls`: id, name, arguments."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)


def parser(
    is_open: bool, names: frozenset[str] | None, before: int = 0, one_call: bool = False
) -> AnswerParser:
    tools = None if names is None else FAMILY.tools(names, before)
    ends = () if names is None else FAMILY.call_begins
    return AnswerParser(FAMILY.reasoning(is_open=is_open, ends=ends), tools, one_call=one_call)


def read(parser: AnswerParser, pieces: Iterable[str]) -> Read:
    parts = [*(parser.push(piece) for piece in pieces), parser.flush()]
    calls = whole_calls(piece for part in parts for piece in part.calls)
    return Read(
        "".join(part.reasoning for part in parts),
        "".join(part.content for part in parts),
        [(made.id, made.function.name, made.function.arguments) for made in calls],
    )


ROME = ("functions.get_weather:0", "get_weather", '{"city": "Rome"}')
# name: (whether the prompt opened <think>, the tools on offer, the answer, what it is)
CASES: dict[str, tuple[bool, frozenset[str] | None, str, Read]] = {
    "content alone": (False, TWO, " Hello.\n", Read(content=" Hello.\n")),
    "blank alone": (False, TWO, " \n", Read(content=" \n")),
    "thinks, then speaks": (True, TWO, "Hm.\n</think>\nHello.", Read("Hm.\n", "\nHello.")),
    "opens its reasoning itself": (False, TWO, "\n<think>Hm.</think>Hello.", Read("Hm.", "Hello.")),
    "opens it once more": (True, TWO, "\n<think>Hm.</think>Hello.", Read("Hm.", "Hello.")),
    "speaks of the tags": (
        False,
        TWO,
        "Write <think>x</think>.",
        Read(content="Write <think>x</think>."),
    ),
    "thinks of the tag": (True, TWO, "a <think> b</think>c", Read("a <think> b", "c")),
    "closes what was not open": (False, TWO, "</think>Hello.", Read(content="Hello.")),
    "never stops thinking": (True, TWO, "Hm. And", Read("Hm. And")),
    "cut inside the closing tag": (True, TWO, "Hm.</thi", Read("Hm.</thi")),
    "a call": (False, TWO, f"{SECTION}{call()}{SECTION_END}", Read(calls=[ROME])),
    "white space around a call": (
        False,
        TWO,
        f"\n{SECTION}\n{CALL} functions.get_weather:0 \n{ARGS} {ROME[2]} {CALL_END}\n{SECTION_END}\n",
        Read(calls=[ROME]),
    ),
    "speaks, then calls": (
        False,
        TWO,
        f"I look.\n{SECTION}{call()}{SECTION_END}",
        Read(content="I look.\n", calls=[ROME]),
    ),
    "speaks behind the call": (
        False,
        TWO,
        f"{SECTION}{call()}{SECTION_END} Done.",
        Read(content=" Done.", calls=[ROME]),
    ),
    "two calls": (
        False,
        TWO,
        f"{SECTION}{call()}{call('functions.get_time:1', '{}')}{SECTION_END}",
        Read(calls=[ROME, ("functions.get_time:1", "get_time", "{}")]),
    ),
    "two sections": (
        False,
        TWO,
        f"{SECTION}{call()}{SECTION_END}And {SECTION}{call('functions.get_time:1', '{}')}{SECTION_END}",
        Read(content="And ", calls=[ROME, ("functions.get_time:1", "get_time", "{}")]),
    ),
    "thinks, then calls": (
        True,
        TWO,
        f"Hm.</think>{SECTION}{call()}{SECTION_END}",
        Read("Hm.", calls=[ROME]),
    ),
    "reasoning ended by a section": (
        True,
        TWO,
        f"Hm.{SECTION}{call()}{SECTION_END}",
        Read("Hm.", calls=[ROME]),
    ),
    "reasoning ended by a call": (True, TWO, f"Hm.{call()}", Read("Hm.", calls=[ROME])),
    "reasoning ended by a section, closed behind it": (
        True,
        TWO,
        f"{SECTION}{call()}{SECTION_END}</think>",
        Read(content="</think>", calls=[ROME]),
    ),
    "the section in the singular": (
        True,
        TWO,
        f"Hm.{ONE_SECTION}{call()}{ONE_SECTION_END}",
        Read("Hm.", calls=[ROME]),
    ),
    "no section": (False, TWO, call(), Read(calls=[ROME])),
    "no end of the section": (False, TWO, f"{SECTION}{call()}", Read(calls=[ROME])),
    "no end of a call": (
        False,
        TWO,
        f"{SECTION}{call().removesuffix(CALL_END)}{call('functions.get_time:1', '{}').removesuffix(CALL_END)}"
        f"{SECTION_END}",
        Read(calls=[ROME, ("functions.get_time:1", "get_time", "{}")]),
    ),
    "no beginning of a call": (
        False,
        TWO,
        f"{SECTION}{call().removeprefix(CALL)}{SECTION_END}",
        Read(calls=[ROME]),
    ),
    "no prefix": (False, TWO, f"{SECTION}{call('get_weather:0')}{SECTION_END}", Read(calls=[ROME])),
    "no number": (
        False,
        TWO,
        f"{SECTION}{call('functions.get_weather')}{call('get_time', '{}')}{SECTION_END}",
        Read(
            calls=[
                ("functions.get_weather:3", *ROME[1:]),
                ("functions.get_time:4", "get_time", "{}"),
            ]
        ),
    ),
    "a bare number, one tool": (False, ONE, f"{SECTION}{call('0')}{SECTION_END}", Read(calls=[ROME])),
    "a number behind a colon, one tool": (
        False,
        ONE,
        f"{SECTION}{call('functions:0')}{SECTION_END}",
        Read(calls=[ROME]),
    ),
    "an id of another style, one tool": (
        False,
        ONE,
        f"{SECTION}{call('call_abc123')}{SECTION_END}",
        Read(calls=[("functions.get_weather:3", *ROME[1:])]),
    ),
    "a bare number, two tools": (
        False,
        TWO,
        f"{SECTION}{call('0')}{SECTION_END}",
        Read(content=f"{CALL}0{ARGS}{ROME[2]}"),
    ),
    "a function that was not offered": (
        False,
        TWO,
        call("functions.search:0", "{}"),
        Read(calls=[("functions.search:0", "search", "{}")]),
    ),
    "a name with dots": (
        False,
        frozenset({"mcp.files.read", "x"}),
        call("functions.mcp.files.read:7", "{}"),
        Read(calls=[("functions.mcp.files.read:7", "mcp.files.read", "{}")]),
    ),
    "the same id twice": (
        False,
        TWO,
        f"{SECTION}{call()}{call()}{SECTION_END}",
        Read(calls=[ROME, ("functions.get_weather:1", *ROME[1:])]),
    ),
    "no arguments": (
        False,
        TWO,
        f"{CALL}functions.get_time:0{CALL_END}{CALL}functions.get_time:1{ARGS} {CALL_END}",
        Read(calls=[("functions.get_time:0", "get_time", "{}"), ("functions.get_time:1", "get_time", "{}")]),
    ),
    "arguments that are no JSON": (
        False,
        TWO,
        call(arguments="{'a': <1>,"),
        Read(calls=[(*ROME[:2], "{'a': <1>,")]),
    ),
    "cut inside the arguments": (
        True,
        TWO,
        f'{SECTION}{CALL}functions.get_weather:0{ARGS}{{"ci',
        Read(calls=[(*ROME[:2], '{"ci')]),
    ),
    "cut before the arguments": (
        False,
        TWO,
        f"{SECTION}{CALL}functions.get_weather:0{ARGS}",
        Read(calls=[(*ROME[:2], "")]),
    ),
    "cut inside an id": (False, TWO, f"{SECTION}{CALL}functions.get_", Read(content=f"{CALL}functions.get_")),
    "cut inside a marker": (False, TWO, "Well <|tool_calls_sec", Read(content="Well <|tool_calls_sec")),
    "an empty section": (False, TWO, f"Well.{SECTION}\n{SECTION_END}", Read(content="Well.")),
    "text in a section": (False, TWO, f"{SECTION}What?{SECTION_END}", Read(content="What?")),
    "an id without end": (
        False,
        TWO,
        CALL + "x" * 600 + ARGS,
        Read(content=CALL + "x" * 600 + ARGS),
    ),
    "markers that mean nothing here": (
        False,
        TWO,
        f"a{ARGS}b{CALL_END}c{SECTION_END}d",
        Read(content=f"a{ARGS}b{CALL_END}cd"),
    ),
    "no tools on offer": (
        True,
        None,
        f"Hm.{SECTION}</think>{call()}",
        Read(f"Hm.{SECTION}", content=call()),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_read(name: str) -> None:
    is_open, names, answer, expected = CASES[name]
    assert read(parser(is_open, names, 3), [answer]) == expected


@pytest.mark.parametrize("name", CASES)
def test_the_same_is_read_however_it_is_cut(name: str) -> None:
    """Character by character, cut in two at every place, and in pieces of random sizes."""
    is_open, names, answer, expected = CASES[name]
    assert read(parser(is_open, names, 3), answer) == expected
    for cut in range(1, len(answer)):
        assert read(parser(is_open, names, 3), [answer[:cut], answer[cut:]]) == expected, answer[:cut]
    draw = random.Random(name)
    for _ in range(20):
        cuts = sorted(draw.sample(range(len(answer)), min(len(answer), draw.randint(1, 12))))
        pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
        assert read(parser(is_open, names, 3), pieces) == expected, pieces


def test_one_call_ends_the_answer() -> None:
    answer = f"Hm.</think>I look.{SECTION}{call()}{call('functions.get_time:1', '{}')}{SECTION_END}More."
    for pieces in ([answer], list(answer)):
        one = parser(True, TWO, one_call=True)
        assert read(one, pieces) == Read("Hm.", "I look.", [ROME])
        assert one.is_complete


def test_arguments_are_given_out_as_they_come() -> None:
    """Nobody waits for the end of a long call: only what may be a marker or white space is held back."""
    one = parser(False, TWO)
    one.push(f"{SECTION}{CALL}functions.get_weather:0{ARGS}")
    seen = "".join(piece.arguments for c in '{"city": "a < b"' for piece in one.push(c).calls)
    assert seen == '{"city": "a < b"'


def test_what_is_held_back_is_bounded() -> None:
    one = parser(False, TWO)
    one.push(CALL)
    held = sum(not one.push("x").content for _ in range(2 * MAX_HEADER_CHARS))
    assert held <= MAX_HEADER_CHARS + len(CALL)
