"""Time without progress, per process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from firstlight.base.blackbox.layout import Counter
from firstlight.base.blackbox.reader import read_box
from firstlight.base.blackbox.store import open_own_box
from firstlight.launch.timeline.progress_watch import (
    Mark,
    Pulses,
    has_work,
    is_serving,
    longest_step_s,
    read_mark,
)


def test_time_passes_while_nothing_moves() -> None:
    pulses = Pulses()
    pulses.look({"rank-0": Mark(done=1), "rank-1": Mark(done=1)}, 10.0)
    pulses.look({"rank-0": Mark(done=2), "rank-1": Mark(done=1)}, 12.0)
    assert pulses.quiet_s(15.0) == {"rank-0": 3.0, "rank-1": 5.0}
    pulses.rest(["rank-1"], 15.0)
    assert pulses.quiet_s(16.0)["rank-1"] == 1.0


@pytest.mark.parametrize("mark", [Mark(phase=2), Mark(steps=1), Mark(read_bytes=4096), Mark(major_faults=1)])
def test_every_kind_of_progress_counts(mark: Mark) -> None:
    pulses = Pulses()
    pulses.look({"rank-0": Mark()}, 0.0)
    pulses.look({"rank-0": mark}, 9.0)
    assert pulses.quiet_s(9.0) == {"rank-0": 0.0}


def test_stopped_takes_two_looks() -> None:
    pulses = Pulses()
    pulses.look({"rank-0": Mark(is_stopped=True)}, 0.0)
    assert pulses.stopped() == []
    pulses.look({"rank-0": Mark(is_stopped=True)}, 0.5)
    assert pulses.stopped() == ["rank-0"]
    pulses.look({"rank-0": Mark()}, 1.0)
    assert pulses.stopped() == []


def test_the_mark_of_a_real_process(tmp_path: Path) -> None:
    box = open_own_box(tmp_path, "rank-0", role="rank", rank=0)
    box.enter_phase("weights", 10, "bytes")
    box.advance(4)
    box.set(Counter.STEP, 3)
    seen = read_box(tmp_path / "boxes" / "rank-0.box")
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        mark = read_mark(seen, process.pid)
        assert (mark.phase, mark.done, mark.steps, mark.is_stopped) == (1, 4, 3, False)
        os.kill(process.pid, signal.SIGSTOP)
        deadline_s = time.monotonic() + 5
        while not read_mark(seen, process.pid).is_stopped:
            assert time.monotonic() < deadline_s
    finally:
        process.kill()
        process.wait()
    assert read_mark(seen, process.pid).done == 4  # gone: what its box says


def test_what_is_expected_of_a_step(tmp_path: Path) -> None:
    box = open_own_box(tmp_path, "rank-0", role="rank", rank=0)
    ring, step = box.ring("steps"), box.name("step")
    ring.write(step, 1, 1, 100, 500_000)  # 5 ms a token
    ring.write(step, 2, 1, 1, 20_000)  # 20 ms a token, as small steps do
    seen = read_box(tmp_path / "boxes" / "rank-0.box")
    assert longest_step_s(seen, 512) == pytest.approx(512 * 0.005)
    assert not is_serving(seen)
    assert not has_work(seen)
