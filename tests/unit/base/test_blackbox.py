"""The black box: what is written is what is read, after a kill at any instruction as well."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from firstlight.base.blackbox import layout
from firstlight.base.blackbox.layout import Counter
from firstlight.base.blackbox.reader import Collective, NotABox, Odometer, read_box
from firstlight.base.blackbox.recorder import NoRing
from firstlight.base.blackbox.writer import BlackBox, create_box
from firstlight.base.errors import ResourceError

NUM_KILLS = 2000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "rank-0.box"
    create_box(made, role="rank", rank=0, run_id="run-1")
    return made


def test_a_new_box_says_who_it_is_for(path: Path) -> None:
    box = read_box(path)
    assert (box.role, box.rank, box.run_id, box.pid) == ("rank", 0, "run-1", 0)
    assert box.phase is None
    assert not box.events
    assert not box.notes


def test_a_claimed_box_names_the_process(path: Path) -> None:
    BlackBox(path).claim()
    box = read_box(path)
    assert box.pid == os.getpid()
    ticks = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19]
    assert box.start_ticks == int(ticks)
    assert abs(box.wall_s(time.monotonic()) - time.time()) < 1


def test_a_process_without_a_rank(tmp_path: Path) -> None:
    create_box(tmp_path / "api.box", role="api", rank=None, run_id="r")
    assert read_box(tmp_path / "api.box").rank is None


def test_phases_keep_their_last_odometer(path: Path) -> None:
    writer = BlackBox(path)
    writer.enter_phase("weights", 100, "bytes", "über " * 40)
    writer.advance(60)
    writer.advance(100)
    writer.enter_phase("kv", 3, "pages")
    writer.advance(1)
    weights, kv = read_box(path).phases
    assert (weights.name, weights.odometer) == ("weights", Odometer(100, 100, "bytes"))
    assert (kv.name, kv.odometer) == ("kv", Odometer(1, 3, "pages"))
    assert weights.detail.startswith("über über")
    assert "\ufffd" not in weights.detail
    assert weights.start_s <= kv.start_s <= time.monotonic()


def test_a_second_writer_goes_on_where_the_first_ended(path: Path) -> None:
    launcher = BlackBox(path)
    launcher.enter_phase("spawn")
    launcher.close()
    child = BlackBox(path)
    child.claim()
    child.enter_phase("imports")
    assert [phase.name for phase in read_box(path).phases] == ["spawn", "imports"]


def test_the_phase_log_never_wraps(path: Path) -> None:
    writer = BlackBox(path)
    for number in range(layout.NUM_PHASES + 7):
        writer.enter_phase(f"phase {number % 20}")
    box = read_box(path)
    assert len(box.phases) == layout.NUM_PHASES
    assert box.phases[0].name == "phase 0"
    assert "7 phases found no room" in box.notes


def test_more_names_than_room(path: Path) -> None:
    writer = BlackBox(path)
    numbers = [writer.name(f"name {number}") for number in range(layout.NUM_NAMES + 3)]
    assert numbers[-1] == 0
    assert writer.name("name 5") == 6
    assert "3 names found no room" in read_box(path).notes


def test_collectives_and_counters(path: Path) -> None:
    writer = BlackBox(path)
    reduce = writer.name("layers.3.mlp")
    writer.enter_collective(reduce, 2**40)
    writer.set(Counter.STEP, 2**63)
    box = read_box(path)
    assert box.entered == Collective("layers.3.mlp", 2**40)
    assert box.left == Collective("", 0)
    assert box.step == 2**63
    writer.leave_collective(reduce, 2**40)
    assert read_box(path).left == box.entered


def test_a_ring_holds_the_latest_events(path: Path) -> None:
    writer = BlackBox(path)
    ring = writer.ring("main")
    step = writer.name("step")
    for number in range(layout.RING_EVENTS + 10):
        ring.write(step, number, number * 2)
    events = read_box(path).events
    assert [event.number for event in events] == list(range(11, layout.RING_EVENTS + 11))
    assert events[-1].values[:2] == (layout.RING_EVENTS + 9, (layout.RING_EVENTS + 9) * 2)
    assert {event.ring for event in events} == {"main"}
    assert events[0].name == "step"


def test_each_thread_has_its_ring_and_there_are_four(path: Path) -> None:
    writer = BlackBox(path)
    rings = [writer.ring(f"thread {number}") for number in range(layout.NUM_RINGS + 1)]
    assert isinstance(rings[-1], NoRing)
    threads = [
        threading.Thread(target=lambda r=ring: [r.write(1, value) for value in range(100)])
        for ring in rings[:-1]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_box(path).events) == 100 * layout.NUM_RINGS


def test_a_full_file_system_is_an_error_at_creation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ResourceError, match="no space is left") as caught:
        create_box(tmp_path / "a.box", role="rank", rank=1, run_id="r")
    assert "--shm-size" in caught.value.hint
    assert not (tmp_path / "a.box").exists()


@pytest.mark.parametrize("content", [b"", b"short", bytes(layout.FILE_BYTES)])
def test_what_is_no_box_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.box"
    path.write_bytes(content)
    with pytest.raises(NotABox):
        read_box(path)
    with pytest.raises(NotABox):
        read_box(tmp_path / "absent.box")


def test_a_record_cut_short_is_left_out_and_named(path: Path) -> None:
    writer = BlackBox(path)
    ring = writer.ring("main")
    for number in range(layout.RING_EVENTS + 2):
        ring.write(writer.name("step"), number)
    writer.enter_phase("weights")
    with path.open("r+b") as file:  # as a kill between the first and the last store leaves it
        file.seek(layout.ring_offset(0) + layout.RING_HEADER_BYTES + 5 * layout.EVENT_BYTES)
        file.write(bytes(8))
        file.seek(layout.phase_offset(1) + 8)
        file.write((123).to_bytes(8, "little"))
    box = read_box(path)
    assert len(box.events) == layout.RING_EVENTS - 1
    assert [phase.name for phase in box.phases] == ["weights"]
    assert [note.partition("inside ")[2] for note in box.notes] == ["phase 2", "an event of main"]


def test_an_odometer_that_is_being_reset_is_not_the_next_phases(path: Path) -> None:
    writer = BlackBox(path)
    writer.enter_phase("weights", 10, "bytes")
    writer.advance(10)
    writer.enter_phase("kv", 3, "pages")
    writer.set(Counter.PHASE, 0)  # the writer stopped between two stores of `enter_phase`
    weights, kv = read_box(path).phases
    assert weights.odometer == Odometer(10, 10, "bytes")
    assert kv.odometer == Odometer()


def test_read_while_it_is_written(path: Path) -> None:
    pid = _fork(lambda: _write_for_ever(path))
    try:
        deadline_s = time.monotonic() + 1.0
        highest = 0
        while time.monotonic() < deadline_s:
            box = read_box(path)
            _check(box.events, box.step)
            highest = max(highest, box.step)
        assert highest > 1000
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_read_while_the_writer_is_stopped(path: Path) -> None:
    pid = _fork(lambda: _write_for_ever(path))
    try:
        time.sleep(0.05)
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        before = read_box(path)
        assert before == read_box(path)
        _check_whole(before.events, before.step)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.slow
@pytest.mark.timeout(400)  # thousands of processes; half a minute on a quiet machine
def test_read_after_a_kill_at_any_instruction(tmp_path: Path) -> None:
    """In a small process: a fork copies page tables, and the one that runs the tests may have gigabytes."""
    code = "import runpy, sys; runpy.run_path(sys.argv[1])['kill_many'](sys.argv[2])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, __file__, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def kill_many(folder: str) -> None:
    """Writers that are killed while they write, again and again; each time the box is read."""
    generator = random.Random(7)
    num_cut = 0
    for number in range(NUM_KILLS):
        path = Path(folder, f"{number}.box")
        create_box(path, role="rank", rank=0, run_id="r")
        started_r, started_w = os.pipe()
        pid = _fork(lambda path=path, fd=started_w: _write_for_ever(path, fd))
        os.close(started_w)
        os.read(started_r, 1)
        os.close(started_r)
        time.sleep(generator.random() * 0.002)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        box = read_box(path)
        _check_whole(box.events, box.step)
        cut = [note for note in box.notes if "inside" in note]
        assert len(cut) <= 1, cut
        num_cut += len(cut)
        path.unlink()
    assert num_cut < NUM_KILLS / 2  # a kill inside a record is the exception


def _check(events: tuple, step: int) -> None:
    """Each event carries its own proof; their numbers have a gap only where the writer stands."""
    numbers = [event.number for event in events]
    for event in events:
        assert event.values == (event.number, event.number * 3, event.number ^ 0xFFFF, 7, event.number + 1)
        assert event.name == "tick"
    if numbers:
        assert numbers == sorted(set(numbers))
        assert step >= numbers[0] - 1


def _check_whole(events: tuple, step: int) -> None:
    """As `_check`, of a ring that nobody writes to while it is read: then it is also full to the last slot.

    Of a living writer this cannot be asked: slots that were still empty when they were read are filled
    before the last one is, and a reader that waits for a processor meanwhile finds any number of those.
    """
    _check(events, step)
    if events:
        assert len(events) >= min(events[-1].number, layout.RING_EVENTS) - 1


def _write_for_ever(path: Path, started_fd: int | None = None) -> None:
    box = BlackBox(path)
    box.claim()
    ring = box.ring("main")
    tick = box.name("tick")
    number = 0
    while True:
        number += 1
        ring.write(tick, number, number * 3, number ^ 0xFFFF, 7, number + 1)
        box.set(Counter.STEP, number)
        if number % 50 == 0:
            box.enter_phase(f"phase {number // 50 % 30}", number, "steps")
        if number == 20 and started_fd is not None:
            os.write(started_fd, b"x")


def _fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            work()
        os._exit(1)
    return pid
