"""All patients, each at several seeds, and the confusion matrix of the doctor: `make patients`.

`python -m patients.run [--kinds a,b] [--seeds 5] [--healthy 50] [--short]`. Writes all results as JSON into a
folder that Git ignores. Invariant: a patient that this machine cannot have, or that could not be made, is
told in the report; it is never counted as right.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from patients.kinds import KINDS
from patients.models import provide
from patients.one import Result
from patients.patient import HERE, SOURCES
from patients.report import report, report_kinds, report_own

OUTPUT = HERE.parents[1] / "build" / "patients"
# Ten kinds that are well, each looked at fifty times in the full run.
OFTEN = (
    ("idle", "idle-ranks", "idle-foreign", "loaded", "long-prefill", "drained", "slow-reader")
    + ("was-debugged", "stopped-and-continued", "log-buffered")
)  # fmt: skip
# Kinds of ours whose supervisor shall say by itself what is wrong.
OWN = (
    ("stopped-serving", "lock-order", "gil-held", "scheduler-spins", "rank-killed-serving", "rank-crashed")
    + ("collective-n-1", "collectives-differ", "rendezvous-elsewhere", "stale-jit-lock", "flock-held")
)  # fmt: skip
LOOKS = 5  # at one server that stays as it is
_DEADLINE_S = 150.0


class Order(msgspec.Struct, frozen=True):
    """One patient to make, and how often it is looked at."""

    kind: str
    seed: int
    looks: int = 1
    is_own: bool = False
    by_command: bool = False  # `firstlight doctor` is run, instead of calling what it calls


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 when the figures that are asked for were reached."""
    given = _parse(arguments)
    chosen = [name for name in given.kinds.split(",") if name]
    if given.healthy is None:
        given.healthy = 0 if chosen or given.short else 50
    kinds = chosen or [name for name, kind in KINDS.items() if kind.is_quick or not given.short]
    if given.own:
        kinds = [name for name in kinds if name in OWN]
    if given.list:
        return report_kinds(KINDS[name] for name in kinds)
    unknown = [name for name in kinds if name not in KINDS]
    if unknown:
        sys.exit(f"there is no kind {', '.join(unknown)}; there are: {', '.join(KINDS)}")
    models = provide(given.output / "models")
    orders = [
        Order(kind, seed, is_own=given.own, by_command=given.by_command)
        for seed in range(given.first, given.first + given.seeds)
        for kind in kinds
    ]
    if not given.own:
        orders += [order for kind in kinds if kind in OFTEN for order in _often(kind, given)]
    started_s = time.monotonic()
    results: list[Result] = []
    path = given.output / f"results-{time.strftime('%Y%m%d-%H%M%S')}.json"
    with ThreadPoolExecutor(max_workers=given.parallel) as pool:
        work = pool.map(lambda order: run_order(order, models, given.output / "cases"), orders)
        for number, found in enumerate(work, 1):
            results += found
            for result in found:
                _tell(number, len(orders), result)
            path.write_bytes(msgspec.json.format(msgspec.json.encode(results)))  # for who breaks it off
    print(f"\n{len(results)} looks in {time.monotonic() - started_s:.0f} s; all of them: {path}\n")
    return report_own(results) if given.own else report(results, KINDS)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="patients", description=__doc__)
    parser.add_argument("--kinds", default="", help="only these, with commas")
    parser.add_argument("--seeds", type=int, default=5, help="patients of each kind")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    parser.add_argument("--first", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--healthy", type=int, help="looks at each of ten healthy kinds; 50 in the whole")
    parser.add_argument("--own", action="store_true", help="the supervisor's own verdict on eleven kinds")
    parser.add_argument("--short", action="store_true", help="only the quick kinds")
    parser.add_argument("--by-command", action="store_true", help="run `firstlight doctor` on each")
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    return parser.parse_args(arguments)


def _often(kind: str, given: argparse.Namespace) -> Iterator[Order]:
    """What is missing to the looks that are asked for; several at one server that stays as it is."""
    looks = LOOKS if KINDS[kind].is_steady else 1
    missing, seed = given.healthy - given.seeds, given.first + given.seeds
    while missing > 0:
        yield Order(kind, seed, min(looks, missing))
        missing, seed = missing - looks, seed + 1


def run_order(order: Order, models: Path, cases: Path) -> list[Result]:
    """Makes it in a process of its own, so that one that hangs or crashes spoils no other."""
    command = [sys.executable, "-m", "patients.one", order.kind, str(order.seed)]
    command += ["--models", str(models), "--cases", str(cases), "--looks", str(order.looks)]
    command += ["--own"] if order.is_own else []
    command += ["--by-command"] if order.by_command else []
    variables = {"PYTHONPATH": f"{SOURCES}:{HERE.parent}"}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S + 10 * order.looks,
            env={**os.environ, **variables},
            check=False,
        )
        results = [msgspec.json.decode(row, type=Result) for row in done.stdout.splitlines()]
        problem = done.stderr[-1500:]
    except subprocess.TimeoutExpired:
        results, problem = [], "it did not end in time"
    return results or [Result(kind=order.kind, seed=order.seed, error=problem or "it said nothing")]


def _tell(number: int, total: int, result: Result) -> None:
    said = f"{result.condition}/{result.cause} ({result.grade}) in {result.seconds:.1f} s"
    if result.missing:
        said = f"not run: {result.missing}"
    elif result.error:
        said = f"could not be made: {result.error.splitlines()[-1][:150]}"
    mark = "ok " if result.is_right else "   " if result.missing else "BAD"
    extra = "" if result.holds is not False else " [the evidence does not show the fault]"
    print(f"{number:4d}/{total} {mark} {result.kind:28s} {result.seed:2d} {said}{extra}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
