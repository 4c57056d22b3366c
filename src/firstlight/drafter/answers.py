"""The target's answers as they lie in a shard: exact token ids, one JSON line each.

Written by `generate`, read by `capture` and the gates. Invariant: the ids are those that the engine
saw and made.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from firstlight.base.errors import ModelFileError
from firstlight.drafter.stages import require_recorded


class Answer(msgspec.Struct, kw_only=True):
    """One answered prompt. `cut_tokens`: what was taken off its end because it only repeated."""

    id: str
    family: str
    split: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: str
    cut_tokens: int = 0

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer."""
        return self.prompt_token_ids + self.token_ids


def read_answers(folder: Path, name: str) -> list[Answer]:
    """The answers of one shard. Raises `ModelFileError` for one that is missing, cut or changed."""
    path = folder / name
    require_recorded(path)
    decode = msgspec.json.Decoder(Answer).decode
    try:
        return [decode(row) for row in path.read_bytes().splitlines()]
    except (OSError, msgspec.DecodeError) as error:
        raise ModelFileError(
            f"{path} cannot be read: {error}.", "Remove it and run the stage generate again."
        ) from error
