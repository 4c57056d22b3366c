"""The GPUs through NVML, asked in a child, as the driver's library hangs when the driver does.

Taken in both looks: energy over time says more than a moment's utilisation, which reads 100 % for a kernel
that only waits. Invariant: a timeout of the child is evidence of its own, never a guess.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from firstlight.doctor.case.evidence import Observation
from firstlight.doctor.case.target import HOST
from firstlight.doctor.case.values import Failed
from firstlight.doctor.case.values_host import Gpus
from firstlight.doctor.collect.child import run_child
from firstlight.doctor.collect.scene import Collector, Scene

_SCRIPT = Path(__file__).with_name("nvml_child.py")
_DEADLINE_S = 8.0  # the first call after boot wakes the driver up


def collect_gpus(scene: Scene) -> Iterator[Observation]:
    """One look at all GPUs."""
    result = run_child((sys.executable, "-P", str(_SCRIPT)), _DEADLINE_S)
    if result.code == 0:
        answer = msgspec.json.decode(result.output)
        value = msgspec.convert({"type": "gpus", **answer}, Gpus, strict=False)
        yield Observation(subject=HOST, source="NVML", value=value)
        return
    reason = result.errors.strip()[-500:] or f"the child ended with {result.code}"
    failure = Failed(collector="gpus", reason=reason, is_timeout=result.code is None)
    yield Observation(subject=HOST, source="NVML", value=failure)


GPUS = Collector("gpus", collect_gpus, deadline_s=_DEADLINE_S + 1)
