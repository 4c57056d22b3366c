"""What the GPUs do, from two looks at them: idle, waiting inside a kernel, computing, or each something else.

Pure. NVML's utilisation reads 100 % for a kernel that only spins, so power decides, and of power the energy
between two looks rather than a moment's. Invariant: "waiting" says that a kernel waits, never for what: a
collective and a livelocked kernel look alike.
"""

from __future__ import annotations

import enum

import msgspec

from firstlight.doctor.case.evidence import Case, Seen
from firstlight.doctor.case.values_host import Gpu, Gpus

_IDLE_PERCENT, _BUSY_PERCENT = 2, 90
_MEMORY_WORK_PERCENT = 5  # a kernel that computes uses memory; one that spins does not
_SHARE_OF_RANGE = 0.15
_IDLE_SHARE = 0.12  # of the limit, where no idle GPU was seen
_CLEARLY_WORKING_SHARE = 0.4
_OTHERS_BYTES = 1 << 28


class Load(enum.Enum):
    """What one GPU does."""

    IDLE = "idle"  # no kernel ran
    WAITING = "waiting"  # a kernel runs all the time and does next to no work
    COMPUTING = "computing"
    UNCLEAR = "unclear"


class Pattern(enum.Enum):
    """What the GPUs of the server do together."""

    NONE = "none"  # there are no GPUs
    UNKNOWN = "unknown"  # nobody looked, or the driver did not tell
    IDLE = "all idle"
    WAITING = "all busy at low power"
    COMPUTING = "computing"
    MIXED = "mixed"
    UNCLEAR = "unclear"


