"""Ending a run from outside: its supervisor is asked, and at the very end killed if that is wanted.

Invariant: a signal goes only to the process that the run's own record names by pid and start time, right
after both were compared; what a killed supervisor leaves is its janitor's to end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from firstlight.base.config import ServerSection
from firstlight.base.errors import EngineError, UsageError
from firstlight.launch.control import DRAIN_MARGIN_S, LEAVE_S
from firstlight.launch.janitor import members
from firstlight.launch.runs.run_record import RunRecord
from firstlight.launch.runs.runs import config_of

_MARGIN_S = 5.0  # for the last words, and a machine that is busy
_AGAIN_S = 0.3  # two signals at once may be seen as one
_PAUSE_S = 0.02


def stop_run(run_dir: Path, record: RunRecord, *, now: bool = False) -> None:
    """Ask the supervisor to end, and wait for it; `now`: nothing finishes, and who does not leave is killed.

    Raises `EngineError` when it has not ended in the time that it may take, and `UsageError` when it runs
    where its pid means nothing to us.
    """
    if not record.is_running():
        raise UsageError(
            f"the supervisor of {run_dir} runs in another container: its pid {record.pid} is not known here.",
            "Stop it there.",
        )
    config = config_of(run_dir)
    drain_s = config.server.drain_s if config else ServerSection().drain_s
    _send(record, signal.SIGTERM)
    if not now:
        deadline_s = drain_s + DRAIN_MARGIN_S + LEAVE_S + _MARGIN_S
        if not _wait(lambda: not record.is_running(), deadline_s):
            raise EngineError(
                f"the supervisor {record.pid} has not ended within {deadline_s:.0f} s.",
                f"`firstlight stop --now {run_dir}` kills it and all that belongs to it.",
            )
        return
    if _wait(lambda: not record.is_running(), _AGAIN_S):
        return
    _send(record, signal.SIGTERM)  # asked twice it kills its children, lets nothing finish, and leaves
    if not _wait(lambda: not record.is_running(), LEAVE_S):
        _kill(run_dir, record)


def _kill(run_dir: Path, record: RunRecord) -> None:
    _send(record, signal.SIGKILL)
    if not _wait(lambda: not record.is_running() and not members(run_dir.name, {}), LEAVE_S):
        left = sorted(members(run_dir.name, {}))
        raise EngineError(
            f"processes {left} of {run_dir} are left.", "Look with `firstlight doctor` what holds them."
        )


def _send(record: RunRecord, number: int) -> None:
    if record.is_running():
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, number)


def _wait(is_over: Callable[[], bool], for_s: float) -> bool:
    deadline_s = time.monotonic() + for_s
    while not is_over():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_PAUSE_S)
    return True
