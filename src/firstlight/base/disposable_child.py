"""A disposable child: reading that may stop in the kernel for good is done in it, and it can be lost.

It forks, so the work starts at once and needs no arguments. Invariant: a child that does not end is never
waited for, and holds nothing of ours: no socket, and no pipe that somebody else reads to its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

from firstlight.base import errors
from firstlight.base.storage import mount_of, mounts_of, silent_storage, waited_for, waits_of

_LOOK_S = 0.25
_LOCAL_S = 30.0  # a disk of this machine may have to spin up
_FRESH_S = 1.0  # a wait that is younger is not told

_SMALL_FILE_S = 10.0
_BURY_S = 0.5

OnWait = Callable[[str, float], None]


def require_answer(*paths: str | Path) -> None:
    """Before a file that a person names is read by a process that must not hang: whether its storage answers.

    A child reads it first, if somebody else than this machine's kernel serves it. Whether it is there, and
    may be read, is for the reader to say. Raises `ResourceError` when nothing comes.
    """
    for path in map(os.path.expanduser, paths):
        found = mount_of(path, mounts_of())
        if found is not None and found[1].is_remote:
            run_apart(partial(_touch, path), _SMALL_FILE_S)


def _touch(path: str) -> str:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.read()
    return ""


def run_apart(
    work: Callable[[], str], deadline_s: float, on_wait: OnWait = lambda path, seconds: None
) -> str:
    """The text that `work` returns, from a fork of this process; what it says on stderr comes out of ours.

    `on_wait` hears what the child has waited for in the kernel, and for how many seconds. Raises the
    `FirstlightError` that `work` raises, and `ResourceError` when one wait has lasted for `deadline_s`.
    """
    parent_pid = os.getpid()
    (answer, answer_end), (said, said_end) = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # the child runs Python, but takes no lock of ours
        pid = os.fork()
    if pid == 0:
        _be_child(work, parent_pid, answer_end, said_end)
    os.close(answer_end)
    os.close(said_end)
    try:
        return _decoded(_followed(pid, answer, said, deadline_s, on_wait))
    finally:
        os.close(answer)
        os.close(said)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            _bury(pid)


def _bury(pid: int) -> None:
    """Take note of the end of a child that was killed, unless the kernel does not let it go."""
    until_s = time.monotonic() + _BURY_S
    while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < until_s:
        time.sleep(_BURY_S / 100)


def _be_child(work: Callable[[], str], parent_pid: int, answer: int, said: int) -> None:
    try:
        from firstlight.base.process import end_with_parent  # has imports that the first moments do without

        end_with_parent(parent_pid)
        os.dup2(said, 2)
        kept = os.dup2(answer, 3) if answer != 3 else 3
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="replace", closefd=False)
        outcome = {"result": work()}
    except errors.FirstlightError as error:
        outcome = {"kind": type(error).__name__, "message": str(error), "hint": error.hint}
    except KeyboardInterrupt:  # our parent has it too
        os._exit(1)
    except BaseException as error:  # noqa: BLE001 - told by the parent, as nobody hears us
        outcome = {"message": f"{type(error).__name__}: {error}"}
    with contextlib.suppress(OSError):
        sys.stderr.flush()
        os.write(kept, json.dumps(outcome).encode())
    os._exit(0)


def _followed(pid: int, answer: int, said: int, deadline_s: float, on_wait: OnWait) -> bytes:
    """All that the child answers."""
    data, watcher = b"", _Waits(pid, deadline_s, on_wait)
    sources = [answer, said]
    while answer in sources:
        for fd in select.select(sources, [], [], _LOOK_S)[0]:
            part = os.read(fd, 65536)
            if not part:
                sources.remove(fd)
            elif fd == answer:
                data += part
            else:
                with contextlib.suppress(OSError):
                    sys.stderr.write(part.decode("utf-8", "replace"))
                    sys.stderr.flush()
        watcher.look()
    return data


class _Waits:
    """For how long the child has been in one and the same wait."""

    def __init__(self, pid: int, deadline_s: float, on_wait: OnWait) -> None:
        self._pid, self._deadline_s, self._on_wait = pid, deadline_s, on_wait
        self._since_s: dict[object, float] = {}

    def look(self) -> None:
        """Raises `ResourceError` when one has lasted too long."""
        now_s = time.monotonic()
        waits = waits_of(self._pid)
        self._since_s = {wait: self._since_s.get(wait, now_s) for wait in waits}
        if not waits:
            return
        wait = min(waits, key=lambda one: self._since_s[one])
        seconds = now_s - self._since_s[wait]
        if seconds < _FRESH_S:
            return
        path = waited_for(self._pid, wait.tid)
        found = mount_of(path, mounts_of()) if path else None
        is_remote = found is not None and found[1].is_remote
        self._on_wait(path, seconds)
        if seconds >= (self._deadline_s if is_remote else max(self._deadline_s, _LOCAL_S)):
            raise silent_storage(path, seconds)


def _decoded(data: bytes) -> str:
    if not data:
        raise errors.EngineError(
            "the process that reads the model's files was ended.", "See `dmesg`, and start again."
        )
    outcome = json.loads(data)
    if "result" in outcome:
        return str(outcome["result"])
    kind = getattr(errors, outcome.get("kind", ""), errors.FirstlightError)
    raise kind(outcome["message"], outcome.get("hint", ""))
