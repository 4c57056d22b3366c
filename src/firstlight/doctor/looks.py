"""Which looks a case has, and how to take one that it has not.

Pure. Invariant: a look counts as taken only when it covers what it is about: stacks of one rank of two are no
stacks of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from firstlight.doctor.case.evidence import Case
from firstlight.doctor.case.target import RUN
from firstlight.doctor.case.values_host import (
    CgroupMemory,
    CheckpointFiles,
    FileLocks,
    Generation,
    Gpus,
    NcclRas,
    Sockets,
)
from firstlight.doctor.case.values_process import (
    BlackBoxSeen,
    Environment,
    ExitRecord,
    InputOutput,
    LogTail,
    ProcessState,
    PythonStacks,
    Threads,
)
from firstlight.doctor.hypothesis import Look

_NUM_LOOKS = 3
# What it is, and what takes it by hand where the doctor cannot.
TEXTS: dict[Look, tuple[str, str]] = {
    Look.RANKS: (
        "which ranks are alive, of how many, and how much processor time each uses between two looks",
        "`ps -eLo pid,tid,stat,cputimes,comm` twice, 2 s apart, the whole list; `pgrep -af 'scheduler|Worker|"
        "EngineCore|engine.rank'` against the parallel size",
    ),
    Look.MOTION: (
        "processor time of each thread between two looks",
        "`ps -eLo pid,tid,stat,cputimes,comm` twice, 2 s apart (%CPU is the mean of a whole life)",
    ),
    Look.BYTES: (
        "bytes read and major faults of each process between two looks",
        "`cat /proc/PID/io; cut -d' ' -f12 /proc/PID/stat` twice, some seconds apart",
    ),
    Look.STACKS: ("the Python stacks of all ranks", "`py-spy dump --nonblocking --pid PID` for every rank"),
    Look.COLLECTIVES: (
        "which collective each rank is in",
        "our ranks: `firstlight blackbox`; NCCL's: its own view, as below",
    ),
    Look.EXITS: (
        "how processes that are gone have ended",
        "the launcher's log, `journalctl -k | grep -i 'killed process'`, `dmesg`",
    ),
    Look.LOGS: ("the log of every rank", "the server's standard output and error, all of it"),
    Look.LOCKS: (
        "lock files and who holds them",
        "`cat /proc/locks`; `find ~/.cache -name '*lock*' -newermt '-1 day'`",
    ),
    Look.FILES: ("whether the checkpoint's files are whole", "`firstlight doctor` where the files are"),
    Look.SOCKETS: ("the sockets of the processes", "`ss -tnap`"),
    Look.MEMORY: (
        "memory limits, and what the control group counted",
        "`cat /sys/fs/cgroup/.../memory.{max,current,events,pressure}`",
    ),
    Look.GPUS: (
        "utilisation, power and memory of each GPU",
        "`nvidia-smi -l 2 --format=csv --query-gpu=utilization.gpu,utilization.memory,power.draw`",
    ),
    Look.RAS: (
        "NCCL's own view of its ranks",
        "`printf 'CLIENT PROTOCOL 2\\nVERBOSE STATUS\\n' | nc localhost 28028`",
    ),
    Look.GENERATION: ("whether one token is generated", "`firstlight doctor --generate`"),
    Look.ENVIRONMENT: ("the environment of the processes", "`tr '\\0' '\\n' < /proc/PID/environ`"),
}


def is_taken(case: Case, look: Look) -> bool:
    """Whether the case has it."""
    return _TAKEN[look](case)


def _ranks(case: Case) -> bool:
    return case.target.is_complete and _motion(case)


def _motion(case: Case) -> bool:
    keys = _keys(case)
    return bool(keys) and all(case.pair(Threads, key) or case.pair(ProcessState, key) for key in keys)


def _bytes(case: Case) -> bool:
    keys = _keys(case)
    return bool(keys) and all(case.pair(InputOutput, key) and case.pair(ProcessState, key) for key in keys)


def _stacks(case: Case) -> bool:
    keys = _keys(case)
    return case.target.is_complete and bool(keys) and all(case.seen(PythonStacks, key) for key in keys)


def _collectives(case: Case) -> bool:
    return any(seen.value.box.rank is not None for seen in case.all(BlackBoxSeen)) or _ras(case)


def _ras(case: Case) -> bool:
    return bool(case.all(NcclRas))


def _exits(case: Case) -> bool:
    """Nobody can be gone when all that there should be are there."""
    target = case.target
    everyone = target.is_complete and target.expected_ranks == len(target.ranks)
    return everyone or bool(case.all(ExitRecord))


def _gpus(case: Case) -> bool:
    return any(seen.value.gpus for seen in case.all(Gpus))


def _keys(case: Case) -> list[str]:
    return [process.key for process in case.target.ranks] or [
        process.key for process in case.target.processes
    ]


_TAKEN: dict[Look, Callable[[Case], bool]] = {
    Look.RANKS: _ranks,
    Look.MOTION: _motion,
    Look.BYTES: _bytes,
    Look.STACKS: _stacks,
    Look.COLLECTIVES: _collectives,
    Look.RAS: _ras,
    Look.EXITS: _exits,
    Look.GPUS: _gpus,
    Look.LOGS: lambda case: bool(case.all(LogTail)),
    Look.LOCKS: lambda case: case.seen(FileLocks, RUN) is not None,
    Look.FILES: lambda case: bool(case.all(CheckpointFiles)),
    Look.SOCKETS: lambda case: case.seen(Sockets, RUN) is not None,
    Look.MEMORY: lambda case: bool(case.all(CgroupMemory)),
    Look.GENERATION: lambda case: bool(case.all(Generation)),
    Look.ENVIRONMENT: lambda case: bool(case.all(Environment)),
}


def decisive(case: Case, open_causes: Sequence[Sequence[Look]]) -> tuple[Look, ...]:
    """The looks that together decide the most between causes that are left; of equals the cheaper one.

    `open_causes`: for each cause, the likeliest first, the looks that it had to do without.
    """
    order = list(TEXTS)
    missing = [look for look in order if not is_taken(case, look)]
    if Look.RANKS in missing and Look.MOTION in missing:
        missing.remove(Look.MOTION)  # the look at the ranks is one at their processor time too
    # The first causes count most, and each look that concerns a cause halves what another one adds.
    values = [1 / (index + 2) for index in range(len(open_causes))]
    chosen: list[Look] = []
    while missing and len(chosen) < _NUM_LOOKS:
        gains = {look: _gain(open_causes, values, look) for look in missing}
        best = max(missing, key=lambda look: (gains[look], -order.index(look)))
        if not gains[best]:
            break
        chosen.append(best)
        missing.remove(best)
        values = [
            value / 2 if best in looks else value for looks, value in zip(open_causes, values, strict=True)
        ]
    return tuple(chosen)


def _gain(open_causes: Sequence[Sequence[Look]], values: Sequence[float], look: Look) -> float:
    """What a look adds to a decision between these."""
    return sum(value for looks, value in zip(open_causes, values, strict=True) if look in looks)
