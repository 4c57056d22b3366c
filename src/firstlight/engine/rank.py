"""Entry point of an engine rank: `python -m firstlight.engine.rank --run-dir D --rank R`.

Started by `launch`. Rank 0 schedules and serves the api process; the others follow its plans. Imports torch
only after it has said so, so that a hang in that import is seen. Invariant: it never ends silently: the last
words of a failure are in the run directory and, from rank 0, at the api process.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from firstlight.base.config import RunConfig, read_config
from firstlight.base.errors import FirstlightError
from firstlight.base.failure import write_failure
from firstlight.base.phases import READY, ProgressWriter
from firstlight.engine.channel import PlanReceiver, PlanSender, RequestChannel
from firstlight.engine.messages import Drain, Failed, Progress, Ready
from firstlight.facts.checkpoint import open_checkpoint

if TYPE_CHECKING:
    import torch

    from firstlight.engine.core import EngineCore
    from firstlight.engine.plan import StepPlan
    from firstlight.engine.startup import Started
    from firstlight.ops.collectives import Group


def main() -> int:
    """Runs one rank to its end; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides; a terminal sends it to all of us
    config = read_config(arguments.run_dir)
    progress = ProgressWriter(arguments.run_dir, arguments.rank)
    try:
        if arguments.rank == 0:
            _lead(config, progress)
        else:
            _follow(config, arguments.rank, progress)
    except Exception as error:  # noqa: BLE001 - the top of the process: it becomes the last words
        write_failure(arguments.run_dir, f"rank-{arguments.rank}", error)
        code = error.exit_code if isinstance(error, FirstlightError) else FirstlightError.exit_code
        if config.debug or code == FirstlightError.exit_code:
            traceback.print_exc()  # not seen without --debug, but kept for the log of a failure
        return code
    return 0


def _lead(config: RunConfig, progress: ProgressWriter) -> None:
    channel = RequestChannel(Path(config.run_dir))

    def report(phase: str, done: int = 0, total: int = 0, unit: str = "", detail: str = "") -> None:
        progress.report(phase, done, total, unit, detail)
        channel.offer(Progress(phase, done, total, unit, detail))

    try:
        started, group = _start(config, 0, report)
        plans = PlanSender(Path(config.run_dir), group.size)

        def execute(plan: StepPlan) -> torch.Tensor:
            plans.send(plan)
            return started.runner.run(plan)

        core = started.core(execute)
        report("self-test")
        _self_test(core)
        description = started.checkpoint.description
        channel.send(Ready(started.section.max_model_len, description.vocab_size, started.report))
        progress.report(READY, detail=_explained(started.report))
        _serve(core, channel)
        plans.close()
        _leave()
    except FirstlightError as error:
        channel.offer(Failed(str(error), error.hint, error.exit_code))
        raise
    except Exception as error:
        channel.offer(Failed(f"{type(error).__name__}: {error}", "This is a bug in the engine.", 1))
        raise
    finally:
        channel.close()


def _explained(report: dict[str, Any]) -> str:
    """The start-up report for a person: what runs the model, in which layouts, and where the memory goes."""
    rows = [("backend", [report["backend"]]), ("layout", report["layouts"]), ("memory", report["memory"])]
    return "\n".join(f"  {name:<9} {note}" for name, notes in rows for note in notes)


def _serve(core: EngineCore, channel: RequestChannel) -> None:
    """The loop of a serving engine; returns after a drain."""
    drain_until_s: float | None = None
    while True:
        for message in channel.receive(wait=not core.has_work and drain_until_s is None):
            core.handle(message)
            if isinstance(message, Drain):
                drain_until_s = time.monotonic() + message.deadline_s
        if drain_until_s is not None and time.monotonic() >= drain_until_s:
            core.scheduler.abort_all()
        outputs = core.step()
        if outputs is not None:
            channel.send(outputs)
        if drain_until_s is not None and not core.has_work:
            return


def _follow(config: RunConfig, rank: int, progress: ProgressWriter) -> None:
    plans = PlanReceiver(Path(config.run_dir), rank)
    started, _ = _start(config, rank, progress.report)
    progress.report(READY)
    while (plan := plans.receive()) is not None:
        started.runner.run(plan)
    plans.close()
    _leave()


def _start(config: RunConfig, rank: int, report) -> tuple[Started, Group]:  # type: ignore[no-untyped-def]
    checkpoint = open_checkpoint(config.model.path)  # only headers
    report("imports", detail="torch")
    from firstlight.engine.startup import start
    from firstlight.ops.collectives import join

    size = config.engine.tensor_parallel
    report("rendezvous", detail=f"{size} ranks")
    rendezvous = Path(config.run_dir) / "rendezvous"
    group = join(rank, size, rendezvous, config.engine.device, config.engine.collective_deadline_s)
    return start(checkpoint, config.model.dtype, config.engine, group, report), group


def _self_test(core: EngineCore) -> None:
    from firstlight.engine.startup import self_test

    self_test(core)


def _leave() -> None:
    from firstlight.ops.collectives import leave

    leave()


def _end(exit_code: int) -> NoReturn:
    """Ends the process as it stands: gloo's threads may still wait for a rank that died, and tearing them
    down would abort instead of giving the exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    try:
        _end(main())
    except SystemExit as leaving:  # asked to by SIGTERM, or wrong arguments
        _end(leaving.code if isinstance(leaving.code, int) else 1)
