"""Killed for want of memory or not: made-up counters of both versions of control groups."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from firstlight.base.exit_notes import read_exit_notes
from firstlight.base.process import ExitCause
from firstlight.doctor.collect.kernel_log import killed_for_memory
from firstlight.launch.processes.exit_reasons import Obituaries, OomCounters, OomWatch, judge, read_counters

KILLED = ExitCause(None, signal.SIGKILL)
V2, V1 = "/cg/memory.events", "/cg/memory.oom_control"


class Machine:
    """A /proc and a /sys/fs/cgroup of one group, in files."""

    def __init__(self, folder: Path, version: int) -> None:
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        group = self.cgroups / ("memory" if version == 1 else "") / "mine"
        group.mkdir(parents=True)
        line = "4:cpu,memory:/mine\n" if version == 1 else "0::/mine\n"
        if version == 1:
            (self.cgroups / "cpu,memory").symlink_to(self.cgroups / "memory")
        (self.proc / "self" / "cgroup").write_text(line)
        self._file = group / ("memory.oom_control" if version == 1 else "memory.events")
        self.count(0, 0)

    def count(self, in_group: int, on_host: int) -> None:
        self._file.write_text(f"oom 9\nunder_oom 0\noom_kill {in_group}\noom_group_kill 7\n")
        (self.proc / "vmstat").write_text(f"nr_free_pages 1\noom_kill {on_host}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_each_kill_that_the_group_counts_explains_one_child(tmp_path: Path, version: int) -> None:
    machine = Machine(tmp_path, version)
    machine.count(3, 5)  # before our time
    obituaries = Obituaries(str(tmp_path), OomWatch(machine.proc, machine.cgroups))
    machine.count(4, 6)
    assert obituaries.write("rank-0", 10, ExitCause(1)) is False
    assert obituaries.write("rank-1", 11, KILLED) is True
    assert obituaries.write("rank-2", 12, KILLED) is (False if version == 2 else None)
    notes = read_exit_notes(tmp_path)
    assert (notes["rank-0"].code, notes["rank-0"].is_oom) == (1, False)
    killed = notes["rank-1"]
    assert (killed.pid, killed.code, killed.signal, killed.told) == (11, None, 9, False)
    assert "rose by 1" in killed.oom_evidence


def test_who_was_killed_by_us_was_not_by_the_kernel(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 2)
    obituaries = Obituaries(str(tmp_path), OomWatch(machine.proc, machine.cgroups))
    machine.count(1, 1)
    obituaries.told("api", signal.SIGTERM)
    obituaries.told("rank-0", signal.SIGKILL)
    assert obituaries.write("rank-0", 10, KILLED) is False
    assert obituaries.write("api", 11, KILLED) is True
    notes = read_exit_notes(tmp_path)
    assert notes["rank-0"].told
    assert not notes["api"].told  # it was asked to leave, and did not get to


@pytest.mark.parametrize(
    ("before", "after", "is_oom"),
    [
        (OomCounters(0, 0, V2), OomCounters(1, 1, V2), True),
        (OomCounters(0, 0, V2), OomCounters(0, 0, V2), False),
        (OomCounters(0, 0, V2), OomCounters(0, 4, V2), False),
        (OomCounters(0, None, V2), OomCounters(0, None, V2), False),
        (OomCounters(0, 0, V1), OomCounters(0, 4, V1), None),  # a group of version 1 counts itself only
        (OomCounters(0, None, V1), OomCounters(0, None, V1), None),
        (OomCounters(None, 2), OomCounters(None, 2), False),
        (OomCounters(None, 2), OomCounters(None, 3), None),
        (OomCounters(), OomCounters(), None),
    ],
)
def test_what_is_not_measured_is_not_known(
    before: OomCounters, after: OomCounters, is_oom: bool | None
) -> None:
    assert judge(KILLED, before, after).is_oom is is_oom
    assert judge(ExitCause(None, signal.SIGSEGV), before, after).is_oom is False


def test_this_machine_can_be_read() -> None:
    counters = read_counters(Path("/proc"), Path("/sys/fs/cgroup"))
    assert counters.host is None or counters.host >= 0


def test_half_a_note_is_none(tmp_path: Path) -> None:
    (tmp_path / "exit-api.json").write_text('{"name"')
    assert read_exit_notes(tmp_path) == {}


def test_a_run_directory_that_is_gone_is_no_reason_to_fail(tmp_path: Path) -> None:
    assert Obituaries(str(tmp_path / "gone")).write("api", 1, ExitCause(0)) is False


def test_the_kernels_log_names_the_process(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(
        "6,1,5000000,-;Memory cgroup out of memory: Killed process 70 (python) total-vm:1kB\n"
        "6,2,9000000,-;Out of memory: Killed process 71 (python) total-vm:1kB\n"
    )
    assert killed_for_memory(70, 6.0, log) is None  # of an earlier process with this number
    assert "Killed process 71" in (killed_for_memory(71, 6.0, log) or "")
    assert killed_for_memory(7, 0.0, log) is None
    assert killed_for_memory(71, 0.0, tmp_path / "absent") is None
