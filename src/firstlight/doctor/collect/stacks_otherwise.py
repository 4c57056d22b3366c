"""Stacks where py-spy is refused: from the run's supervisor, else written by the process itself on a signal.

Invariant: a signal goes to a process of ours whose handler for it is known and installed, that runs, and that
was not replaced by another in between.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from firstlight.base.allow_ptrace import STACKS_SIGNAL, stacks_path
from firstlight.doctor.case.evidence import Observation
from firstlight.doctor.case.target import Engine, Role, TargetProcess
from firstlight.doctor.case.values import Failed
from firstlight.doctor.case.values_process import Frame, PythonStacks, StackThread
from firstlight.doctor.collect.process_state import read_state
from firstlight.doctor.collect.scene import Scene, failed
from firstlight.doctor.servers.supervisor_socket import STACKS, ask_supervisor

_SUPERVISOR_S = 6.0
_WRITTEN_S = 1.0
_PAUSE_S = 0.02
_MAX_BYTES = 256 * 1024
_WITH_HANDLER = (Role.RANK, Role.API)  # those that call `allow_examination`
_THREAD = re.compile(r"^(Current thread|Thread) 0x([0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


def otherwise(scene: Scene, refused: Sequence[tuple[TargetProcess, Failed]]) -> list[Observation]:
    """For each process that py-spy could not look at: its stacks, or all reasons why there are none."""
    told, why = _from_supervisor(scene)
    found = []
    for process, failure in refused:
        value = told.get(process.key)
        source = "py-spy, taken by the run's supervisor"
        if not isinstance(value, PythonStacks):
            reasons = [failure.reason, value.reason if isinstance(value, Failed) else why]
            source = "faulthandler, on a signal that the process handles"
            value = _from_signal(scene, process, [reason for reason in reasons if reason])
        found.append(Observation(subject=process.key, source=source, value=value))
    return found


def _from_supervisor(scene: Scene) -> tuple[dict[str, PythonStacks | Failed], str]:
    if scene.target.run_dir is None:
        return {}, ""
    try:
        return dict(ask_supervisor(scene.target.run_dir, STACKS, _SUPERVISOR_S).stacks), ""
    except OSError as error:
        return {}, f"the supervisor did not help: {failed('stacks', error).reason}"


def _from_signal(scene: Scene, process: TargetProcess, reasons: list[str]) -> PythonStacks | Failed:
    """By `faulthandler`, which the process registered at its start to write into its run directory."""
    path = _written_to(scene, process)
    state = read_state(scene.procfs, process)
    if path is None or STACKS_SIGNAL not in (state.caught_signals or ()):
        return _none(reasons, "it has no handler of ours")
    if state.is_stopped:
        return _none(reasons, "a stopped process handles no signal")
    try:
        before = path.stat().st_size
        fd = os.pidfd_open(process.pid)
        try:
            if not scene.procfs.is_same(process.pid, process.start_ticks):
                return _none(reasons, "the process has ended")
            signal.pidfd_send_signal(fd, STACKS_SIGNAL)
        finally:
            os.close(fd)
        threads = parse_faults(_read_back(path, before))
    except (OSError, AttributeError) as error:
        return _none(reasons, failed("stacks", error).reason)
    return (
        PythonStacks(threads=threads, tool="faulthandler")
        if threads
        else _none(reasons, f"it wrote no stacks within {_WRITTEN_S:g} s of the signal")
    )


def _written_to(scene: Scene, process: TargetProcess) -> Path | None:
    """Where a process of ours writes its stacks; None for all others."""
    target = scene.target
    if target.engine is not Engine.NATIVE or target.run_dir is None or process.uid != os.geteuid():
        return None
    path = stacks_path(Path(target.run_dir), process.key)
    try:
        status = path.lstat()
    except OSError:
        return None
    is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    return path if is_ours and process.role in _WITH_HANDLER else None


def _read_back(path: Path, start: int) -> str:
    """What was written from `start` on, once it has stopped growing."""
    until_s = time.monotonic() + _WRITTEN_S
    size = start
    while time.monotonic() < until_s:
        time.sleep(_PAUSE_S)
        now = path.stat().st_size
        if now > start and now == size:
            break
        size = now
    with path.open("rb") as file:
        return os.pread(file.fileno(), _MAX_BYTES, start).decode("utf-8", "replace")


def parse_faults(text: str) -> tuple[StackThread, ...]:
    """`faulthandler`'s threads, the main one first: it lists the oldest last."""
    threads: list[StackThread] = []
    frames: list[Frame] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            frames = []
            is_current = head[1].startswith("Current")
            threads.append(
                StackThread(tid=0, name=head[3] or "", is_active=is_current, owns_gil=False, frames=())
            )
        elif threads and (frame := _FRAME.match(line)):
            frames.append(Frame(function=frame[3], file=_short(frame[1]), line=int(frame[2])))
            threads[-1] = StackThread(
                tid=0,
                name=threads[-1].name,
                is_active=threads[-1].is_active,
                owns_gil=False,
                frames=tuple(frames),
            )
    return tuple(reversed(threads))


def _short(path: str) -> str:
    """As py-spy shortens it: from the package on."""
    for mark in ("/site-packages/", "/dist-packages/", "/src/"):
        if mark in path:
            return path.rpartition(mark)[2]
    return re.sub(r"^.*/lib/python3\.\d+/", "", path)


def _none(reasons: list[str], last: str) -> Failed:
    return Failed(collector="stacks", reason="; ".join((*reasons, last))[:500], is_refused=True)
