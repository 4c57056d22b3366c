"""Typed reading of untrusted fields: config.json, generation_config.json and GGUF metadata.

Invariant: a value that leaves a getter has the promised type and lies in the promised range, or a
`ModelFileError` named the field and the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from firstlight.base.errors import ModelFileError, why_unreadable
from firstlight.facts.checkpoint.remedies import CHECK_CONFIG, CHECK_FILE

MAX_JSON_BYTES = 64 * 1024 * 1024
MAX_SIZE = 1 << 24  # of any one dimension of a model; keeps a hostile file from asking for absurd allocations
MAX_LAYERS = 4096


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a small file; a `ModelFileError` names the file and what is wrong with it."""
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_JSON_BYTES:
            raise ModelFileError(
                f"{path} has {size_bytes} bytes, more than a configuration can have.", CHECK_FILE
            )
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{path} cannot be read: {why_unreadable(error)}", CHECK_FILE) from error
    if text.startswith("version https://git-lfs"):
        raise lfs_pointer(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(
            f"{path} is not valid JSON: {error}", "Download the file again; it may be incomplete."
        ) from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} must hold a JSON object, not a {type(value).__name__}.", CHECK_FILE)
    return value


def lfs_pointer(path: Path) -> ModelFileError:
    """The error for a file that git-lfs left as a pointer."""
    return ModelFileError(
        f"{path} is a Git LFS pointer, not the file itself.", "Run `git lfs pull` in that folder."
    )


class Fields:
    """A mapping with getters that check. `where` is the file that errors name, `remedy` what they advise.

    A getter with no default requires the field. An explicit null counts as absent, as in Hugging Face
    configs.
    """

    def __init__(self, values: Mapping[str, Any], where: str, remedy: str = CHECK_CONFIG) -> None:
        self.values = values
        self.where, self.remedy = where, remedy

    def error(self, name: str, expected: str) -> ModelFileError:
        """The error about a field that is missing or not as expected."""
        value = self.values.get(name)
        if value is None:
            return ModelFileError(f"{self.where}: the field {name} is missing.", self.remedy)
        return ModelFileError(
            f"{self.where}: the field {name} must be {expected}, not {str(value)[:80]!r}.", self.remedy
        )

    def _optional(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise self.error(name, "present")
            return default
        return value

    def integer(
        self, name: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_SIZE
    ) -> int:
        """A whole number in a range; a float counts where it is whole."""
        value = self._optional(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.error(name, f"an integer from {minimum} to {maximum}")
        return value

    def number(self, name: str, default: float | None = None, *, above: float = 0.0) -> float:
        """A finite number above a bound."""
        value = self._optional(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= above:
            raise self.error(name, f"a number above {above:g}")
        return float(value)

    def boolean(self, name: str, default: bool | None = None) -> bool:
        """True or false, and nothing that merely looks so."""
        value = self._optional(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def string(self, name: str, default: str | None = None) -> str:
        """A text."""
        value = self._optional(name, default)
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An object, or an empty one when the field is absent."""
        value = self._optional(name, {})
        if not isinstance(value, Mapping):
            raise self.error(name, "an object")
        return value

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """A token id or a list of them; empty when absent. Ids outside the vocabulary are errors."""
        value = self.values.get(name)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not -1 <= token < vocab_size:
                raise self.error(name, f"a token id below {vocab_size}")
        return tuple(token for token in ids if token >= 0)  # -1 says "none" in some configs
