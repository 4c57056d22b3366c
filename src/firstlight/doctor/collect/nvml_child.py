"""A script of its own: asks the NVIDIA driver once and prints JSON. May hang with a sick driver.

Imports nothing of ours. Invariant: one JSON object on standard output, with `gpus` None and a note when there
is no driver to ask.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from typing import Any

_MAX_LINKS = 18
_FABRIC = {0: "unsupported", 1: "not started", 2: "in progress", 3: "completed"}
_P2P = {
    0: "ok",
    1: "chipset not supported",
    2: "GPU not supported",
    3: "no common switch",
    4: "disabled by the driver",
    5: "not supported",
    6: "unknown",
}


def look() -> dict[str, Any]:
    """Everything of every GPU; what a device does not tell is left out."""
    try:
        import pynvml
    except ImportError:
        return {"gpus": None, "note": "not asked: the package nvidia-ml-py is not installed"}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {"gpus": None, "note": f"no NVIDIA driver answers: {error}"}
    driver = _told(pynvml, pynvml.nvmlSystemGetDriverVersion) or ""
    count = _told(pynvml, pynvml.nvmlDeviceGetCount) or 0
    cuda = _told(pynvml, pynvml.nvmlSystemGetCudaDriverVersion) or 0
    gpus = [_gpu(pynvml, index) for index in range(count)]
    _add_pairs(pynvml, gpus)
    return {
        "gpus": gpus,
        "driver": _text(driver),
        "driver_cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
        "note": "",
    }


def _gpu(nvml: Any, index: int) -> dict[str, Any]:
    found: dict[str, Any] = {"index": index, "name": ""}
    handle = _told(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return {**found, "name": "does not answer"}
    found["name"] = _text(_told(nvml, nvml.nvmlDeviceGetName, handle) or "")
    rates = _told(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    if rates is not None:
        found |= {"utilization_percent": rates.gpu, "memory_utilization_percent": rates.memory}
    memory = _told(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    if memory is not None:
        found |= {"memory_used_bytes": memory.used, "memory_total_bytes": memory.total}
    power_mw = _told(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    limit_mw = _told(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    found["power_w"] = None if power_mw is None else power_mw / 1000
    found["power_limit_w"] = None if limit_mw is None else limit_mw / 1000
    found["energy_mj"] = _told(nvml, nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
    processes = _told(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    found["process_bytes"] = {str(process.pid): process.usedGpuMemory for process in processes}
    found["compute_capability"] = _told(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    bar1 = _told(nvml, nvml.nvmlDeviceGetBAR1MemoryInfo, handle)
    found["bar1_total_bytes"] = None if bar1 is None else bar1.bar1Total
    found["fabric"] = _fabric(nvml, handle)
    links = [_told(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(_MAX_LINKS)]
    told = [state for state in links if state is not None]
    found["num_nvlinks"] = sum(told) if told else 0
    return found


def _fabric(nvml: Any, handle: Any) -> str:
    """Whether the GPU has joined the NVLink switches; empty where the driver cannot say."""
    if not hasattr(nvml, "nvmlDeviceGetGpuFabricInfo"):
        return ""
    info = nvml.c_nvmlGpuFabricInfo_t()
    if _told(nvml, nvml.nvmlDeviceGetGpuFabricInfo, handle, ctypes.byref(info)) is None:
        return ""
    state = _FABRIC.get(int(info.state), "")
    return f"failed (status {int(info.status)})" if state == "completed" and info.status else state


def _add_pairs(nvml: Any, gpus: list[dict[str, Any]]) -> None:
    """Of each pair whether the driver would let one write to the other's memory."""
    handles = [_told(nvml, nvml.nvmlDeviceGetHandleByIndex, gpu["index"]) for gpu in gpus]
    for one, gpu in enumerate(gpus):
        pairs = {}
        for other, _ in enumerate(gpus):
            if other == one or handles[one] is None or handles[other] is None:
                continue
            state = _told(
                nvml,
                nvml.nvmlDeviceGetP2PStatus,
                handles[one],
                handles[other],
                nvml.NVML_P2P_CAPS_INDEX_WRITE,
            )
            if state is not None:
                pairs[str(other)] = _P2P.get(int(state), f"status {int(state)}")
        gpu["p2p"] = pairs


def _told(nvml: Any, ask: Callable[..., Any], *arguments: Any) -> Any:
    """None for what this device or driver does not know."""
    try:
        return ask(*arguments)
    except nvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


if __name__ == "__main__":
    json.dump(look(), sys.stdout)
