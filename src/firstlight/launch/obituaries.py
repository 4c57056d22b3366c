"""What is written down of each child that has ended, at once and for whoever asks later.

Used by `children`. Invariant: a disk that is full does not keep the supervisor from its work.
"""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path

from firstlight.base.exit_notes import ExitNote, write_exit_note
from firstlight.base.process import ExitCause
from firstlight.launch.oom import Judgement, OomWatch


class Obituaries:
    """Of the children of one run; made before the first of them starts."""

    def __init__(self, run_dir: str, oom: OomWatch | None = None) -> None:
        self._run_dir = Path(run_dir)
        self._oom = oom or OomWatch()
        self._told: dict[str, int] = {}

    def told(self, name: str, number: int) -> None:
        """We have sent this signal."""
        self._told[name] = number

    def write(self, name: str, pid: int, cause: ExitCause) -> bool | None:
        """Write down the end of a child; whether it was for want of memory, None if that is not known."""
        is_killed = cause.signal == signal.SIGKILL
        was_ours = is_killed and self._told.get(name) == signal.SIGKILL
        judgement = Judgement(False, "we killed it") if was_ours else self._oom.judge(cause, pid)
        note = ExitNote(
            name=name,
            pid=pid,
            code=cause.code,
            signal=cause.signal,
            told=name in self._told and (was_ours or not is_killed),  # asked to leave, and killed by another
            time_s=time.time(),
            is_oom=judgement.is_oom,
            oom_evidence=judgement.evidence,
        )
        with contextlib.suppress(OSError):
            write_exit_note(self._run_dir, note)
        return judgement.is_oom
