"""The pattern of the GPUs: idle, waiting inside a kernel, computing, mixed, or not to be told."""

from __future__ import annotations

import pytest

from firstlight.doctor.case.target import HOST
from firstlight.doctor.case.values_host import Gpu, Gpus
from firstlight.doctor.motion.gpu_pattern import Load, Pattern, gpu_pattern
from support.doctor_scenes import case, made_up, target
from support.gpu_scenes import COMPUTING, IDLE, WAITING, gpus, server


@pytest.mark.parametrize(
    ("loads", "pattern", "outliers"),
    [
        ((IDLE, IDLE), Pattern.IDLE, ()),
        ((WAITING, WAITING), Pattern.WAITING, ()),
        ((COMPUTING, COMPUTING), Pattern.COMPUTING, ()),
        ((WAITING, WAITING, IDLE, WAITING), Pattern.MIXED, (2,)),
        ((IDLE, IDLE, WAITING, IDLE), Pattern.MIXED, (2,)),
        ((IDLE, WAITING), Pattern.MIXED, (0,)),  # the one that never launched
        ((COMPUTING, WAITING, WAITING), Pattern.MIXED, (0,)),
        (((50, 3, 150.0), (40, 2, 140.0)), Pattern.UNCLEAR, ()),
        (((100, 0, 250.0), (100, 0, 250.0)), Pattern.UNCLEAR, ()),  # neither low nor clearly working
        (((0, 0, 400.0),) * 2 + (IDLE,), Pattern.UNCLEAR, ()),  # a moment's 0 % whose energy says otherwise
    ],
)
def test_patterns(
    loads: tuple[tuple[int, int, float], ...], pattern: Pattern, outliers: tuple[int, ...]
) -> None:
    found = gpu_pattern(server(ranks=len(loads), seen=gpus(*loads)))
    assert (found.pattern, found.outliers) == (pattern, outliers)
    assert len(found.evidence) == 2


def test_energy_between_the_looks_beats_the_power_of_a_moment() -> None:
    seen = gpus(WAITING, WAITING, power_w=690.0)
    assert gpu_pattern(server(seen=seen)).pattern is Pattern.WAITING
    assert "GPU 0, 1 at 100 %, 125 W" in gpu_pattern(server(seen=seen)).text


def test_an_idle_gpu_beside_them_says_what_low_is() -> None:
    spin = (100, 0, 170.0)
    alone = gpu_pattern(server(seen=gpus(spin, spin)))
    assert alone.readings[0].low_power_w == pytest.approx(176.4)
    beside = gpu_pattern(server(ranks=2, seen=gpus(spin, spin, (0, 0, 20.0))))
    assert beside.readings[0].low_power_w == pytest.approx(122.0)


def test_only_the_gpus_of_the_server_count() -> None:
    found = gpu_pattern(server(ranks=1, seen=gpus(WAITING, COMPUTING)))
    assert found.pattern is Pattern.WAITING
    assert [(reading.index, reading.owners) for reading in found.readings] == [(0, ("rank-0",))]


def test_a_part_with_shared_memory_tells_no_limit() -> None:
    seen = gpus((96, 0, 16.0), power_limit_w=None)
    assert gpu_pattern(server(ranks=1, seen=seen)).readings[0].load is Load.WAITING
    seen = gpus((96, 0, 16.0), power_limit_w=None, memory_utilization_percent=None)
    assert gpu_pattern(server(ranks=1, seen=seen)).pattern is Pattern.UNCLEAR


def test_no_gpus_and_nothing_known_are_two_things() -> None:
    people = target(made_up("rank-0", 7))
    none = Gpus(gpus=None, note="no NVIDIA driver answers: NVML Shared Library Not Found")
    unasked = Gpus(gpus=None, note="not asked: the package nvidia-ml-py is not installed")
    mute = Gpus(gpus=(Gpu(index=0, name="NVIDIA X"),))
    assert gpu_pattern(case(people, [(0, HOST, none)])).pattern is Pattern.NONE
    assert gpu_pattern(case(people, [(0, HOST, unasked)])).pattern is Pattern.UNKNOWN
    assert gpu_pattern(case(people, [(0, HOST, mute)])).pattern is Pattern.UNKNOWN
    assert gpu_pattern(case(people, [])).pattern is Pattern.UNKNOWN
