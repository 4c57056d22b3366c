"""Log grammars: what a foreign engine's lines mean, kept as data in `grammars/ENGINE.yaml`.

Invariant: the phases that a grammar names are those of the native engine, so that a reader of phases need not
ask whose they are.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from importlib import resources
from typing import Literal

import msgspec
import yaml

from firstlight.base.errors import UsageError
from firstlight.base.phases import PHASES, PLACES

ENGINES = ("vllm", "sglang")
_NUMBER = re.compile(r"\d+")
_BOUND = re.compile(r"(>=|<=|==|<|>)\s*([0-9][\w.]*)")


class Prefix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a line begins and who speaks. Groups: `role`, `labels` ("TP0 EP0"), `pid`; all may be missing."""

    pattern: str
    example: str


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line that means a phase.

    `pattern` is searched in the line without its prefix; its groups `done`, `total`, `percent` and `detail`
    move the odometer, `rank` says who speaks. `literals` are the parts that must stand in the engine's
    source. `of`: whose phase it is. `per_rank`: it moves only the rank that says it; otherwise one rank says
    it for all. `again`: the phase that the second such line of a rank means. `within`: in these later phases
    it moves their odometer instead. `full`: the phase that begins when the odometer has reached its total.
    """

    phase: str
    pattern: str
    literals: tuple[str, ...]
    of: Literal["server", "ranks"] = "ranks"
    per_rank: bool = False
    unit: str = ""
    detail: str = ""
    milestone: str = ""
    again: str = ""
    within: tuple[str, ...] = ()
    full: str = ""
    versions: str = ""


class Fatal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of an engine that ends. A cascade only says that something else has failed before."""

    kind: Literal["root", "cascade"]
    pattern: str
    literals: tuple[str, ...]
    versions: str = ""


class Grammar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that is known of one engine's log.

    `versions`: for which it was written; `checked`: the version that its literals were last compared with, or
    its lines recorded from. `phases`: their order in this engine; those in one tuple come in any order.
    `quiet_s`: the longest silence that is usual in a phase, in seconds.
    """

    engine: str
    package: str
    distributions: tuple[str, ...]
    versions: str
    checked: str
    prefixes: tuple[Prefix, ...]
    roles: dict[str, Literal["server", "core", "rank", "other"]]
    phases: tuple[str | tuple[str, ...], ...]
    quiet_s: dict[str, float]
    entries: tuple[Entry, ...]
    fatal: tuple[Fatal, ...]

    def order(self) -> dict[str, int]:
        """The place of each phase; equal places may be entered from each other."""
        groups = [(one,) if isinstance(one, str) else one for one in self.phases]
        return {phase: place for place, group in enumerate(groups) for phase in group}

    def literals(self, version: str | None = None) -> tuple[str, ...]:
        """Every literal that the source of this version should hold, once."""
        rows: tuple[Entry | Fatal, ...] = (*self.entries, *self.fatal)
        wanted = [row for row in rows if version is None or covers(row.versions, version)]
        return tuple(dict.fromkeys(literal for row in wanted for literal in row.literals))


@functools.cache
def load_grammar(engine: str) -> Grammar:
    """The grammar of an engine. Raises `UsageError` when there is none."""
    if engine not in ENGINES:
        raise UsageError(f"there is no log grammar of {engine!r}.", f"Name one of {', '.join(ENGINES)}.")
    text = resources.files("firstlight.doctor").joinpath("grammars", f"{engine}.yaml").read_text("utf-8")
    return parse_grammar(text)


def places_of(engine: str) -> Mapping[str, int]:
    """How far each phase is in a start of this engine: by its grammar, else in the order of our own."""
    return load_grammar(engine).order() if engine in ENGINES else PLACES


def parse_grammar(text: str) -> Grammar:
    """A grammar from its YAML; `msgspec.ValidationError` or `ValueError` for one that means nothing."""
    grammar = msgspec.convert(yaml.safe_load(text), Grammar)
    order = grammar.order()
    named = {*grammar.quiet_s}
    for entry in grammar.entries:
        named |= {entry.phase, *entry.within, *filter(None, (entry.again, entry.full))}
    if unknown := (set(order) - set(PHASES)) | (named - set(order)):
        raise ValueError(f"{grammar.engine}: unknown phases {sorted(unknown)}")
    rows: tuple[Prefix | Entry | Fatal, ...] = (*grammar.prefixes, *grammar.entries, *grammar.fatal)
    for row in rows:
        re.compile(row.pattern)
    return grammar


def covers(versions: str, version: str) -> bool:
    """Whether `version` lies in a range such as ">=0.11,<0.34"; an empty range holds all of them."""
    mine = _numbers(version)
    for sign, text in _BOUND.findall(versions):
        bound = _numbers(text)
        width = max(len(mine), len(bound))
        left, right = (numbers + (0,) * (width - len(numbers)) for numbers in (mine, bound))
        fits = {">=": left >= right, "<=": left <= right, "==": left == right}
        if not fits.get(sign, left < right if sign == "<" else left > right):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """The release numbers: of "0.5.23.post1" those before the first letter."""
    release = re.split(r"[^0-9.]", version, maxsplit=1)[0]
    return tuple(int(number) for number in _NUMBER.findall(release))
