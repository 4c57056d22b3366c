"""A rank from its imports to its end: rank 0 leads, schedules and serves; the others follow its plans.

Invariant: a failure of rank 0 reaches the api process before the process ends.
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import msgspec
import torch

from firstlight.base.blackbox.layout import Counter
from firstlight.base.blackbox.writer import BlackBox
from firstlight.base.config import REPORT_FILE, EngineSection, RunConfig
from firstlight.base.errors import FirstlightError
from firstlight.base.failure import explained
from firstlight.base.heap import give_back_heap
from firstlight.base.phases import (
    COMPILE,
    DRAIN,
    READY,
    RENDEZVOUS,
    SELF_TEST,
    SERVING,
    PhaseReporter,
)
from firstlight.engine.channel import START_DEADLINE_MS, PlanReceiver, PlanSender, RequestChannel
from firstlight.engine.core import EngineCore
from firstlight.engine.messages import Drain, Failed, Profile, Ready, StartProfile, StepOutputs, StopProfile
from firstlight.engine.scheduler.plan import Recording, StepPlan
from firstlight.engine.speculation.shipped import with_shipped_drafter
from firstlight.engine.worker.drafter_trial import in_words, memory_for, try_drafter
from firstlight.engine.worker.not_numbers import Inspection
from firstlight.engine.worker.profile import Profiler, TurnTimes, obey
from firstlight.engine.worker.startup import COMPILED, Report, Started, require_numbers, self_test, start
from firstlight.engine.worker.step_times import measure_step_times
from firstlight.facts.checkpoint.checkpoint import Checkpoint
from firstlight.ops.collectives import CPU, Group, Wish, join
from firstlight.ops.cpu.library import MissingLibraryError, open_library
from firstlight.ops.cuda.step_clock import EventClock
from firstlight.ops.step_clock import Kind


def lead(config: RunConfig, checkpoint: Checkpoint, box: BlackBox) -> None:
    """Rank 0 until it is drained."""
    run_dir = Path(config.run_dir)
    channel = RequestChannel(run_dir)
    report = PhaseReporter(box).report
    try:
        started, group = _start(config, checkpoint, 0, box, report)
        plans = PlanSender(run_dir, group.size)

        profiler = Profiler(group, plans.send)

        def execute(plan: StepPlan) -> torch.Tensor:
            profiler.saw(plan)
            plans.send(plan)
            return started.runner.run(plan)

        core = started.core(execute, box)
        report(SELF_TEST, 0, 1, "tokens")
        inspection = Inspection(started.checkpoint)
        self_test(core, inspection, report)
        report(SELF_TEST, 1, 1, "tokens")
        description = started.checkpoint.description
        times_s = measure_step_times(core, description.vocab_size)
        core.begin(times_s)
        trial = try_drafter(core, description.bos_token_id, memory_for(started))
        if trial is not None:
            said = in_words(trial)
            started.report["drafter_trial"] = trial
            started.report["drafter_notes"].append(f"tried at the start: {said}")
            report(SELF_TEST, detail=said)
        require_numbers(core, inspection, report)
        started.report["step_ms"] = {str(rows): round(1e3 * seconds, 3) for rows, seconds in times_s.items()}
        (run_dir / REPORT_FILE).write_bytes(msgspec.json.encode(started.report))
        give_back_heap()
        # Before the message: the api process may come late, and a rank that waits for it is no stall.
        report(READY)
        channel.send(
            Ready(started.section.max_model_len, description.vocab_size, started.report), START_DEADLINE_MS
        )
        _serve(core, channel, profiler, report, _Watch(core, inspection, channel, config.server.drain_s))
        plans.close()
        group.leave()
    except FirstlightError as error:
        channel.offer(Failed(str(error), error.hint, error.exit_code))
        raise
    except Exception as error:
        channel.offer(Failed(*explained(error), 1))
        raise
    finally:
        channel.close()


def follow(config: RunConfig, checkpoint: Checkpoint, rank: int, box: BlackBox) -> None:
    """Another rank until rank 0 says that the run is over."""
    plans = PlanReceiver(Path(config.run_dir), rank)
    report = PhaseReporter(box).report
    started, group = _start(config, checkpoint, rank, box, report)
    turns, is_recording = TurnTimes(group), False
    give_back_heap()
    report(READY)
    num_steps = 0
    while (message := group.clock.run(Kind.WAITING, plans.receive)) is not None:
        if isinstance(message, Recording):
            is_recording = obey(message, turns)
            continue
        if not num_steps:
            report(SERVING, unit="steps")
        started.runner.run(message)
        num_steps += 1
        box.set(Counter.STEP, num_steps)
        if is_recording:
            turns.end_turn()
    plans.close()
    group.leave()


def _start(
    config: RunConfig, checkpoint: Checkpoint, rank: int, box: BlackBox, report: Report
) -> tuple[Started, Group]:
    section = config.engine
    device = torch.device("cuda", rank) if section.device == "cuda" else CPU
    group = Group(rank, section.tensor_parallel, section.collective_deadline_s, device, box)
    if section.device == "cuda":
        group.clock = EventClock()
    report(RENDEZVOUS, 0, group.size, "ranks")
    join(
        group,
        Path(config.run_dir) / "rendezvous",
        Wish(section.device, section.collectives, lambda: _library(section, report)),
        lambda arrived: report(RENDEZVOUS, arrived, group.size, "ranks"),
    )
    report(RENDEZVOUS, group.size, group.size, "ranks")
    section, note = with_shipped_drafter(section, checkpoint)
    started = start(checkpoint, config.model.dtype, section, group, report)
    if note is not None:
        started.report["drafter_notes"] = [note, *started.report.get("drafter_notes", ())]
    return started, group


def _library(section: EngineSection, report: Report) -> ctypes.CDLL:
    """The native library for sharing memory, unless nothing of ours shall run."""
    if section.cpu_kernels == "stock" and section.collectives == "auto":
        raise MissingLibraryError("--cpu-kernels stock was given")
    return open_library(lambda done, total: report(COMPILE, done, total, "files", COMPILED))


class _Watch:
    """Over logits that are not numbers, while the engine serves.

    The first ones have the weights looked at in a thread. Where a weight is to blame nothing new is taken,
    and what runs has `drain_s` seconds to end, as when the server is stopped.
    """

    def __init__(
        self, core: EngineCore, inspection: Inspection, channel: RequestChannel, drain_s: float
    ) -> None:
        self._core, self._inspection, self._channel = core, inspection, channel
        self._drain_s = drain_s

    def explain(self, outputs: StepOutputs) -> None:
        """Says in errors what was found, once it is known."""
        if outputs.stats.num_not_numbers and self._inspection.is_done:
            for output in outputs.outputs:
                output.error = output.error and self._inspection.explain(output.error)

    def until(self, drain_until_s: float | None, num_not_numbers: int) -> float | None:
        """When the engine ends at the latest, after a step; None: it does not."""
        if num_not_numbers:
            self._inspection.begin(self._channel.wake)
        fault = self._inspection.fault
        if fault is None or self._core.closed is not None:
            return drain_until_s
        self._core.closed = str(fault)
        own_s = time.monotonic() + self._drain_s
        return own_s if drain_until_s is None else min(own_s, drain_until_s)

    def raise_fault(self) -> None:
        """Once all has ended: the error about the weights, if that is why."""
        if self._core.closed is not None and self._inspection.fault is not None:
            raise self._inspection.fault


def _serve(
    core: EngineCore, channel: RequestChannel, profiler: Profiler, report: Report, watch: _Watch
) -> None:
    """The loop of a serving engine; returns after a drain. Raises `ModelFileError` for weights that are not
    numbers, when what ran has ended."""
    drain_until_s: float | None = None
    report(SERVING, unit="steps")
    while True:
        for message in profiler.receive(channel.receive, not core.has_work and drain_until_s is None):
            if isinstance(message, StartProfile | StopProfile):
                _offer(channel, profiler.handle(message))
                continue
            core.handle(message)
            if isinstance(message, Drain):
                drain_until_s = time.monotonic() + message.deadline_s
                report(DRAIN, unit="steps")
        if drain_until_s is not None and time.monotonic() >= drain_until_s:
            core.scheduler.abort_all()
        outputs = core.step()
        if outputs is not None:
            watch.explain(outputs)
            channel.send(outputs)
        _offer(channel, profiler.end_turn())
        drain_until_s = watch.until(drain_until_s, 0 if outputs is None else outputs.stats.num_not_numbers)
        if drain_until_s is not None and not core.has_work:
            watch.raise_fault()
            return


def _offer(channel: RequestChannel, profile: Profile | None) -> None:
    if profile is not None:
        channel.send(profile)
