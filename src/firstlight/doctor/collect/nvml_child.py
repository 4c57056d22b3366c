"""A script of its own: asks the NVIDIA driver once and prints JSON. May hang with a sick driver.

Started by `gpus` as a child that can be given up. Imports nothing of ours. Invariant: one JSON object on
standard output, with `gpus` None and a note when there is no driver to ask.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any


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
    return {"gpus": [_gpu(pynvml, index) for index in range(count)], "driver": _text(driver), "note": ""}


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
    return found


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
