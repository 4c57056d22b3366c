"""What arrives at the service manager's socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from firstlight.base.environment import ServiceManager
from firstlight.base.failure import Failure
from firstlight.launch.public.startup_responder import Picture
from firstlight.launch.public.systemd import Notifier
from firstlight.launch.serve import restarting
from firstlight.launch.supervisor import RestartLimit
from firstlight.launch.verdict import Verdict


class HandClock:
    """Time that stands still until it is moved."""

    def __init__(self) -> None:
        self.time_s = 100.0

    def now_s(self) -> float:
        return self.time_s


class Manager:
    """systemd's end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.setblocking(False)

    def heard(self) -> list[str]:
        rows: list[str] = []
        while True:
            try:
                rows += self.socket.recv(4096).decode().split("\n")
            except BlockingIOError:
                return rows


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(tmp_path / "notify")
    yield made
    made.socket.close()


def starting(message: str) -> Picture:
    return Picture("starting", message)


def test_a_life(manager: Manager) -> None:
    clock = HandClock()
    notifier = Notifier(ServiceManager(str(manager.path), None), clock)
    notifier.show(starting("weights\n1 %"))
    notifier.show(starting("weights 2 %"))  # too soon
    assert manager.heard() == ["STATUS=weights 1 %", "EXTEND_TIMEOUT_USEC=60000000"]
    clock.time_s += 1
    notifier.show(starting("weights 9 %"))
    assert manager.heard()[0] == "STATUS=weights 9 %"
    notifier.show(Picture("ready", "x", startup={}))
    assert manager.heard() == ["READY=1", "STATUS=The model is ready."]
    notifier.show(Picture("ready", "nothing moves", startup={"verdict": {}}))
    notifier.show(Picture("ready", "x", startup={}))
    assert manager.heard() == ["STATUS=nothing moves", "STATUS=The model is ready."]
    notifier.show(Picture("lost", "rank 0 is gone"))
    notifier.beat()
    notifier.stopping()
    notifier.close()
    notifier.close()
    assert manager.heard() == ["STATUS=rank 0 is gone", "STOPPING=1"]


def test_the_watchdog_hears_from_us_at_half_of_its_time(manager: Manager) -> None:
    clock = HandClock()
    notifier = Notifier(ServiceManager(str(manager.path), 10.0), clock)
    for _ in range(11):
        notifier.beat()
        clock.time_s += 1
    notifier.close()
    assert manager.heard() == ["WATCHDOG=1"] * 3 + ["STOPPING=1"]


@pytest.mark.parametrize(
    ("picture", "is_fed"),
    [
        (starting("weights"), True),
        (Picture("ready", startup={}), True),
        (Picture("ready", "rank 1 is stopped", startup={"verdict": {}}), False),
        (Picture("lost", "rank 0 is gone", startup={"verdict": {}}), False),
        (Picture("failed", "rank 0 is gone", startup={"verdict": {}}), False),
        (Picture("stopping"), True),
        (restarting(Verdict(6, Failure("rank 0 is gone.", "", 6)), "starting again in 2 s (1 of 5)"), True),
    ],
)
def test_the_watchdog_is_fed_only_where_waiting_is_worth_it(
    manager: Manager, picture: Picture, is_fed: bool
) -> None:
    notifier = Notifier(ServiceManager(str(manager.path), 10.0), HandClock())
    notifier.show(picture)
    notifier.beat()
    assert ("WATCHDOG=1" in manager.heard()) == is_fed
    notifier.close()


def test_a_manager_that_is_gone_or_full_stops_nothing(manager: Manager, tmp_path: Path) -> None:
    clock = HandClock()
    gone = Notifier(ServiceManager(str(tmp_path / "gone"), 10.0), clock)
    gone.beat()
    gone.close()
    full = Notifier(ServiceManager(str(manager.path), 10.0), clock)
    for _ in range(5000):
        clock.time_s += 5
        full.beat()
    full.close()
    nobody = Notifier(None, clock)
    nobody.show(starting("x"))
    nobody.beat()
    nobody.close()


def test_the_pause_before_a_restart_goes_on_turning() -> None:
    limit, turns = RestartLimit(), []
    assert limit.allows_another(0.0)
    limit.wait(lambda: turns.append(1))
    assert len(turns) >= 2