class GpuReading(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. `power_w` None: not told. `owners`: keys of the target's processes that use it."""

    index: int
    load: Load
    utilization_percent: int | None
    power_w: float | None
    low_power_w: float | None  # below it a busy GPU does next to no work
    owners: tuple[str, ...] = ()


class GpuPattern(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs of one server. `outliers`: the few that do something else than the rest, by index."""

    pattern: Pattern
    readings: tuple[GpuReading, ...] = ()
    outliers: tuple[int, ...] = ()
    evidence: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The pattern with its numbers, for a clue; equal ones once."""
        same: dict[str, list[str]] = {}
        for reading in self.readings:
            same.setdefault(_numbers(reading), []).append(str(reading.index))
        rows = "; ".join(f"GPU {', '.join(indices)} at {text}" for text, indices in same.items() if text)
        return f"GPUs {self.pattern.value}{f': {rows}' if rows else ''}"

    def of(self, index: int) -> GpuReading | None:
        """The reading of one GPU."""
        return next((reading for reading in self.readings if reading.index == index), None)


def gpu_pattern(case: Case) -> GpuPattern:
    """Judge the GPUs of a case."""
    looks = [seen for seen in case.all(Gpus) if seen.value.gpus is not None]
    if not looks:
        refused = [seen for seen in case.all(Gpus) if "no NVIDIA driver" in seen.value.note]
        pattern = Pattern.NONE if refused else Pattern.UNKNOWN
        return GpuPattern(pattern=pattern, evidence=tuple(seen.id for seen in refused[-1:]))
    first, last = looks[0], looks[-1]
    ids = tuple(dict.fromkeys((first.id, last.id)))
    if not last.value.gpus:
        return GpuPattern(pattern=Pattern.NONE, evidence=ids)
    idle_w = _lowest_idle_w(looks)
    readings = tuple(_reading(case, index, looks, idle_w) for index in _ours(case, last.value.gpus))
    pattern, outliers = _together(readings)
    return GpuPattern(pattern=pattern, readings=readings, outliers=outliers, evidence=ids)


def _ours(case: Case, gpus: tuple[Gpu, ...]) -> list[int]:
    """Those that processes of the target use; else those that anybody uses, as a container hides pids."""
    pids = {process.pid for process in case.target.processes}
    ours = [gpu.index for gpu in gpus if pids & gpu.process_bytes.keys()]
    used = [gpu.index for gpu in gpus if (gpu.memory_used_bytes or 0) > _OTHERS_BYTES]
    return ours or used or [gpu.index for gpu in gpus]


def _lowest_idle_w(looks: list[Seen[Gpus]]) -> float | None:
    """The lowest power of a GPU of this machine on which no kernel ran."""
    powers = [
        gpu.power_w
        for seen in looks
        for gpu in seen.value.gpus or ()
        if gpu.power_w is not None
        and gpu.utilization_percent is not None
        and gpu.utilization_percent <= _IDLE_PERCENT
    ]
    return min(powers, default=None)


def _reading(case: Case, index: int, looks: list[Seen[Gpus]], idle_w: float | None) -> GpuReading:
    samples = [(seen.time_s, gpu) for seen in looks for gpu in seen.value.gpus or () if gpu.index == index]
    power_w, limit_w = _power_w(samples), samples[-1][1].power_limit_w
    low_w = None
    if limit_w is not None:
        base_w = idle_w if idle_w is not None else limit_w * _IDLE_SHARE
        low_w = base_w + _SHARE_OF_RANGE * (limit_w - base_w)
    pids = {process.pid: process.key for process in case.target.processes}
    owners = [pids[pid] for pid in samples[-1][1].process_bytes if pid in pids]
    return GpuReading(
        index=index,
        load=_load([gpu for _, gpu in samples], power_w, low_w),
        utilization_percent=samples[-1][1].utilization_percent,
        power_w=power_w,
        low_power_w=low_w,
        owners=tuple(owners),
    )


def _power_w(samples: list[tuple[float, Gpu]]) -> float | None:
    """The mean between the looks by energy; of one look, or without a counter, the moment's."""
    (first_s, first), (last_s, last) = samples[0], samples[-1]
    if first.energy_mj is not None and last.energy_mj is not None and last_s > first_s:
        joules = (last.energy_mj - first.energy_mj) / 1000
        if joules > 0:
            return joules / (last_s - first_s)
    return last.power_w


def _load(samples: list[Gpu], power_w: float | None, low_w: float | None) -> Load:
    used = [gpu.utilization_percent for gpu in samples]
    told = [percent for percent in used if percent is not None]
    if len(told) < len(used):
        return Load.UNCLEAR
    is_low = None if power_w is None or low_w is None else power_w <= low_w
    if max(told) <= _IDLE_PERCENT:
        return Load.UNCLEAR if is_low is False else Load.IDLE
    memory = max((gpu.memory_utilization_percent or 0 for gpu in samples), default=0)
    if min(told) < _BUSY_PERCENT:
        return Load.COMPUTING if is_low is False else Load.UNCLEAR
    if is_low is None:  # a part with shared memory tells no limit: only its memory is left to judge by
        known = all(gpu.memory_utilization_percent is not None for gpu in samples)
        return Load.WAITING if known and memory < _MEMORY_WORK_PERCENT else Load.UNCLEAR
    if is_low:
        return Load.WAITING if memory < _MEMORY_WORK_PERCENT else Load.UNCLEAR
    limit_w = samples[-1].power_limit_w or 0.0
    is_hot = (power_w or 0.0) >= _CLEARLY_WORKING_SHARE * limit_w
    return Load.COMPUTING if is_hot or memory >= _MEMORY_WORK_PERCENT else Load.UNCLEAR


def _together(readings: tuple[GpuReading, ...]) -> tuple[Pattern, tuple[int, ...]]:
    loads = {reading.load for reading in readings}
    if loads == {Load.UNCLEAR}:
        told = any(reading.utilization_percent is not None for reading in readings)
        return (Pattern.UNCLEAR if told else Pattern.UNKNOWN), ()
    if len(loads) == 1:
        return {
            Load.IDLE: Pattern.IDLE,
            Load.WAITING: Pattern.WAITING,
            Load.COMPUTING: Pattern.COMPUTING,
        }[loads.pop()], ()
    clear = [reading for reading in readings if reading.load is not Load.UNCLEAR]
    by_load = {load: [r.index for r in clear if r.load is load] for load in loads - {Load.UNCLEAR}}
    if len(by_load) == 1:
        return Pattern.UNCLEAR, ()
    # Of equally many, those that never launched a kernel are the odd ones.
    few = min(by_load, key=lambda load: (len(by_load[load]), load is not Load.IDLE))
    return Pattern.MIXED, tuple(by_load[few])


def _numbers(reading: GpuReading) -> str:
    parts = [] if reading.utilization_percent is None else [f"{reading.utilization_percent} %"]
    if reading.power_w is not None:
        low = f" (low is below {reading.low_power_w:.0f} W)" if reading.low_power_w is not None else ""
        parts.append(f"{reading.power_w:.0f} W{low}")
    return ", ".join(parts)
