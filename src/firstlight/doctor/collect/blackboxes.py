"""The black boxes of a native run, also those of processes that are dead.

Invariant: the subject of a box is the key of its process, and the name of the box ("rank-3") for one that was
already gone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from firstlight.base.blackbox.reader import Box, NotABox, read_box
from firstlight.base.blackbox.store import boxes_of
from firstlight.doctor.case.evidence import Observation
from firstlight.doctor.case.values_process import BlackBoxSeen
from firstlight.doctor.collect.scene import Collector, Scene, failed

MAX_EVENTS = 64
MAX_PHASES = 128


def collect_boxes(scene: Scene) -> Iterator[Observation]:
    """Every box of the run."""
    if scene.target.run_dir is None:
        return
    for name, path in boxes_of(Path(scene.target.run_dir)).items():
        try:
            box = read_box(path)
        except NotABox as error:
            yield Observation(subject=name, source=str(path), value=failed("blackbox", error))
            continue
        yield Observation(subject=_subject(scene, box, name), source=str(path), value=_seen(scene, path, box))


def _subject(scene: Scene, box: Box, name: str) -> str:
    for process in scene.target.processes:
        if process.pid == box.pid and process.start_ticks == box.start_ticks:
            return process.key
    return name


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
