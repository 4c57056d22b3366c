"""What stands between GPUs on PCIe: the IOMMU's table, and bridges that redirect what they send each other.

The group's type is everybody's to read; the ACS bits lie in that part of a bridge's configuration that only
root sees. Invariant: a bridge that could not be read is counted, never guessed.
"""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Iterator
from pathlib import Path

from firstlight.doctor.case.evidence import Observation
from firstlight.doctor.case.target import HOST
from firstlight.doctor.case.values_device import PciGpu, PciPaths
from firstlight.doctor.collect.scene import Collector, Scene

_NVIDIA, _DISPLAY = "0x10de", "0x03"
_ADDRESS = re.compile(r"^[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
_OPTIONS = re.compile(r"^(?:intel_iommu|amd_iommu|iommu(?:\.\w+)?|pci|pcie_acs_override|vfio\S*)=")
_EXTENDED, _ACS = 0x100, 0x0D
_CONTROL = 6  # bytes into the capability
_REDIRECT = 0x0004 | 0x0008  # of requests, of completions
_MAX_CAPABILITIES = 64


def collect_paths(scene: Scene) -> Iterator[Observation]:
    """Of the GPUs of this machine; without one there is no evidence."""
    devices = scene.sysfs / "bus" / "pci" / "devices"
    gpus = tuple(_gpu(path) for path in sorted(devices.glob("*")) if _is_gpu(path))
    if not gpus:
        return
    bridges = {bridge for gpu in gpus for bridge in gpu.upstream}
    acs = {bridge: acs_control(_bytes(devices / bridge / "config")) for bridge in sorted(bridges)}
    value = PciPaths(
        kernel_options=tuple(word for word in _command_line(scene) if _OPTIONS.match(word)),
        num_iommu_groups=len(list((scene.sysfs / "kernel" / "iommu_groups").glob("*"))),
        gpus=gpus,
        redirecting=tuple(bridge for bridge, control in acs.items() if control and control & _REDIRECT),
        num_unread=sum(control is None for control in acs.values()),
    )
    yield Observation(subject=HOST, source=str(devices), value=value)


def acs_control(config: bytes) -> int | None:
    """The ACS control word of a device's configuration; 0 without ACS, None when too little was shown."""
    if len(config) <= _EXTENDED:
        return None
    place = _EXTENDED
    for _ in range(_MAX_CAPABILITIES):
        if place < _EXTENDED or place + 8 > len(config):
            return 0
        (header,) = struct.unpack_from("<I", config, place)
        if header & 0xFFFF == _ACS:
            return int(struct.unpack_from("<H", config, place + _CONTROL)[0])
        place = header >> 20
    return 0


def _is_gpu(path: Path) -> bool:
    return _text(path / "vendor") == _NVIDIA and _text(path / "class").startswith(_DISPLAY)


def _gpu(path: Path) -> PciGpu:
    parts = [part for part in path.resolve().parts if _ADDRESS.match(part)]
    return PciGpu(
        address=path.name,
        iommu=_text(path / "iommu_group" / "type"),
        upstream=tuple(reversed(parts[:-1])),
    )


def _command_line(scene: Scene) -> list[str]:
    with contextlib.suppress(OSError):
        return scene.procfs.text("cmdline").split()
    return []


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


def _bytes(path: Path) -> bytes:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""


PCI = Collector("pci-paths", collect_paths, deadline_s=3.0, is_dynamic=False)
