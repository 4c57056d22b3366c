"""Processes that ended for want of memory: killed by the kernel, or refused what they asked for.

Invariant: a death is called one "for want of memory" only with the kernel's word for it, or with the
process's own.
"""

from __future__ import annotations

import re

from firstlight.doctor.case.values_device import KernelLog
from firstlight.doctor.case.values_host import CgroupMemory
from firstlight.doctor.case.view import View
from firstlight.doctor.hypotheses.deaths import dead_ones, untold_ends
from firstlight.doctor.hypotheses.texts import stated
from firstlight.doctor.hypothesis import (
    Card,
    Clue,
    Condition,
    Hypothesis,
    Judgement,
    Look,
    Remedies,
    Weight,
    same,
)
from firstlight.doctor.motion.states import GONE
from firstlight.doctor.report import describe
from firstlight.doctor.servers.procfs import TICKS_PER_S

_MEMORY_WORDS = (
    r"(?<!OutOf)MemoryError",  # torch.OutOfMemoryError is of a GPU
    r"Cannot allocate memory",
    r"can't allocate memory",
    r"std::bad_alloc",
    r"failed to map segment from shared object",
)
_KILL = 9
_OOM_LINE = re.compile(r"^(?:\[ *([0-9.]+)\])?.*Killed process (\d+)")
_CLOCKS_APART_S = 5.0  # the kernel's log and process starts are on different clocks


def _oom_growth(view: View) -> Clue | None:
    """The kernel's count of OOM kills in a control group of the server, since the group was made."""
    for seen in view.case.all(CgroupMemory):
        if seen.value.oom_kills:
            text = f"{seen.value.oom_kills} OOM kills in control group {seen.value.path}"
            weight = Weight.STRONG if seen.value.path != "/" else Weight.SOME
            return Clue(text=text, evidence=(seen.id,), weight=weight, group="oom")
    return None


def _kernels_word(view: View) -> tuple[Clue, str] | None:
    """A line of the kernel's log that names a process of the server."""
    for seen in view.case.all(KernelLog):
        for line in reversed(seen.value.lines):
            match = _OOM_LINE.search(line)
            key = next((k for k in view.case.subjects if match and _is_of(view, k, match)), None)
            if key is not None and (one := view.motion.of(key)) is not None and one.state in GONE:
                text = f"the kernel's log: {line[:160]}"
                return Clue(text=text, evidence=(seen.id,), weight=Weight.PROOF, group="oom"), key
    return None


def _is_of(view: View, key: str, line: re.Match[str]) -> bool:
    """Whether a line is about this process, and not about one that had its number before."""
    process, seen = view.case.target.process(key), view.box(key)
    ticks = process.start_ticks if process else seen.value.box.start_ticks if seen else 0
    return view.pid(key) == int(line[2]) and float(line[1] or "inf") >= ticks / TICKS_PER_S - _CLOCKS_APART_S


def _oom(view: View) -> Judgement | None:
    records = untold_ends(view)
    dead = dead_ones(view)
    if kernel := _kernels_word(view):
        clue, killed = kernel
        name = describe.named(view, killed)
        summary = f"the kernel killed {name} for want of memory{describe.where(view, killed)}."
        return Judgement(supports=(clue,), subject=killed, summary=summary)
    if not dead and not records and view.motion.living_ranks == view.motion.expected_ranks:
        veto = Clue(text="all ranks are alive", evidence=view.motion.evidence[:4])
        return Judgement(vetoes=(veto,))
    supports: list[Clue] = []
    subject: str | None = None
    for seen in records:
        if seen.value.is_oom:
            text = f"{seen.value.name} was killed by signal 9 while the kernel counted an OOM kill"
            supports.append(Clue(text=text, evidence=(seen.id,), weight=Weight.PROOF))
            subject = seen.subject
        elif seen.value.signal == _KILL and seen.value.is_oom is None:
            text = f"{seen.value.name} was killed by signal 9, and nothing tells by whom"
            supports.append(Clue(text=text, evidence=(seen.id,), weight=Weight.WEAK))
            subject = subject or seen.subject
    growth = _oom_growth(view)
    line = view.find_line(r"Out of memory: Killed process", r"oom-kill:", r"exit code -9", r"signal 9")
    if line and not supports:
        supports.append(Clue(text=line.text[:200], evidence=(line.evidence,), weight=Weight.WEAK))
    denied = [seen for seen in records if seen.value.signal == _KILL and seen.value.is_oom is False]
    if denied and not any(seen.value.is_oom for seen in records):
        text = "killed by signal 9, but the kernel counted no OOM kill"
        return Judgement(vetoes=(Clue(text=text, evidence=(denied[0].id,)),))
    if growth and (supports or dead):
        supports.append(growth)
    subject = subject or (dead[0].key if dead else None)
    name = describe.title(subject) if subject else "a rank"
    return Judgement(
        supports=tuple(supports),
        subject=subject,
        summary=f"the kernel killed {name} for want of memory.",
    )


OOM = Hypothesis(
    Card(
        cause="oom-killed",
        prior=5,
        title="the kernel killed a process for want of memory",
        condition=Condition.DEAD,
        signs=(
            "oom_kill of the control group's memory.events rose",
            "the process ended by signal 9 that nobody of ours sent",
            "fewer ranks than expected, the others in a pipe read or a collective",
        ),
        vetoes=("all ranks are alive", "signal 9 with no OOM kill counted"),
        next_test="`cat /sys/fs/cgroup/.../memory.events`; `journalctl -k | grep -i 'killed process'`.",
        remedies=Remedies(
            native="lower `--memory-fraction`, `--kv-memory` or `--max-model-len`, or give it more memory.",
            vllm="lower `--max-model-len` or `--cpu-offload-gb`, load with fewer workers "
            "(`--max-parallel-loading-workers 1`), MAX_JOBS=2 while kernels are compiled.",
            sglang="lower `--mem-fraction-static`, leave out `--enable-hierarchical-cache` and "
            "`--cpu-offload-gb`, MAX_JOBS=2 while kernels are compiled.",
        ),
        looks=(Look.RANKS, Look.EXITS, Look.MEMORY),
    ),
    _oom,
)


def _memory(view: View) -> Judgement | None:
    found = stated(view, *_MEMORY_WORDS)
    if found is None:
        return None
    clue, subject = found
    name = describe.title(subject) if subject else "a process"
    return Judgement(supports=(clue,), subject=subject, summary=f"{name} was refused memory and ended.")


MEMORY_LIMIT = Hypothesis(
    Card(
        cause="memory-limit",
        title="a process was refused memory (a limit, not the OOM killer) and ended",
        condition=Condition.DEAD,
        signs=("MemoryError or 'Cannot allocate memory' among its last words", "RLIMIT_AS or RLIMIT_DATA"),
        vetoes=("no such words",),
        next_test="`grep -E 'address space|data size' /proc/PID/limits`; `ulimit -v` in the shell.",
        remedies=same(
            "raise the limit (`ulimit -v unlimited`, LimitAS= in the unit), or ask for less memory."
        ),
        looks=(Look.EXITS, Look.LOGS),
    ),
    _memory,
)


HYPOTHESES = (OOM, MEMORY_LIMIT)
