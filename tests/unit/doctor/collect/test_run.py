"""Running collectors: none can hang the doctor, and what fails is evidence; cases survive their JSON."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import get_args

import msgspec
import pytest

from firstlight.doctor.case.evidence import MAX_RAW_CHARS, Case, Observation, number
from firstlight.doctor.case.target import HOST
from firstlight.doctor.case.values import Failed, Value, kind_of
from firstlight.doctor.case.values_host import Compilers, FreeSpace, Gpu, Gpus
from firstlight.doctor.case.values_process import BlackBoxSeen, InputOutput
from firstlight.doctor.collect.child import run_child
from firstlight.doctor.collect.registry import COLLECTORS
from firstlight.doctor.collect.run import examine
from firstlight.doctor.collect.scene import Collector, Scene
from support.doctor_scenes import box, case, decode_case, encode_case, made_up, target

VALUE = FreeSpace(purpose="shm", path="/x", total_bytes=1, free_bytes=1)
SEEN = Observation(subject=HOST, source="test", value=VALUE)


def test_a_collector_that_blocks_is_left_behind_with_what_it_had() -> None:
    release = threading.Event()

    def blocks(scene: Scene) -> Iterator[Observation]:
        yield SEEN
        release.wait(30)
        yield SEEN

    def raises(scene: Scene) -> Iterator[Observation]:
        yield SEEN
        raise PermissionError("not yours")

    collectors = [
        Collector("blocks", blocks, deadline_s=0.2, is_dynamic=False),
        Collector("raises", raises, deadline_s=5, is_dynamic=False),
        Collector("works", lambda scene: [SEEN], deadline_s=5),
    ]
    start_s = time.monotonic()
    found = examine(Scene(target()), collectors, interval_s=0.1)
    assert time.monotonic() - start_s < 3
    release.set()
    kinds = [(item.look, item.id.split()[1]) for item in found.evidence]
    assert kinds == [
        (0, "free-space"),
        (0, "failed"),
        (0, "free-space"),
        (0, "failed"),
        (0, "free-space"),
        (1, "free-space"),
    ]
    (blocked,) = found.failures("blocks")
    (raised,) = found.failures("raises")
    assert blocked.value.is_timeout
    assert raised.value.is_refused
    assert "not yours" in raised.value.reason


def test_looks_are_apart_and_ids_are_in_order() -> None:
    collectors = [Collector("one", lambda scene: [SEEN]), Collector("two", lambda scene: [SEEN])]
    found = examine(Scene(target()), collectors, interval_s=0.2)
    assert [item.id for item in found.evidence] == [f"E{n} free-space host" for n in range(1, 5)]
    assert found.evidence[2].time_s - found.evidence[0].time_s >= 0.2
    assert found.last_look == 1


def test_all_collectors_together_end_in_time_for_a_target_that_is_gone() -> None:
    names = [collector.name for collector in COLLECTORS]
    assert len(set(names)) == len(names)
    start_s = time.monotonic()
    found = examine(Scene(target(made_up("rank-0", 999_999_999))), interval_s=0.1)
    assert time.monotonic() - start_s < 8
    assert found.failures(subject="rank-0")
    assert decode_case(encode_case(found)) == found


def test_every_kind_has_a_tag_of_its_own() -> None:
    tags = [kind.__struct_config__.tag for kind in get_args(Value)]
    assert len(set(tags)) == len(tags)


def test_a_case_replays_exactly() -> None:
    gpus = Gpus(gpus=(Gpu(index=0, name="x", energy_mj=5, process_bytes={7: None, 8: 9}),))
    values: list[tuple[int, str, Value]] = [
        (0, "rank-0", BlackBoxSeen(path="/x", box=box(), is_alive=True, age_s=0.5)),
        (0, HOST, gpus),
        (1, "rank-0", Failed(collector="io", reason="gone", is_gone=True)),
    ]
    made = case(target(made_up("rank-0", 7, rank=0), addresses=(("127.0.0.1", 80),)), values)
    again = decode_case(encode_case(made))
    assert again == made
    assert encode_case(again) == encode_case(made)
    with pytest.raises(msgspec.DecodeError):
        decode_case(b'{"target": 3}')


def test_look_ups_by_kind_subject_and_look() -> None:
    def io(read_bytes: int) -> InputOutput:
        return InputOutput(rchar=0, wchar=0, read_bytes=read_bytes, write_bytes=0)

    made = case(
        target(), [(0, "a", io(1)), (0, "b", io(5)), (1, "a", io(3)), (1, "run", Compilers(running=()))]
    )
    assert [seen.value.read_bytes for seen in made.all(InputOutput, subject="a")] == [1, 3]
    assert [seen.subject for seen in made.all(InputOutput, look=0)] == ["a", "b"]
    latest = made.of(InputOutput, "a")
    assert latest is not None
    assert latest.read_bytes == 3
    pair = made.pair(InputOutput, "a")
    assert pair is not None
    assert (pair.seconds, pair.ids) == (2.0, ("E1 io a", "E3 io a"))
    assert made.pair(InputOutput, "b") is None
    assert made.subjects == ("a", "b")
    found = made.by_id("E2 io b")
    assert found is not None
    assert kind_of(found.value) == "io"


def test_a_raw_excerpt_is_bounded() -> None:
    (item,) = number([(0, 1.0, Observation(subject="a", source="s", value=VALUE, raw="x" * 9999))])
    assert len(item.raw) == MAX_RAW_CHARS + 1


def test_a_child_that_hangs_is_given_up() -> None:
    start_s = time.monotonic()
    result = run_child(["sleep", "30"], 0.1)
    assert (result.code, time.monotonic() - start_s < 3) == (None, True)
    assert run_child(["sh", "-c", "echo out; echo err >&2; exit 3"], 5).code == 3


def test_an_empty_case_has_nothing() -> None:
    empty = Case(target=target())
    assert (empty.last_look, empty.subjects, empty.all(InputOutput)) == (0, (), [])
