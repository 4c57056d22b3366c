"""What moved between the two looks: useful progress and processor time, of one process.

Pure. Useful progress is the odometer, the step counter, bytes read, major faults and living compilers;
processor time alone is none. Invariant: every progress names the evidence it was computed from.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from firstlight.doctor.case.evidence import Case
from firstlight.doctor.case.target import RUN, Engine, Role
from firstlight.doctor.case.values_host import Compilers, Gpus, RequestLoad
from firstlight.doctor.case.values_process import BlackBoxSeen, InputOutput, ProcessState, Threads
from firstlight.doctor.motion.gpu_pattern import Load, Pattern, gpu_pattern

# Less than this is what any event loop reads of its own pipes, or a page that came back from swap.
_MIN_READ_BYTES_PER_S = 4096
_MIN_CALL_BYTES_PER_S = 65536
_MIN_FAULTS_PER_S = 2.0


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that moved: "phase", "odometer", "steps", "operators", "tokens", "bytes read",
    "major faults", "GPU work", "compilers"."""

    what: str
    per_s: float
    detail: str
    evidence: tuple[str, ...]


class ProcessorUse(msgspec.Struct, frozen=True, kw_only=True):
    """Cores used between the looks: of all threads, and of the busiest one.

    `wanted`: also counts time in the queue for a processor; on a crowded machine a loop that spins uses less
    than it asks for.
    """

    cores: float
    busiest: float
    wanted: float
    evidence: tuple[str, ...]

    @property
    def crowding(self) -> float:
        """How many times longer its work takes because others use the processors."""
        return max(1.0, self.wanted / self.cores) if self.cores else 1.0


def progress_of(case: Case, key: str) -> tuple[Progress, ...]:
    """All useful progress of one process; empty when nothing moved, or when there was one look only."""
    read = (*_of_reads(case, key), *_of_faults(case, key)) if _reads_for_a_start(case, key) else ()
    return (
        *_of_box(case, key),
        *read,
        *_of_compilers(case, key),
        *_of_tokens(case, key),
        *_of_gpus(case, key),
    )


def _reads_for_a_start(case: Case, key: str) -> bool:
    """Whether what a process reads brings the start on: a supervisor that looks into /proc, or an api process
    that is asked for its health, reads all the time. Before there are ranks, it may be a download.
    """
    process = case.target.process(key)
    if process is None or process.role not in (Role.SUPERVISOR, Role.JANITOR, Role.API):
        return True
    is_ours = case.target.engine is Engine.NATIVE or process.role is not Role.API
    return not (is_ours and case.target.ranks)


def processor_use(case: Case, key: str) -> ProcessorUse | None:
    """None when there were not two looks at its threads or at the whole process."""
    threads = case.pair(Threads, key)
    if threads is None:
        whole = case.pair(ProcessState, key)
        if whole is None or whole.second.value.is_gone:
            return None
        cores = max(0.0, whole.second.value.cpu_s - whole.first.value.cpu_s) / whole.seconds
        return ProcessorUse(cores=cores, busiest=cores, wanted=cores, evidence=whole.ids)
    before = {thread.tid: thread.cpu_s for thread in threads.first.value.threads}
    used = [max(0.0, thread.cpu_s - before.get(thread.tid, 0.0)) for thread in threads.second.value.threads]
    queued = sum(thread.queued_s for thread in threads.second.value.threads if thread.tid in before)
    queued -= sum(thread.queued_s for thread in threads.first.value.threads)
    return ProcessorUse(
        cores=sum(used) / threads.seconds,
        busiest=max(used, default=0.0) / threads.seconds,
        wanted=(sum(used) + max(0.0, queued)) / threads.seconds,
        evidence=threads.ids,
    )


def heart_beats(case: Case, key: str) -> bool | None:
    """Whether the event loop of a process without a rank turned between the looks; None: it does not count.

    Such a process counts its turns where a rank counts its steps: a sign of life, but no progress.
    """
    pair = case.pair(BlackBoxSeen, key)
    if pair is None or pair.second.value.box.rank is not None or not pair.first.value.box.step:
        return None
    return pair.first.value.box.step < pair.second.value.box.step


