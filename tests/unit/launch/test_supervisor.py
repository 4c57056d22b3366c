"""The loop against a scripted world: no processes, no time."""

from __future__ import annotations

from collections.abc import Sequence

from firstlight.base.process import ExitCause
from firstlight.launch.control import Death, EngineReady, Event, LaunchState, Stage, StopAsked
from firstlight.launch.supervisor import supervise


class ScriptedWorld:
    """Hands out one batch of events a look and notes what it is told to do."""

    def __init__(self, batches: list[list[Event]], probes: list[bool]) -> None:
        self.batches = batches
        self.probes = probes
        self.told: list[str] = []
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def wait(self, *, is_serving: bool) -> Sequence[Event]:
        self.time_s += 0.1
        return self.batches.pop(0)

    def terminate(self, names: Sequence[str]) -> None:
        self.told.append(f"terminate {' '.join(names)}")

    def kill(self, names: Sequence[str]) -> None:
        self.told.append(f"kill {' '.join(names)}")

    def probe(self) -> bool:
        self.told.append("probe")
        return self.probes.pop(0)

    def announce(self) -> None:
        self.told.append("announce")


def test_a_whole_life() -> None:
    clean = ExitCause(0)
    world = ScriptedWorld(
        batches=[
            [],
            [EngineReady()],
            [],
            [StopAsked()],
            [Death("api", 1, clean)],
            [Death("rank-0", 2, clean)],
        ],
        probes=[False, True],
    )
    end = supervise(LaunchState(running=("rank-0", "api"), drain_s=1.0), world, world)
    assert world.told == ["probe", "probe", "announce", "terminate api", "terminate rank-0"]
    assert end.stage is Stage.ENDED


def test_events_of_one_look_are_handled_in_order() -> None:
    crash = ExitCause(1)
    world = ScriptedWorld(batches=[[Death("rank-0", 1, crash), Death("api", 1, crash)]], probes=[])
    end = supervise(LaunchState(running=("rank-0", "api"), drain_s=1.0), world, world)
    assert [death.name for death in end.deaths] == ["rank-0", "api"]
    assert world.told == ["terminate api"]
