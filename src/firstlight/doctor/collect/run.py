"""Running all collectors, each in a thread of its own and under a deadline, into one `Case`.

A collector that blocks is left behind in its daemon thread; what it had yielded by then counts. Invariant:
`examine` returns within the longest deadline of its collectors plus the interval between the looks, whatever
a collector does.
"""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Sequence

import firstlight
from firstlight.doctor.case.evidence import Case, Observation, number
from firstlight.doctor.case.target import HOST
from firstlight.doctor.case.values import Failed
from firstlight.doctor.collect.registry import COLLECTORS
from firstlight.doctor.collect.scene import Collector, Scene, failed

INTERVAL_S = 2.0
_GRACE_S = 0.2


def examine(
    scene: Scene,
    collectors: Sequence[Collector] = COLLECTORS,
    *,
    num_looks: int = 2,
    interval_s: float = INTERVAL_S,
) -> Case:
    """Look at everything once, and at what moves `num_looks` times, `interval_s` apart."""
    clock = _Clock()
    works = [_Work(collector, scene, clock, interval_s) for collector in collectors]
    for work in works:
        work.start(num_looks)
    for work in works:
        work.wait()
    observed = [item for work in works for item in work.results()]
    observed.sort(key=lambda item: item[0])  # stable: by look, then in the order of the collectors
    return Case(
        target=scene.target,
        evidence=number(observed),
        made_wall_s=clock.wall_s,
        made_by=f"firstlight {firstlight.__version__}",
        host={
            "kernel": platform.release(),
            "machine": platform.machine(),
            "python": platform.python_version(),
        },
    )


class _Clock:
    """Wall time that no adjustment of the clock moves while we look."""

    def __init__(self) -> None:
        self.wall_s = time.time()
        self._start_s = time.monotonic()

    def now_s(self) -> float:
        return self.wall_s + time.monotonic() - self._start_s


class _Work:
    """One collector at work. Results are appended by its thread and copied under a lock."""

    def __init__(self, collector: Collector, scene: Scene, clock: _Clock, interval_s: float) -> None:
        self._collector = collector
        self._scene = scene
        self._clock = clock
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._results: list[tuple[int, float, Observation]] = []
        self._is_closed = False
        self._is_done = threading.Event()
        self._look = 0

    def start(self, num_looks: int) -> None:
        looks = num_looks if self._collector.is_dynamic else 1
        self._until_s = (
            time.monotonic() + looks * self._collector.deadline_s + (looks - 1) * self._interval_s + _GRACE_S
        )
        name = f"doctor-{self._collector.name}"
        threading.Thread(target=self._run, args=(looks,), name=name, daemon=True).start()

    def wait(self) -> None:
        """Until it is done or its time is over; then nothing more is taken from it."""
        is_done = self._is_done.wait(max(0.0, self._until_s - time.monotonic()))
        with self._lock:
            self._is_closed = True
            if not is_done:
                reason = f"no answer within {self._collector.deadline_s:g} s"
                self._append(Failed(collector=self._collector.name, reason=reason, is_timeout=True))

    def results(self) -> list[tuple[int, float, Observation]]:
        return list(self._results)

    def _run(self, looks: int) -> None:
        for look in range(looks):
            if look:
                time.sleep(self._interval_s)
            self._look = look
            try:
                self._take()
            except Exception as error:  # noqa: BLE001 - a collector that fails is evidence itself
                with self._lock:
                    self._append(failed(self._collector.name, error))
        self._is_done.set()

    def _take(self) -> None:
        for item in self._collector.collect(self._scene):
            with self._lock:
                if self._is_closed:
                    return
                self._results.append((self._look, self._clock.now_s(), item))

    def _append(self, value: Failed) -> None:
        source = f"collector {self._collector.name}"
        item = Observation(subject=HOST, source=source, value=value)
        self._results.append((self._look, self._clock.now_s(), item))
