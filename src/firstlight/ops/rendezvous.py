"""Where the ranks of a run meet before they can reach each other: each leaves words in a file.

The file lies in the run's private directory. Invariant: whoever is missing after the deadline is named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from firstlight.base.errors import EngineError

LOOK_S = 0.01


class Store(Protocol):
    """What we need of torch's `FileStore`."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


@dataclass(frozen=True)
class Rendezvous:
    """One rank of `size` at the place where all leave their words."""

    store: Store
    rank: int
    size: int
    deadline_s: float

    def say(self, topic: str, word: str) -> None:
        """Leaves this rank's word on a topic, once."""
        self.store.set(f"{topic}-{self.rank}", word)

    def hear(
        self,
        topic: str,
        ranks: Sequence[int],
        failed: str,
        on_arrival: Callable[[int], None] = lambda _: None,
    ) -> list[str]:
        """What `ranks` say; `on_arrival` hears how many have, whenever there are more.

        `failed` is what is said of those who are silent until the deadline, in an `EngineError`.
        """
        give_up_s = time.monotonic() + self.deadline_s
        num_arrived = 0
        while True:
            missing = [rank for rank in ranks if not self.store.check([f"{topic}-{rank}"])]
            if len(ranks) - len(missing) > num_arrived:
                num_arrived = len(ranks) - len(missing)
                on_arrival(num_arrived)
            if not missing:
                return [self.store.get(f"{topic}-{rank}").decode() for rank in ranks]
            if time.monotonic() > give_up_s:
                raise EngineError(
                    f"rank {self.rank}: {named(missing)} {failed} within {self.deadline_s:.0f} s.",
                    "Look at their logs in the run directory; `firstlight doctor` says where they are.",
                )
            time.sleep(LOOK_S)


def named(ranks: Sequence[int]) -> str:
    """The ranks in words."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
