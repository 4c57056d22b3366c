"""The black boxes of a native run, also those of processes that are dead.

Called by `run` in both looks; costs the writers nothing. Invariant: the subject of a box is the key of its
process, and "rank-N" or its role for a process that was already gone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from firstlight.base.blackbox.layout import FILE_BYTES
from firstlight.base.blackbox.reader import Box, NotABox, read_box
from firstlight.doctor.collect.scene import Collector, Scene, failed
from firstlight.doctor.evidence import Observation
from firstlight.doctor.values_process import BlackBoxSeen

MAX_EVENTS = 64
MAX_PHASES = 128


def collect_boxes(scene: Scene) -> Iterator[Observation]:
    """Every box below the run directory."""
    if scene.target.run_dir is None:
        return
    for path in find_boxes(Path(scene.target.run_dir)):
        try:
            box = read_box(path)
        except NotABox as error:
            yield Observation(subject="run", source=str(path), value=failed("blackbox", error))
            continue
        yield Observation(subject=_subject(scene, box), source=str(path), value=_seen(scene, path, box))


def find_boxes(folder: Path) -> list[Path]:
    """The files below a run directory that have the size of a box."""
    found = []
    for path in sorted((*folder.glob("*"), *folder.glob("*/*"))):
        with contextlib.suppress(OSError):
            if path.is_file() and path.stat().st_size == FILE_BYTES:
                found.append(path)
    return found


def _subject(scene: Scene, box: Box) -> str:
    for process in scene.target.processes:
        if process.pid == box.pid and process.start_ticks == box.start_ticks:
            return process.key
    return f"rank-{box.rank}" if box.rank is not None else box.role


def _seen(scene: Scene, path: Path, box: Box) -> BlackBoxSeen:
    times = [event.time_s for event in box.events] + [phase.start_s for phase in box.phases]
    events = tuple(sorted(box.events, key=lambda event: event.time_s)[-MAX_EVENTS:])
    return BlackBoxSeen(
        path=str(path),
        box=msgspec.structs.replace(box, events=events, phases=box.phases[-MAX_PHASES:]),
        is_alive=bool(box.pid) and scene.procfs.is_same(box.pid, box.start_ticks),
        age_s=max(0.0, time.monotonic() - max(times)) if times else None,
    )


BOXES = Collector("blackbox", collect_boxes)
