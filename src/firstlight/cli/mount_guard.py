"""A parent that touches nothing, for commands that look at files and processes which may not answer.

It runs before anything is imported, with the standard library only until something hangs. The command runs in
a fork; this process passes on signals, output and exit code. Invariant: it ends at its deadline whatever the
kernel does with the command, which is then left to the kernel.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import stat
import sys
import time
from collections.abc import Callable

# Whose main thread alone decides: the doctor looks with threads that it can lose.
_BY_MAIN_THREAD = ("doctor",)
GUARDED = (*_BY_MAIN_THREAD, "ps", "stop", "blackbox", "plan", "run")
_DEADLINE_S = 20.0  # of one wait in the kernel
_LOOK_S = 0.5
_TURN_S = 0.1
_LEAVE_S = 2.0  # from its last word, or from a signal that was passed on, to leaving without it
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SI_KERNEL = 0x80  # the terminal's: the command has it too


def run_guarded(command: str, run: Callable[[], None]) -> None:
    """Run a command in a fork of this process and end with its exit code; `run` ends by `SystemExit`."""
    parent_pid = os.getpid()
    status, status_end = os.pipe()
    pumps = {number: os.pipe() for number in (1, 2) if _is_pipe(number)}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    pid = os.fork()
    if pid == 0:
        for number, (source, end) in pumps.items():
            os.dup2(end, number)
            os.close(source)
            os.close(end)
        os.close(status)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _be_command(run, parent_pid, status_end)
    os.close(status_end)
    for _, end in pumps.values():
        os.close(end)
    _Guard(pid, command, status, {source: number for number, (source, _) in pumps.items()}).follow()


def _is_pipe(number: int) -> bool:
    mode = os.fstat(number).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _be_command(run: Callable[[], None], parent_pid: int, status: int) -> None:
    """Raises `SystemExit`, having said its code to who waits for it."""
    from firstlight.base.process import end_with_parent

    end_with_parent(parent_pid)
    code = 0
    try:
        run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        os.write(status, str(code).encode())
    sys.exit(code)


class _Guard:
    """Follows a command to its end, or to the end of patience."""

    def __init__(self, pid: int, command: str, status: int, pumps: dict[int, int]) -> None:
        self._pid, self._command, self._status, self._pumps = pid, command, status, pumps
        self._code: int | None = None
        self._leave_at_s = float("inf")
        self._looked_s = 0.0
        self._since_s: dict[object, float] = {}

    def follow(self) -> None:
        """Never returns."""
        sources = [self._status, *self._pumps]
        while True:
            for fd in select.select(sources, [], [], _TURN_S)[0]:
                if not self._take(fd):
                    sources.remove(fd)
            now_s = time.monotonic()
            ended, how = os.waitpid(self._pid, os.WNOHANG)
            if ended:
                self._drain(sources)
                self._end(how)
            self._pass_on_signals(now_s)
            if now_s >= self._leave_at_s:
                self._drain(sources)
                self._leave(0 if self._code is None else self._code)
            if self._code is None and now_s - self._looked_s >= _LOOK_S:
                self._look(now_s)

    def _take(self, fd: int) -> bool:
        """What a pipe has; False when it has come to its end."""
        data = os.read(fd, 65536)
        if fd == self._status:
            if data:
                self._code = int(data)
                self._leave_at_s = time.monotonic() + _LEAVE_S
            return bool(data)
        try:
            while data:
                written = os.write(self._pumps[fd], data)
                data = data[written:]
                if not data:
                    return True
        except OSError:  # the reader of our output has gone: so has the command's
            os.close(fd)
        return False

    def _drain(self, sources: list[int]) -> None:
        while ready := select.select([fd for fd in sources if fd != self._status], [], [], 0)[0]:
            for fd in ready:
                if not self._take(fd):
                    sources.remove(fd)

    def _pass_on_signals(self, now_s: float) -> None:
        while (info := signal.sigtimedwait(_SIGNALS, 0)) is not None:
            if info.si_code != _SI_KERNEL:
                os.kill(self._pid, info.si_signo)
            waits = self._waits()
            if waits and self._leave_at_s > now_s + _LEAVE_S:
                self._code = 128 + info.si_signo
                self._leave_at_s = now_s + _LEAVE_S

    def _waits(self) -> list[object]:
        from firstlight.base.storage import waits_of

        waits = waits_of(self._pid)
        is_main = self._command in _BY_MAIN_THREAD
        return [wait for wait in waits if not is_main or wait.tid == self._pid]

    def _look(self, now_s: float) -> None:
        """Whether it has been in one and the same wait for too long."""
        self._looked_s = now_s
        self._since_s = {wait: self._since_s.get(wait, now_s) for wait in self._waits()}
        since_s, wait = min(
            ((at, one) for one, at in self._since_s.items()), default=(now_s, None), key=_first
        )
        if wait is None or now_s - since_s < _DEADLINE_S:
            return
        from firstlight.base.storage import silent_storage, waited_for

        error = silent_storage(waited_for(self._pid, wait.tid), now_s - since_s)  # type: ignore[attr-defined]
        with contextlib.suppress(OSError):
            print(f"error: {error.explain()}", file=sys.stderr, flush=True)
        self._leave(error.exit_code)

    def _leave(self, code: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os._exit(code)

    def _end(self, how: int) -> None:
        """As the command ended."""
        if os.WIFSIGNALED(how) and self._code is None:
            number = os.WTERMSIG(how)
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
            os.kill(os.getpid(), number)
        os._exit(os.waitstatus_to_exitcode(how) if os.WIFEXITED(how) else self._code or 1)


def _first(pair: tuple[float, object]) -> float:
    return pair[0]
