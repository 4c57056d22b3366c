"""The error counters of RDMA adapters, which any user may read; only their growth says anything.

Invariant: a counter is told as it stands, and what cannot be read is left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from firstlight.doctor.case.evidence import Observation
from firstlight.doctor.case.target import HOST
from firstlight.doctor.case.values_device import NicCounters, NicPort
from firstlight.doctor.collect.scene import Collector, Scene


def collect_nics(scene: Scene) -> Iterator[Observation]:
    """All ports of this machine; without an adapter there is no evidence."""
    folder = scene.sysfs / "class" / "infiniband"
    ports = tuple(_port(path) for path in sorted(folder.glob("*/ports/*")))
    if ports:
        yield Observation(subject=HOST, source=str(folder), value=NicCounters(ports=ports))


def _port(folder: Path) -> NicPort:
    counters: dict[str, int] = {}
    for path in sorted((*folder.glob("counters/*"), *folder.glob("hw_counters/*"))):
        text = _text(path)
        if text.isdigit():
            counters[path.name] = int(text)
    return NicPort(
        device=folder.parent.parent.name,
        port=int(folder.name) if folder.name.isdigit() else 0,
        state=_text(folder / "state").rpartition(": ")[2],
        link=_text(folder / "link_layer"),
        counters=counters,
    )


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


NICS = Collector("nic-counters", collect_nics)
