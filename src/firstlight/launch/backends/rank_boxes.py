"""Black boxes that the supervisor writes for processes that know nothing of them.

Invariant: the phases in such a box are those that the engine's own lines told, or that were seen from
outside.
"""

from __future__ import annotations

from pathlib import Path

from firstlight.base.blackbox.layout import Counter
from firstlight.base.blackbox.reader import NotABox, read_box
from firstlight.base.blackbox.store import box_path
from firstlight.base.blackbox.writer import BlackBox, create_box
from firstlight.base.phases import DRAIN, READY, SERVING, PhaseReporter
from firstlight.launch.processes.commands import API


class RankBoxes:
    """The boxes of one foreign engine, by name. They are written by one thread only."""

    def __init__(self, run_dir: Path, run_id: str, names: tuple[str, ...]) -> None:
        self._run_dir = run_dir
        self._run_id = run_id
        self._boxes: dict[str, BlackBox] = {}
        self._reporters: dict[str, PhaseReporter] = {}
        self._pids: dict[str, int] = {}
        self._seen = ""
        for name in names:
            self._open(name)

    def add(self, name: str, role: str) -> Path:
        """A process that was not expected has one too; its path."""
        path = box_path(self._run_dir, name)
        if name not in self._boxes:
            create_box(path, role=role, rank=None, run_id=self._run_id)
            self._open(name)
            self.report(name, "imports")
        return path

    def claim(self, name: str, pid: int) -> None:
        """Whose box it is."""
        if name in self._boxes and self._pids.get(name) != pid:
            self._pids[name] = pid
            self._boxes[name].claim(pid)

    @property
    def names(self) -> tuple[str, ...]:
        """All that there are."""
        return tuple(self._boxes)

    def report(
        self, name: str, phase: str, odometer: tuple[int, int, str] = (0, 0, ""), detail: str = ""
    ) -> None:
        """Where a process is."""
        done, total, unit = odometer
        self._reporters[name].report(phase, done, total, unit, detail)

    def follow_api(self) -> None:
        """While the relay serves, everyone does; what it has open and what came back is the engine's work."""
        try:
            box = read_box(box_path(self._run_dir, API), with_events=False)
        except NotABox:
            return
        phase = box.phase
        if phase is None or phase.name not in (READY, SERVING, DRAIN):
            return
        for name, one in self._boxes.items():
            one.set(Counter.RUNNING, box.running)
            if phase.name != READY:
                one.set(Counter.STEP, phase.odometer.done if phase.name == SERVING else 0)
                if phase.name != self._seen:
                    self._reporters[name].report(phase.name)
        self._seen = phase.name

    def close(self) -> None:
        """Unmap them; the files stay."""
        for box in self._boxes.values():
            box.close()

    def _open(self, name: str) -> None:
        self._boxes[name] = BlackBox(box_path(self._run_dir, name))
        self._reporters[name] = PhaseReporter(self._boxes[name])
