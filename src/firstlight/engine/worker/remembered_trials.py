"""What a drafter's trial found, kept in the cache folder, so that only the first start of a pair pays for it.

Only acceptance is kept, which follows from weights and settings; times are measured at every start.
Invariant: what is recalled was found for these very weights and settings; a file that is broken or belongs to
others is left aside, with a line that says so, and no trouble with a file ends a start.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from firstlight.base.config import EngineSection
from firstlight.base.environment import cache_place
from firstlight.base.errors import FirstlightError
from firstlight.base.files import replacing, sha256_of
from firstlight.facts.checkpoint.checkpoint import Checkpoint
from firstlight.models.eagle3_file import CONFIG
from firstlight.ops.cpu.build import library_name

FOLDER = "trials"
FORMAT = 2  # of the files, and of the way in which a trial is made
MOST_KEPT = 64  # files; of more, those that were not written lately go
HASHED_BYTES = 64 * 1024 * 1024  # a larger file is known by its size and the time of its last change
_WEIGHTS = (".safetensors", ".gguf", CONFIG)


class Tried(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Counts of the answers of a trial; lists are by the draft's place, as in `DraftCounts`."""

    num_prompts: int
    num_tokens: int
    num_verified: int
    drafted: list[int]
    reached: list[int]
    accepted: list[int]
    num_drafted: int  # altogether

    def fits(self, most: int) -> bool:
        """Whether such counts can come of steps with `most` drafts."""
        places = (self.drafted, self.reached, self.accepted)
        ordered = zip(self.accepted, self.reached, self.drafted, strict=False)
        return all(len(place) == most for place in places) and all(
            0 <= accepted <= reached <= drafted <= self.num_verified for accepted, reached, drafted in ordered
        )


class Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the folder."""

    key: str
    date: str
    tried: Tried


class TrialMemory:
    """What is kept for `key`, which names weights and settings. `notes`: what went wrong with files."""

    def __init__(self, key: str, folder: Path) -> None:
        self._key = hashlib.sha256(key.encode()).hexdigest()
        self.path = folder / f"{self._key[:32]}.json"
        self.notes: list[str] = []

    @classmethod
    def of(
        cls, target: Checkpoint, section: EngineSection, report: Mapping[str, Any], trial: tuple[int, ...]
    ) -> TrialMemory:
        """Of an engine. `report`: of its start; `trial`: the sizes of the trial."""
        drafter = Path(os.path.expanduser(section.drafter or ""))
        files = [drafter] if drafter.is_file() else sorted(drafter.glob("*"))
        computes = [library_name(), *(report[name] for name in ("backend", "kv_dtypes"))]
        key = {
            "format": FORMAT,
            "target": _identity(Path(tensor.path) for tensor in target.tensors.values()),
            "drafter": _identity(file for file in files if file.name.endswith(_WEIGHTS)),
            "computes": [*computes, section.tensor_parallel],
            "drafts": [section.draft_tokens, section.draft_verification, section.draft_acceptance],
            "trial": list(trial),
        }
        return cls(msgspec.json.encode(key).decode(), cache_place(FOLDER))

    def recall(self, most: int) -> Kept | None:
        """What was kept of steps with `most` drafts."""
        if not self.path.is_file():
            return None
        try:
            kept = msgspec.json.decode(self.path.read_bytes(), type=Kept)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            self.notes.append(f"{self.path} is left aside: it cannot be read ({error})")
            return None
        if kept.key != self._key or not kept.tried.fits(most):
            self.notes.append(f"{self.path} is left aside: it is not of these weights and settings")
            return None
        return kept

    def keep(self, tried: Tried) -> None:
        """For the next start."""
        date = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M")
        try:
            with replacing(self.path) as file:
                file.write(msgspec.json.encode(Kept(self._key, date, tried)))
        except FirstlightError as error:
            self.notes.append(f"the trial is not remembered: {error}")
            return
        _forget_oldest(self.path.parent)


def _identity(paths: Iterable[Path]) -> list[list[str | int]]:
    """Of files: their content where it is quickly read, otherwise size and time of the last change."""
    known: list[list[str | int]] = []
    for path in sorted(set(paths)):
        stat = path.stat()
        small = stat.st_size <= HASHED_BYTES
        known.append([sha256_of(path)] if small else [str(path.resolve()), stat.st_size, stat.st_mtime_ns])
    return known


def _forget_oldest(folder: Path) -> None:
    with suppress(OSError):  # another start may do the same
        newest_first = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in newest_first[MOST_KEPT:]:
            path.unlink()
