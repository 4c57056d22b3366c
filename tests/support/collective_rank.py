"""A rank of a group as a process: `python collective_rank.py RANK RENDEZVOUS SCENARIO DEADLINE_S MEANS`.

Says "imported" once torch is there, waits for a line, joins, and prints what came of the scenario as JSON. So
the ranks join together, however long their imports took.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from firstlight.base.blackbox.recorder import NoBox
from firstlight.base.errors import EngineError
from firstlight.ops.collectives import Group, Wish, join


class Trail(NoBox):
    """Remembers the last collective that was entered, and the last that was left."""

    def __init__(self) -> None:
        self._names = [""]
        self._entered = self._left = (0, 0)

    def name(self, text: str) -> int:
        self._names.append(text)
        return len(self._names) - 1

    def enter_collective(self, name: int, number: int) -> None:
        self._entered = name, number

    def leave_collective(self, name: int, number: int) -> None:
        self._left = name, number

    def last(self) -> dict[str, tuple[str, int]]:
        named = {"entered": self._entered, "left": self._left}
        return {key: (self._names[name], number) for key, (name, number) in named.items()}


TRAIL = Trail()


def agree(group: Group) -> dict[str, Any]:
    """Every collective once, with numbers that tell who took part."""
    rank = group.rank
    summed = group.all_reduce("sum", torch.arange(4.0) * 10**rank)
    # 5 columns shared as 3 and 2.
    columns = torch.arange(6.0).view(2, 3) if rank == 0 else torch.arange(10.0, 14.0).view(2, 2)
    joined = group.gather_columns("join", columns, [3, 2])
    least = group.agree_on_least("least", 7 - rank)
    return {
        "sum": summed.tolist(),
        "join": joined.tolist(),
        "least": least,
        **TRAIL.last(),
    }


def absent(group: Group) -> dict[str, Any]:
    """Rank 1 takes part in one collective and then does not come: it waits for the end of its input."""
    group.all_reduce("layers.0.mlp", torch.ones(1))
    if group.rank == 1:
        sys.stdin.read()
        return {}
    return fails(group)


def dead(group: Group) -> dict[str, Any]:
    """Rank 1 leaves without a word."""
    group.all_reduce("layers.0.mlp", torch.ones(1))
    if group.rank == 1:
        sys.stdout.flush()
        os._exit(9)
    return fails(group)


def apart(group: Group) -> dict[str, Any]:
    """The ranks are in different collectives."""
    group.all_reduce("layers.0.mlp", torch.ones(1))
    return fails(group, "layers.1.attention" if group.rank else "experts")


def fails(group: Group, name: str = "layers.1.attention") -> dict[str, Any]:
    started_s = time.monotonic()
    try:
        group.all_reduce(name, torch.ones(1))
    except EngineError as error:
        seconds = time.monotonic() - started_s
        return {
            "error": str(error),
            "hint": error.hint,
            **TRAIL.last(),
            "seconds": seconds,
        }
    return {"error": None}


SCENARIOS = {"agree": agree, "absent": absent, "dead": dead, "apart": apart}


def main() -> None:
    rank, rendezvous, scenario, deadline_s, means = sys.argv[1:6]
    print("imported", flush=True)
    sys.stdin.readline()
    group = Group(int(rank), 2, float(deadline_s), recorder=TRAIL)
    join(group, Path(rendezvous), Wish(means=means))
    print(json.dumps(SCENARIOS[scenario](group)), flush=True)
    if scenario == "agree":
        group.leave()


if __name__ == "__main__":
    main()
