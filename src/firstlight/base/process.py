"""A child process that cannot outlive us: own session, output on a pipe, its end explained.

Linux only where it asks the kernel to end the child with its parent. Invariant: once `Child.poll` has
returned an `ExitCause`, nothing of the child's process group is left running.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

import msgspec

from firstlight.base.proc_stat import read_proc_stat

_PR_SET_PDEATHSIG = 1


class ExitCause(msgspec.Struct, frozen=True):
    """How a process ended: an exit code, or the number of the signal that ended it. Neither: not told."""

    code: int | None
    signal: int | None = None

    @classmethod
    def from_returncode(cls, returncode: int) -> ExitCause:
        """From the convention of `subprocess`: a negative number is a signal."""
        return cls(None, -returncode) if returncode < 0 else cls(returncode)

    def describe(self) -> str:
        """As the end of a sentence: "ended with exit code 3", "was ended by SIGKILL"."""
        if self.signal is None and self.code is None:
            return "has ended"
        if self.signal is None:
            return f"ended with exit code {self.code}"
        try:
            name = signal.Signals(self.signal).name
        except ValueError:
            name = f"signal {self.signal}"
        return f"was ended by {name}"


class Child:
    """One running child in its own session. `output_fd` is the reading end of its stdout and stderr.

    The caller reads `output_fd` (it does not block) and calls `close` when the child is gone.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._process = process
        self._output = process.stdout
        self.pid = process.pid
        self.output_fd = process.stdout.fileno()
        os.set_blocking(self.output_fd, False)

    def poll(self) -> ExitCause | None:
        """How it ended, or None while it runs. At its end, what it left in its group is killed."""
        if self._process.returncode is None and not self._has_ended():
            return None
        self.send(signal.SIGKILL)
        return ExitCause.from_returncode(self._process.wait())

    def _has_ended(self) -> bool:
        """Without being waited for: until then its number, which is its group's too, is nobody else's."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, options) is not None

    def send(self, signal_number: int) -> None:
        """Signal the child's whole process group; a group that is gone is no error."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal_number)

    def wait(self, deadline_s: float) -> None:
        """Wait for the end of a child that was killed, and no longer: the kernel may not let it go."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(deadline_s)

    def close(self) -> None:
        """Give back the pipe."""
        self._output.close()


def start_child(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    pass_fds: Sequence[int] = (),
    cores: frozenset[int] | None = None,
) -> Child:
    """Start `command` in its own session, bound to our life and, if given, to `cores`.

    Must be called from the main thread: the kernel ends the child with the *thread* that started it.
    """
    process = subprocess.Popen(
        list(command),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        start_new_session=True,
        pass_fds=tuple(pass_fds),
        preexec_fn=_preparation(os.getpid(), cores),
    )
    return Child(process)


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since the machine did; None if it has ended, or off Linux.

    Together with its number this names a process for good.
    """
    stat = read_proc_stat(pid)
    return None if stat is None or stat.state in "ZX" else stat.start_ticks


def _preparation(parent_pid: int, cores: frozenset[int] | None) -> Callable[[], None]:
    """What the child does between fork and exec. Loaded here, as a fork should import nothing."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None

    def prepare() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent_pid:  # the parent died before the kernel knew of our wish
                os._exit(1)
        if cores is not None:
            os.sched_setaffinity(0, cores)

    return prepare


def end_with_parent(parent_pid: int) -> None:
    """In a fork of ours: the kernel ends it when `parent_pid` ends. Linux only; elsewhere it does nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it died before the kernel knew of our wish
            os._exit(1)
