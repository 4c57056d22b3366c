"""What a server's own command line says about it: how many ranks, which model, which port.

Pure. Invariant: None where nothing says so; a default is the engine's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from firstlight.base import loopback
from firstlight.doctor.case.target import Engine
from firstlight.doctor.servers.identity import option

_TENSOR = ("--tensor-parallel-size", "--tensor-parallel", "--tp-size", "--tp", "-tp")
_PIPELINE = ("--pipeline-parallel-size", "--pp-size", "--pp", "-pp")
_DATA = ("--data-parallel-size", "--dp-size", "--dp", "-dp")
_LOCAL_DATA = ("--data-parallel-size-local", "-dpl")
_NODES = ("--nnodes",)
_PORTS = {Engine.NATIVE: 8000, Engine.VLLM: 8000, Engine.SGLANG: 30000}


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of a server. `ranks_here`: on this machine."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    ranks_here: int = 1
    said: str = ""  # the options that said it

    def rank_of(self, labels: dict[str, int]) -> int | None:
        """The rank of a process by its places in the groups; None when it names none of them."""
        if "RANK" in labels:
            return labels["RANK"]
        if not labels.keys() & {"TP", "PP", "DP"}:
            return None
        before = labels.get("DP", 0) * self.pipeline + labels.get("PP", 0)
        return before * self.tensor + labels.get("TP", 0)


def sizes(engine: Engine, command: Sequence[str]) -> Sizes:
    """From the arguments; without any, the engines start one rank."""
    tensor, pipeline = _number(command, _TENSOR), _number(command, _PIPELINE)
    data = _number(command, _LOCAL_DATA) or _number(command, _DATA)
    if engine is Engine.SGLANG and "--enable-dp-attention" in command:
        data = None  # the data-parallel groups are made of the same ranks
    nodes = _number(command, _NODES) or 1
    parts = {"tensor": tensor, "pipeline": pipeline, "data": data}
    said = " × ".join(f"{name} parallel {value}" for name, value in parts.items() if value)
    total = math.prod(value or 1 for value in parts.values())
    return Sizes(
        tensor=tensor or 1,
        pipeline=pipeline or 1,
        data=data or 1,
        ranks_here=max(1, total // nodes),
        said=f"{said or 'no parallel option given'}{f', on {nodes} nodes' if nodes > 1 else ''}",
    )


def model_of(engine: Engine, command: Sequence[str]) -> str | None:
    """The checkpoint as it was named."""
    named = option(command, ("--model", "--model-path"))
    if named is not None or engine is Engine.SGLANG or "serve" not in command:
        return named
    after = command[list(command).index("serve") + 1 :]
    return after[0] if after and not after[0].startswith("-") else None


def address_of(engine: Engine, command: Sequence[str]) -> tuple[str, int] | None:
    """Host and port it serves on, or will."""
    port = _number(command, ("--port",)) or _PORTS.get(engine)
    host = option(command, ("--host",)) or "127.0.0.1"
    return (reachable(host), port) if port else None


def reachable(host: str) -> str:
    """As `loopback.reachable`, and an address for `localhost`: where it is silent, the other one is asked."""
    return "127.0.0.1" if host == "localhost" else loopback.reachable(host)


def _number(command: Sequence[str], names: Sequence[str]) -> int | None:
    value = option(command, names)
    return int(value) if value is not None and value.isdigit() and int(value) > 0 else None
