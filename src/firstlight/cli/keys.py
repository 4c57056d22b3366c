"""The keys that a server asks for: from flags, a config file, a file of keys, the environment.

Invariant: the same sources give the same keys in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from firstlight.base import environment
from firstlight.base.disposable_child import require_answer
from firstlight.base.errors import UsageError, why_unreadable


def gather_keys(given: Sequence[str], path: str | Path | None) -> tuple[str, ...]:
    """Each key once: those `given`, those in the file `path`, those of the environment.

    A blank key is refused: it comes of a variable that is not set, and would leave the server open to all.
    """
    if any(not key.strip() for key in given):
        raise UsageError(
            "an API key is empty, which would leave the server open to everyone.",
            "Give the key itself (is the variable set that it comes from?), or leave the option out.",
        )
    return tuple(dict.fromkeys([*given, *_keys_in(path), *environment.api_keys()]))


def listed_keys(value: object, origin: str) -> list[str]:
    """What stands under `api-key` in the config file `origin`."""
    keys = [value] if isinstance(value, str) else value
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise UsageError(f"api-key in {origin} must be text or a list of texts.", 'Write api-key = "KEY".')
    return keys


def _keys_in(path: str | Path | None) -> list[str]:
    if path is None:
        return []
    require_answer(path)
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read the API keys in {path}: {why_unreadable(error)}",
            "Give a text file with one key a line.",
        ) from error
    keys = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    if not keys:
        raise UsageError(f"{path} holds no API key.", "Write one key a line.")
    return keys
