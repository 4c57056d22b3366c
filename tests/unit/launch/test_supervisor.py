"""The loop against a scripted world: no processes, no time."""

from __future__ import annotations

from collections.abc import Sequence

from firstlight.base.failure import Failure
from firstlight.base.process import ExitCause
from firstlight.launch.control import LaunchState, Stage
from firstlight.launch.events import Death, EngineReady, Event, Probed, Stalled, StopAsked
from firstlight.launch.supervisor import supervise
from firstlight.launch.verdict import Verdict


class ScriptedWorld:
    """Hands out one batch of events a look and notes what it is told to do."""

    def __init__(self, batches: list[list[Event]], probes: list[bool]) -> None:
        self.batches = batches
        self.probes = probes
        self.told: list[str] = []
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def wait(self, stage: Stage) -> Sequence[Event]:
        self.time_s += 0.1
        return self.batches.pop(0)

    def terminate(self, names: Sequence[str]) -> None:
        self.told.append(f"terminate {' '.join(names)}")

    def kill(self, names: Sequence[str]) -> None:
        self.told.append(f"kill {' '.join(names)}")

    def probe(self) -> None:
        self.told.append("probe")
        self.batches[0].insert(0, Probed(self.probes.pop(0)))

    def hand_over(self) -> None:
        self.told.append("hand over")

    def take_back(self, end: Verdict) -> None:
        self.told.append(f"take back: {end.failure.message if end.failure else None}")

    def refuse(self, end: Verdict, *, for_good: bool) -> None:
        self.told.append(f"refuse{' for good' * for_good}: {end.failure.message if end.failure else None}")

    def accept(self) -> None:
        self.told.append("accept")


def test_a_whole_life() -> None:
    clean = ExitCause(0)
    world = ScriptedWorld(
        batches=[
            [],
            [EngineReady()],
            [],
            [],
            [StopAsked()],
            [Death("api", 1, clean)],
            [Death("rank-0", 2, clean)],
        ],
        probes=[False, True],
    )
    end = supervise(LaunchState(running=("rank-0", "api"), drain_s=1.0), world, world)
    assert world.told == ["probe", "probe", "hand over", "terminate api", "terminate rank-0"]
    assert end.stage is Stage.ENDED


def test_events_of_one_look_are_handled_in_order() -> None:
    crash = ExitCause(1)
    world = ScriptedWorld(batches=[[Death("rank-0", 1, crash), Death("api", 1, crash)]], probes=[])
    end = supervise(LaunchState(running=("rank-0", "api"), drain_s=1.0), world, world)
    assert [death.name for death in end.deaths] == ["rank-0", "api"]
    assert world.told == ["take back: rank 0 ended with exit code 1.", "terminate api"]


def test_a_lost_rank_is_told_to_clients_before_the_run_ends() -> None:
    killed, clean = ExitCause(None, 9), ExitCause(0)
    world = ScriptedWorld(
        batches=[
            [EngineReady()],
            [Death("rank-1", 1, killed)],
            [Death("rank-0", 2, clean)],
            [StopAsked()],
            [Death("api", 3, clean)],
        ],
        probes=[True],
    )
    end = supervise(LaunchState(running=("rank-0", "rank-1", "api"), drain_s=1.0), world, world)
    said = [text for text in world.told if text.startswith("refuse for good")]
    assert len(said) == 1
    assert "rank 1 was ended by SIGKILL" in said[0]
    assert world.told[2:] == [said[0], "terminate rank-0", "terminate api"]
    assert end.stage is Stage.ENDED


def test_a_stall_while_starting_is_the_verdict_and_ends_the_run() -> None:
    world = ScriptedWorld(
        batches=[
            [Stalled(Failure("rank 0 is stopped.", "", 6), "rank-0")],
            [Death("rank-0", 2, ExitCause(None, 9)), Death("api", 2, ExitCause(None, 9))],
        ],
        probes=[],
    )
    end = supervise(LaunchState(running=("rank-0", "api"), drain_s=1.0), world, world)
    assert world.told == ["take back: rank 0 is stopped.", "kill rank-0 api"]
    assert end.stage is Stage.ENDED
