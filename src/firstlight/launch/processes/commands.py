"""What to start: the command, environment and cores of each child. Pure.

Invariant: the threads of all children together never exceed the cores we may use, unless the user asked for
more.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from firstlight.base.config import RunConfig
from firstlight.launch.janitor import RUN_VARIABLE

API = "api"
# How long an operator thread spins for its next piece of work before it sleeps. libgomp's default spins for
# milliseconds: when any other process takes a core, spinning threads keep it from the one that has work,
# and a step takes 30 times as long. This few turns bridge the gaps between operators, at no cost on a quiet
# machine.
SPIN_COUNT = "5000"
# Every library that starts a pool of its own reads one of these.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


class ChildSpec(msgspec.Struct, frozen=True):
    """One child to start. `variables` go on top of our environment; `cores` None: any."""

    name: str
    command: tuple[str, ...]
    variables: dict[str, str]
    pass_fds: tuple[int, ...] = ()
    rank: int | None = None
    cores: frozenset[int] | None = None


def rank_name(rank: int) -> str:
    """The child's name in messages and files."""
    return f"rank-{rank}"


def title(name: str) -> str:
    """A child's name in a sentence: "rank 0", "the api process"."""
    return "the api process" if name == API else name.replace("-", " ")


def child_specs(
    config: RunConfig, listener_fd: int, control_fd: int, cores: Sequence[int]
) -> tuple[ChildSpec, ...]:
    """The ranks, then the api process: the ranks have the longer way to go."""
    ranks = config.engine.tensor_parallel
    shares = core_shares(cores, ranks)
    specs = [_rank_spec(config, rank, shares[rank]) for rank in range(ranks)]
    return (*specs, _api_spec(config, listener_fd, control_fd))


def core_shares(cores: Sequence[int], ranks: int) -> list[frozenset[int] | None]:
    """Neighbouring cores for each rank; None for all when there is one rank, or fewer cores than ranks."""
    if ranks == 1 or len(cores) < ranks:
        return [None] * ranks
    ordered = sorted(cores)
    each = len(ordered) // ranks
    return [frozenset(ordered[rank * each : (rank + 1) * each]) for rank in range(ranks)]


def _rank_spec(config: RunConfig, rank: int, cores: frozenset[int] | None) -> ChildSpec:
    command = (*_python("firstlight.engine.rank"), "--run-dir", config.run_dir, "--rank", str(rank))
    variables = {**operator_variables(config.engine.threads), **run_token(config)}
    return ChildSpec(rank_name(rank), command, variables, rank=rank, cores=cores)


def operator_variables(threads: int) -> dict[str, str]:
    """What the libraries of the operators must find in the environment when they are loaded."""
    return {**_threads(threads), "GOMP_SPINCOUNT": SPIN_COUNT}


def _api_spec(config: RunConfig, listener_fd: int, control_fd: int) -> ChildSpec:
    descriptors = ("--fd", str(listener_fd), "--control-fd", str(control_fd))
    command = (*_python("firstlight.serve.api"), "--run-dir", config.run_dir, *descriptors)
    variables = {**_threads(1), "TOKENIZERS_PARALLELISM": "false", **run_token(config)}
    return ChildSpec(API, command, variables, pass_fds=(listener_fd, control_fd))


def relay_spec(config: RunConfig, listener_fd: int, control_fd: int) -> ChildSpec:
    """The api process in front of a foreign engine."""
    descriptors = ("--fd", str(listener_fd), "--control-fd", str(control_fd))
    command = (*_python("firstlight.serve.relay"), "--run-dir", config.run_dir, *descriptors)
    variables = {**_threads(1), **run_token(config)}
    return ChildSpec(API, command, variables, pass_fds=(listener_fd, control_fd))


def run_token(config: RunConfig) -> dict[str, str]:
    """By which the janitor knows what belongs to the run."""
    return {RUN_VARIABLE: run_id(config)}


def run_id(config: RunConfig) -> str:
    """The name of its directory: no two runs of a machine have the same."""
    return Path(config.run_dir).name


def _python(module: str) -> tuple[str, ...]:
    # -P: a file called torch.py or random.py in the user's folder must not become ours.
    return (sys.executable, "-P", "-m", module)


def _threads(threads: int) -> dict[str, str]:
    return {name: str(threads) for name in _THREAD_VARIABLES} | {"PYTHONUNBUFFERED": "1"}
