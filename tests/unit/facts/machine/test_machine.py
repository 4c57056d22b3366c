"""What the machine offers: made-up trees, a made-up driver, and this very machine."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from firstlight.facts.machine import machine
from firstlight.facts.machine.machine import find_gpus, inspect_machine

CPUINFO = """processor\t: 0
model name\t: Example CPU 9000
flags\t\t: fpu sse avx2 fma avx512f avx512_vnni pge

processor\t: 1
model name\t: Example CPU 9000
flags\t\t: fpu
"""
MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    600 kB\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/cpuinfo").write_text(CPUINFO)
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    for core in range(4):
        topology = tmp_path / f"sys/devices/system/cpu/cpu{core}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{core % 2},{core % 2 + 2}\n")
    monkeypatch.setattr(machine, "usable_cores", lambda: (0, 1, 2, 3))
    return tmp_path


def limit(root: Path, files: dict[str, str]) -> None:
    (root / "proc/self/cgroup").write_text("0::/\n")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    for name, text in files.items():
        (root / "sys/fs/cgroup" / name).write_text(text)


def test_a_machine_without_limits(root: Path) -> None:
    found = inspect_machine(root, with_gpus=False)
    assert found.cores == (0, 1, 2, 3)
    assert found.physical_cores == (0, 1), "one of each pair of hyper-threads"
    assert found.num_usable_cores == 2
    assert found.cpu_model == "Example CPU 9000"
    assert found.cpu_flags == {"avx2", "fma", "avx512f", "avx512_vnni"}
    assert found.memory_total_bytes == 1000 * 1024
    assert found.memory_available_bytes == 600 * 1024
    assert any("avx2 fma avx512f avx512_vnni" in line for line in found.explain())


def test_limits_of_a_container(root: Path) -> None:
    limit(root, {"memory.max": "409600", "memory.current": "204800", "cpu.max": "100000 100000"})
    found = inspect_machine(root, with_gpus=False)
    assert found.memory_available_bytes == 204800
    assert "control group" in found.memory_reason
    assert found.num_usable_cores == 1
    assert "processor time of 1 cores" in found.explain()[0]


@pytest.mark.parametrize(("quota", "threads"), [("20000", 1), ("190000", 2), ("150000", 1), ("800000", 2)])
def test_quotas_become_whole_threads(root: Path, quota: str, threads: int) -> None:
    limit(root, {"cpu.max": f"{quota} 100000"})
    assert inspect_machine(root, with_gpus=False).num_usable_cores == threads


def test_a_limit_above_what_is_free_changes_nothing(root: Path) -> None:
    limit(root, {"memory.max": "900000000", "memory.current": "0"})
    assert inspect_machine(root, with_gpus=False).memory_available_bytes == 600 * 1024


def test_a_machine_without_proc(tmp_path: Path) -> None:
    found = inspect_machine(tmp_path, with_gpus=False)
    assert found.memory_available_bytes > 0
    assert found.physical_cores == found.cores


def test_this_machine() -> None:
    found = inspect_machine()
    assert set(found.cores) == os.sched_getaffinity(0)
    assert 1 <= found.num_usable_cores <= len(found.cores)
    assert 0 < found.memory_available_bytes <= found.memory_total_bytes
    assert len(found.explain()) >= 4


class FakeNvml(types.ModuleType):
    """A driver with one GPU; `broken` names the call that fails."""

    class NVMLError(Exception):
        pass

    def __init__(self, broken: str = "") -> None:
        super().__init__("pynvml")
        self.broken = broken
        self.is_open = False

    def __getattr__(self, name: str) -> object:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        return lambda *arguments: self.answer(name, *arguments)

    def answer(self, name: str, *_: object) -> object:
        if name == self.broken:
            raise self.NVMLError("driver not loaded")
        if name in ("nvmlInit", "nvmlShutdown"):
            self.is_open = name == "nvmlInit"
        return {
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(total=80 * 2**30, free=79 * 2**30),
            "nvmlDeviceGetCudaComputeCapability": (9, 0),
            "nvmlDeviceGetName": b"Example GPU",
            "nvmlSystemGetDriverVersion": "600.1",
        }.get(name)


def test_a_gpu(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = inspect_machine(root)
    assert found.gpus[0].name == "Example GPU"
    assert found.gpu_note == "driver 600.1"
    assert "gpu 0: Example GPU, 79.0 of 80.0 GiB free, compute capability 9.0" in found.explain()
    assert not nvml.is_open


@pytest.mark.parametrize(
    ("broken", "note"),
    [("nvmlInit", "none: driver not loaded"), ("nvmlDeviceGetMemoryInfo", "does not answer")],
)
def test_a_driver_that_fails_becomes_a_note(monkeypatch: pytest.MonkeyPatch, broken: str, note: str) -> None:
    nvml = FakeNvml(broken)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = find_gpus()
    assert found.gpus == ()
    assert note in found.note
    assert not nvml.is_open


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "not installed" in find_gpus().note
