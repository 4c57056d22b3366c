"""Limits that were reached: open files, threads, shared memory.

Invariant: a limit is named with what is used of it.
"""

from __future__ import annotations

from firstlight.base.failure import ADDRESS_SPACE
from firstlight.doctor.case.values_host import CgroupPids, FreeSpace
from firstlight.doctor.case.values_process import ExitRecord, Limits
from firstlight.doctor.case.view import View
from firstlight.doctor.hypotheses.texts import stated
from firstlight.doctor.hypothesis import Card, Clue, Condition, Hypothesis, Judgement, Look, Weight, same
from firstlight.doctor.motion.motion import State

_SMALL_SHM_BYTES = 1 << 30
_SIGBUS = 7


def _limit(view: View) -> Judgement | None:
    words = stated(
        view,
        r"pthread_create failed",
        r"can't start new thread",
        r"Too many open files",
        r"EMFILE",
        r"Resource temporarily unavailable",
        r"RLIMIT_NPROC",
    )
    if words and stated(view, ADDRESS_SPACE):
        words = None  # the threads had no memory for their stacks
    clues = [words[0]] if words else []
    subject = words[1] if words else None
    for seen in view.case.all(Limits):
        value = seen.value
        if value.max_open_files and (value.num_open_files or 0) >= value.max_open_files * 0.97:
            text = f"{seen.subject} has {value.num_open_files} of {value.max_open_files} open files"
            clues.append(Clue(text=text, evidence=(seen.id,), weight=Weight.STRONG, group="files"))
            subject = subject or seen.subject
        if value.max_processes and (value.num_user_threads or 0) >= value.max_processes * 0.97:
            text = f"the user has {value.num_user_threads} of {value.max_processes} threads"
            clues.append(Clue(text=text, evidence=(seen.id,), weight=Weight.STRONG, group="threads"))
    for pids in view.case.all(CgroupPids):
        if pids.value.denied:
            text = f"control group {pids.value.path} refused {pids.value.denied} new threads"
            clues.append(Clue(text=text, evidence=(pids.id,), weight=Weight.STRONG, group="threads"))
    if not clues:
        return None
    return Judgement(
        supports=tuple(clues),
        subject=subject,
        condition=Condition.DEAD if view.motion.state in (State.DEAD, State.ZOMBIE) else Condition.STUCK,
        summary=f"a limit of files, threads or processes is reached: {clues[0].text}.",
    )


LIMIT = Hypothesis(
    Card(
        cause="process-limit",
        title="a limit of open files, threads or processes is reached",
        condition=Condition.DEAD,
        signs=("pthread_create, EAGAIN, EMFILE", "open files or threads at their limit", "pids.events max"),
        vetoes=("all limits are far",),
        next_test="`cat /proc/PID/limits`; `ls /proc/PID/fd | wc -l`; `cat /sys/fs/cgroup/.../pids.max`.",
        remedies=same(
            "raise it (`ulimit -n 65536`, `ulimit -u`, --pids-limit); OMP_NUM_THREADS lowers threads. "
            "A thread's stack counts too where `ulimit -v` limits the address space."
        ),
        looks=(Look.LOGS, Look.EXITS),
    ),
    _limit,
)


def _shm(view: View) -> Judgement | None:
    spaces = [seen for seen in view.case.all(FreeSpace) if seen.value.purpose == "shm"]
    words = stated(
        view,
        r"No space left on device.*(shm|/dev)",
        r"shared memory segment",
        r"unable to .*shared memory",
        r"insufficient shared memory",
        r"/dev/shm.*(No space|too small)",
    )
    full = next(
        (s for s in spaces if s.value.total_bytes < _SMALL_SHM_BYTES or s.value.free_bytes < 1 << 20), None
    )
    bus = [seen for seen in view.case.all(ExitRecord) if seen.value.signal == _SIGBUS]
    if words is None and full is None:
        return None
    clues = [words[0]] if words else []
    if full is not None:
        free, total = full.value.free_bytes >> 20, full.value.total_bytes >> 20
        text = f"{full.value.path} has {free} MiB free of {total} MiB"
        clues.append(Clue(text=text, evidence=(full.id,), weight=Weight.SOME, group="space"))
    if bus and full is not None:
        text = f"{bus[0].value.name} ended by SIGBUS, as on a shared memory file without room"
        clues.append(Clue(text=text, evidence=(bus[0].id,), weight=Weight.STRONG))
    return Judgement(
        supports=tuple(clues),
        subject=words[1] if words else bus[0].subject if bus else None,
        summary=f"/dev/shm is too small: {clues[0].text}.",
    )


SHM = Hypothesis(
    Card(
        cause="shm-too-small",
        title="/dev/shm is too small",
        condition=Condition.DEAD,
        signs=("`Error while creating shared memory segment`, SIGBUS", "/dev/shm below 1 GB (docker: 64 MB)"),
        vetoes=("/dev/shm is large",),
        next_test="`df -h /dev/shm` inside the container.",
        remedies=same(
            "`docker run --shm-size 16g` (or `--ipc=host`; in Kubernetes an emptyDir of medium Memory)."
        ),
        looks=(Look.LOGS, Look.EXITS),
    ),
    _shm,
)


HYPOTHESES = (LIMIT, SHM)
