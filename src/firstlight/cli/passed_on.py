"""What stands behind a `--`: arguments that we hand on as they are, to a foreign engine.

Invariant: the parser of our own flags never sees them, so that none is mistaken for ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand

from firstlight.base.errors import UsageError

_passed_on: tuple[str, ...] = ()


class PassesOn(TyperCommand):
    """A command whose arguments end at the first `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Called by typer with all that follows the command's name."""
        global _passed_on
        end = args.index("--") if "--" in args else len(args)
        _passed_on = tuple(args[end + 1 :])
        return super().parse_args(ctx, args[:end])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The line that help begins with."""
        return [*super().collect_usage_pieces(ctx), "[-- ENGINE ARGUMENTS]"]


def passed_on() -> tuple[str, ...]:
    """The arguments behind the `--` of the command that runs."""
    return _passed_on


def listed_arguments(value: object, origin: str) -> tuple[str, ...]:
    """`backend-args` of a TOML file, which comes before the arguments of the command line."""
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise UsageError(
            f"backend-args in {origin} is {value!r}, but must be a list of texts.",
            'Write it as backend-args = ["--enforce-eager"].',
        )
    return tuple(value)


def require_no_rest(arguments: Sequence[str]) -> None:
    """Our own engine takes nothing behind a `--`. Raises `UsageError`."""
    if arguments:
        raise UsageError(
            f"{' '.join(arguments)!r} is for a foreign engine, but the backend is native.",
            "Add --backend vllm or --backend sglang, or leave out what stands behind the --.",
        )
