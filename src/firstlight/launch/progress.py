"""Reading what the ranks report: tails `progress.jsonl` and works out rates and remaining times.

Called by the supervisor a few times a second. Invariant: a line is handed out once, and only when its end
has been written.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from firstlight.base.phases import PROGRESS_FILE, ProgressLine


class ProgressTail:
    """Follows the progress file of one run. Owns an open file until `close`."""

    def __init__(self, run_dir: Path) -> None:
        self._file = (run_dir / PROGRESS_FILE).open("ab+", buffering=0)
        self._file.seek(0)
        self._rest = b""

    def read(self) -> list[ProgressLine]:
        """The lines written since the last call. A line that cannot be decoded is left out."""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        return [line for line in map(_decoded, lines) if line is not None]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _decoded(line: bytes) -> ProgressLine | None:
    try:
        return msgspec.json.decode(line, type=ProgressLine)
    except msgspec.DecodeError:
        return None  # a rank that dies while it writes must not take the launcher with it


class Pace(msgspec.Struct, frozen=True):
    """How fast a phase advances, in its own unit. None: not known yet."""

    per_s: float | None
    remaining_s: float | None


class PhaseTrack(msgspec.Struct, frozen=True):
    """A phase of one rank from its first line to its last."""

    first: ProgressLine
    last: ProgressLine

    def followed_by(self, line: ProgressLine) -> PhaseTrack:
        """This track with a newer line of the same phase."""
        return PhaseTrack(self.first, line)

    @property
    def elapsed_s(self) -> float:
        """Seconds from the first line to the last."""
        return self.last.time_s - self.first.time_s

    @property
    def pace(self) -> Pace:
        """The average since the phase began."""
        gained = self.last.done - self.first.done
        if gained <= 0 or self.elapsed_s <= 0:
            return Pace(None, None)
        per_s = gained / self.elapsed_s
        left = self.last.total - self.last.done
        return Pace(per_s, left / per_s if left >= 0 and self.last.total else None)
