"""What this machine offers to this process: cores, memory, instruction sets, GPUs. Torch-free.

Invariant: numbers are what *we* may use (affinity, quotas and limits applied), not what the hardware has.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firstlight.facts.machine.cgroups import cpu_quota, memory_limit


# The NVIDIA GPUs of this machine, asked through NVML where `nvidia-ml-py` is installed. No CUDA context is
# made, so nothing is taken from a GPU. An answer, or a note that says why there is none; never an
# exception.
@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver numbers it."""

    index: int
    name: str
    memory_total_bytes: int
    memory_free_bytes: int
    compute_capability: tuple[int, int]


@dataclass(frozen=True)
class GpuFacts:
    """`note` says why `gpus` is empty, or names the driver."""

    gpus: tuple[Gpu, ...]
    note: str


def find_gpus() -> GpuFacts:
    """Asks the driver. Costs a few milliseconds, more where the driver must wake up."""
    try:
        import pynvml
    except ImportError:
        return GpuFacts((), "not asked: the package nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return GpuFacts((), f"none: {error}")
    try:
        gpus = tuple(_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
        return GpuFacts(gpus, f"driver {_as_text(pynvml.nvmlSystemGetDriverVersion())}")
    except pynvml.NVMLError as error:
        return GpuFacts((), f"the driver does not answer: {error}")
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(index, _as_text(nvml.nvmlDeviceGetName(handle)), memory.total, memory.free, (major, minor))


def _as_text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


# Instruction sets that decide which operators are fast. The last row is ARM.
NOTABLE_FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "avx_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    *("asimd", "asimddp", "i8mm", "bf16", "sve"),
)


@dataclass(frozen=True)
class Machine:
    """`cores` are the processors we may run on; `physical_cores` one of each pair of hyper-threads."""

    cores: tuple[int, ...]
    physical_cores: tuple[int, ...]
    cpu_quota: float | None
    cpu_model: str
    cpu_flags: frozenset[str]
    memory_total_bytes: int
    memory_available_bytes: int
    memory_reason: str
    gpus: tuple[Gpu, ...]
    gpu_note: str

    @property
    def num_usable_cores(self) -> int:
        """Threads that can compute at the same time without waiting for each other; at least 1."""
        if self.cpu_quota is None:
            return len(self.physical_cores)
        return max(1, min(len(self.physical_cores), math.floor(self.cpu_quota + 0.1)))

    def explain(self) -> list[str]:
        """Lines for people: what there is, and what limits it."""
        instructions = " ".join(flag for flag in NOTABLE_FLAGS if flag in self.cpu_flags)
        quota = "" if self.cpu_quota is None else f", processor time of {self.cpu_quota:g} cores"
        lines = [
            f"processor: {self.cpu_model}, {len(self.cores)} logical and {len(self.physical_cores)} physical "
            f"cores usable{quota}: {self.num_usable_cores} threads",
            f"instructions: {instructions or 'none noted'}",
            f"memory: {self.memory_available_bytes / 2**30:.1f} GiB available ({self.memory_reason})",
        ]
        lines += [
            f"gpu {gpu.index}: {gpu.name}, {gpu.memory_free_bytes / 2**30:.1f} of "
            f"{gpu.memory_total_bytes / 2**30:.1f} GiB free, compute capability "
            f"{gpu.compute_capability[0]}.{gpu.compute_capability[1]}"
            for gpu in self.gpus
        ]
        lines.append(f"gpus: {self.gpu_note}")
        return lines


def inspect_machine(root: Path = Path("/"), *, with_gpus: bool = True) -> Machine:
    """Looks at the machine. `root` is where /proc and /sys are found (tests give another one)."""
    cores = usable_cores()
    model, flags = _cpu(root)
    total, available, reason = _memory(root)
    found = find_gpus() if with_gpus else None
    return Machine(
        cores=cores,
        physical_cores=_one_of_each_core(root, cores),
        cpu_quota=cpu_quota(root),
        cpu_model=model,
        cpu_flags=flags,
        memory_total_bytes=total,
        memory_available_bytes=available,
        memory_reason=reason,
        gpus=found.gpus if found else (),
        gpu_note=found.note if found else "not asked",
    )


def usable_cores() -> tuple[int, ...]:
    """The processors this process may run on, ascending."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _one_of_each_core(root: Path, cores: Iterable[int]) -> tuple[int, ...]:
    chosen: dict[str, int] = {}
    for core in cores:
        siblings = _text(root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").strip()
        chosen.setdefault(siblings or f"only {core}", core)
    return tuple(chosen.values())


def _cpu(root: Path) -> tuple[str, frozenset[str]]:
    model, flags = "", frozenset[str]()
    for line in _text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        name = name.strip()
        if name == "model name" and not model:
            model = value.strip()
        elif name in ("flags", "Features"):
            flags = frozenset(value.split()) & frozenset(NOTABLE_FLAGS)
            break
    return model or platform.processor() or platform.machine(), flags


def _memory(root: Path) -> tuple[int, int, str]:
    """(total, available, where the smaller number comes from), in bytes."""
    fields = {}
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            fields[name] = int(words[0]) * 1024
    if "MemTotal" not in fields:  # no /proc: macOS
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total // 2, "half of the installed memory; this system does not say what is free"
    total = fields["MemTotal"]
    available = fields.get("MemAvailable", fields.get("MemFree", 0))
    limit = memory_limit(root)
    if limit is not None and limit.available_bytes < available:
        return (
            min(total, limit.limit_bytes),
            limit.available_bytes,
            f"left of the control group's {limit.limit_bytes / 2**30:.1f} GiB",
        )
    return total, available, f"of {total / 2**30:.1f} GiB installed"


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
