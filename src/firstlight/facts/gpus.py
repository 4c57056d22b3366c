"""The NVIDIA GPUs of this machine, asked through NVML where `nvidia-ml-py` is installed.

Used by `machine`. No CUDA context is made, so nothing is taken from a GPU. Invariant: an answer, or a note
that says why there is none; never an exception.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
        return GpuFacts(gpus, f"driver {_text(pynvml.nvmlSystemGetDriverVersion())}")
    except pynvml.NVMLError as error:
        return GpuFacts((), f"the driver does not answer: {error}")
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(index, _text(nvml.nvmlDeviceGetName(handle)), memory.total, memory.free, (major, minor))


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
