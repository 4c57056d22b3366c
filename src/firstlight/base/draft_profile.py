"""What `--draft-acceptance` says: the share of drafts to accept, by their place.

Read when the settings are resolved, and by the engine, which acts on it. Invariant: a share is a probability.
"""

from __future__ import annotations

from firstlight.base.errors import UsageError


def parse_profile(text: str) -> tuple[float, ...]:
    """The shares of "0.8,0.6,0.5". Raises a `UsageError` for anything else."""
    hint = "Give shares from 0 to 1, for the first draft on: 0.8,0.6,0.5."
    try:
        profile = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"--draft-acceptance {text!r} is no list of numbers.", hint) from error
    if not all(0.0 <= share <= 1.0 for share in profile):
        raise UsageError(f"--draft-acceptance {text!r} has a share outside 0 to 1.", hint)
    return profile
