"""Which parsers a server uses: by name, or by what is known of the model.

A new family is one file with a `ParserFamily`, and a line in `FAMILIES`. Invariant: "auto" finds a family
only where the model is of it, or its tokenizer has all of its markers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from firstlight.base.errors import UsageError
from firstlight.serve.parsing.kimi_k2 import KimiK2
from firstlight.serve.parsing.parser import ParserFamily

FAMILIES: dict[str, ParserFamily] = {family.name: family for family in (KimiK2(),)}
AUTO, NONE = "auto", "none"


@dataclass(frozen=True)
class Parsers:
    """The families whose tool calls and whose reasoning are read; None: such text is content."""

    tools: ParserFamily | None = None
    reasoning: ParserFamily | None = None

    @property
    def markers(self) -> frozenset[str]:
        """Tokens that must reach the parsers even where the tokenizer calls them special."""
        used = (family for family in (self.tools, self.reasoning) if family is not None)
        return frozenset(marker for family in used for marker in family.markers)


def choose_parsers(
    tool_call_parser: str, reasoning_parser: str, architecture: str, has_token: Callable[[str], bool]
) -> Parsers:
    """The parsers of these names. Raises `UsageError` for a name that there is not."""

    def choose(flag: str, name: str) -> ParserFamily | None:
        if name == NONE:
            return None
        if name != AUTO:
            return _named(flag, name)
        return next(
            (
                family
                for family in FAMILIES.values()
                if architecture in family.architectures or all(map(has_token, family.markers))
            ),
            None,
        )

    return Parsers(choose("tool-call-parser", tool_call_parser), choose("reasoning-parser", reasoning_parser))


def _named(flag: str, name: str) -> ParserFamily:
    if name not in FAMILIES:
        raise UsageError(
            f"--{flag} {name}: there is no such parser.", f"Use one of {', '.join((AUTO, NONE, *FAMILIES))}."
        )
    return FAMILIES[name]
