"""What a process of ours does at its start so that a hang in it can be looked at without root.

Called first thing by ranks and by the api process. Invariant: it never fails; where the kernel refuses,
later looks see less and say so.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
from pathlib import Path

STACKS_SIGNAL = signal.SIGUSR1
_PR_SET_PTRACER = 0x59616D61


def stacks_path(run_dir: Path, name: str) -> Path:
    """Where the process `name` writes its Python stacks when it gets `STACKS_SIGNAL`."""
    return run_dir / "logs" / f"{name}.stacks"


def allow_examination(run_dir: Path, name: str) -> None:
    """Let the supervisor and its children read our stacks, where Yama allows only ancestors; and let a
    signal write them, for where nobody may read them at all."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, os.getppid(), 0, 0, 0)
    path = stacks_path(run_dir, name)
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        # Kept open for the whole life of the process: the handler must not open anything.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.register(STACKS_SIGNAL, file, all_threads=True)