def _of_box(case: Case, key: str) -> Iterator[Progress]:
    pair = case.pair(BlackBoxSeen, key)
    if pair is None:
        return
    first, second = pair.first.value.box, pair.second.value.box
    if first.step < second.step and second.rank is not None:
        steps = second.step - first.step
        yield Progress(
            what="steps", per_s=steps / pair.seconds, detail=f"{steps} engine steps", evidence=pair.ids
        )
    elif first.operator.name and second.operator.name and first.operator != second.operator:
        detail = f"within a step: operator {second.operator.name!r} of layer {second.operator.layer}"
        yield Progress(what="operators", per_s=1 / pair.seconds, detail=detail, evidence=pair.ids)
    if first.phase is None or second.phase is None:
        return
    if first.phase.number != second.phase.number:
        detail = f"from phase {first.phase.name} to {second.phase.name}"
        yield Progress(what="phase", per_s=1 / pair.seconds, detail=detail, evidence=pair.ids)
        return
    done = second.phase.odometer.done - first.phase.odometer.done
    if done > 0:
        unit = second.phase.odometer.unit or "units"
        detail = f"{done} {unit} in phase {second.phase.name}"
        yield Progress(what="odometer", per_s=done / pair.seconds, detail=detail, evidence=pair.ids)


def _of_reads(case: Case, key: str) -> Iterator[Progress]:
    pair = case.pair(InputOutput, key)
    if pair is None:
        return
    first, second = pair.first.value, pair.second.value
    from_device = (second.read_bytes - first.read_bytes) / pair.seconds
    by_calls = (second.rchar - first.rchar) / pair.seconds
    if from_device >= _MIN_READ_BYTES_PER_S or by_calls >= _MIN_CALL_BYTES_PER_S:
        per_s = max(from_device, by_calls)
        detail = f"{per_s / 1e6:.2f} MB/s read"
        yield Progress(what="bytes read", per_s=per_s, detail=detail, evidence=pair.ids)


def _of_faults(case: Case, key: str) -> Iterator[Progress]:
    pair = case.pair(ProcessState, key)
    if pair is None:
        return
    per_s = (pair.second.value.major_faults - pair.first.value.major_faults) / pair.seconds
    if per_s >= _MIN_FAULTS_PER_S:
        detail = f"{per_s:.0f} pages a second read through a mapping"
        yield Progress(what="major faults", per_s=per_s, detail=detail, evidence=pair.ids)


def _of_tokens(case: Case, key: str) -> Iterator[Progress]:
    """Tokens that a foreign engine has counted; which of its processes made them, nobody says."""
    pair, process = case.pair(RequestLoad, RUN), case.target.process(key)
    is_worker = process is not None and process.role in (Role.RANK, Role.ENGINE)
    if pair is None or not is_worker or case.seen(BlackBoxSeen, key) is not None:
        return
    before, after = pair.first.value.tokens, pair.second.value.tokens
    if before is not None and after is not None and after > before:
        tokens = after - before
        yield Progress(
            what="tokens", per_s=tokens / pair.seconds, detail=f"{tokens} tokens", evidence=pair.ids
        )


def _of_gpus(case: Case, key: str) -> Iterator[Progress]:
    """A GPU of the process that computes, by its power above idle: a kernel that only spins is none.

    Only where all of them compute: one alone may work for ever on what the others do not come to.
    """
    looks = case.all(Gpus)
    if len({seen.evidence.look for seen in looks}) < 2:
        return
    found = gpu_pattern(case)
    for reading in found.readings if found.pattern is Pattern.COMPUTING else ():
        if reading.load is Load.COMPUTING and key in reading.owners:
            detail = f"GPU {reading.index} computes at {reading.power_w or 0:.0f} W"
            ids = tuple(seen.id for seen in looks[-2:])
            yield Progress(what="GPU work", per_s=reading.power_w or 0.0, detail=detail, evidence=ids)


def _of_compilers(case: Case, key: str) -> Iterator[Progress]:
    """Compilers that used the processor between the looks, or that came or went."""
    pair = case.pair(Compilers, RUN)
    if pair is None:
        return
    before = {compiler.pid: compiler.cpu_s for compiler in pair.first.value.running if compiler.parent == key}
    after = {compiler.pid: compiler for compiler in pair.second.value.running if compiler.parent == key}
    used_s = sum(max(0.0, compiler.cpu_s - before.get(pid, 0.0)) for pid, compiler in after.items())
    if used_s / pair.seconds < 0.01 and before.keys() == after.keys():
        return
    names = ", ".join(sorted({compiler.name for compiler in after.values()})) or "compilers that ended"
    detail = f"{len(after)} running ({names}), {used_s / pair.seconds:.2f} cores"
    yield Progress(what="compilers", per_s=used_s / pair.seconds, detail=detail, evidence=pair.ids)
