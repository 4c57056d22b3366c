"""Where the model that a command names lies on this machine; says so when it must be fetched first.

Invariant: standard output is left to results.
"""

from __future__ import annotations

import sys
from pathlib import Path


def say(text: str) -> None:
    """A line of what goes on, to standard error."""
    print(text, file=sys.stderr, flush=True)


def locate(model: str | None) -> Path:
    """A local path for the model that was asked for; None is the embedded default."""
    from firstlight.facts.sources import resolve_model

    return resolve_model(model, notify=say)
