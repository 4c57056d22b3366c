"""A tool run as a child that may hang: output, or word that its time was over.

Invariant: it returns by its deadline even when the child cannot be killed (a process in the driver's hands
does not die), and never raises for what the child did.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

_KILL_WAIT_S = 0.3


@dataclass(frozen=True)
class ChildResult:
    """`code` None: it was killed for want of time."""

    code: int | None
    output: str
    errors: str


def run_child(command: Sequence[str], deadline_s: float) -> ChildResult:
    """Run a tool. Raises `OSError` when it cannot be started."""
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_KILL_WAIT_S)
        return ChildResult(None, "", f"no answer within {deadline_s:g} s")
    return ChildResult(
        process.returncode, output.decode("utf-8", "replace"), errors.decode("utf-8", "replace")
    )
