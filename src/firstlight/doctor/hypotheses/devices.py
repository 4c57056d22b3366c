"""A sick GPU or driver, and layers around the process: NUMA binding, Ray's placement, vGPU interceptors.

Invariant: an Xid that an application causes, or that follows from another one, is no sick device; a clean
look at everything excludes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from firstlight.doctor.case.target import HOST
from firstlight.doctor.case.values_device import KernelLog
from firstlight.doctor.case.values_process import ExitRecord, Libraries, Threads
from firstlight.doctor.case.view import View
from firstlight.doctor.hypotheses.gpu_case import about, argument, gpus_of, line_clue, uses_gpus
from firstlight.doctor.hypotheses.texts import fatal_line, is_stated, stated
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

_XID = re.compile(r"Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
_DEVICE_XIDS = frozenset((46, 48, 61, 62, 64, 74, 79, 92, 94, 95, 109, 110, 119, 120, 121, 140, 143))
_LOST = (
    r"GPU is lost",
    r"has fallen off the bus",
    r"Unable to determine the device handle",
    r"CUDA_ERROR_(?:DEVICE_UNAVAILABLE|ECC_UNCORRECTABLE|HARDWARE_STACK_ERROR|NVLINK_UNCORRECTABLE)",
    r"uncorrectable (?:ECC|NVLink) error",
    r"CUDA error: (?:unspecified launch failure.{0,40}Xid|uncorrectable)",
)
_DRIVER_WAITS = re.compile(r"^(?:nvidia|nv_|uvm_|os_acquire|rm_|rpcRecv|_nv\d|nvkms)")


def _fell_off(view: View) -> Judgement | None:
    supports = [*_silent_driver(view), *_xids(view), *_in_driver(view)]
    words = stated(view, *_LOST)
    if words:
        supports.insert(0, words[0])
    if not supports:
        found = gpus_of(view)
        if found is None or not uses_gpus(view):
            return None
        return Judgement(vetoes=(Clue(text="every GPU answers NVML", evidence=(found[0],)),))
    return Judgement(
        supports=tuple(supports),
        subject=words[1] if words else None,
        summary=f"a GPU or its driver does not answer any more: {supports[0].text}.",
    )


def _silent_driver(view: View) -> Iterator[Clue]:
    for seen in view.case.failures("gpus"):
        if seen.value.is_timeout:
            text = f"NVML did not answer ({seen.value.reason}), asked in a process of its own"
            yield Clue(text=text, evidence=(seen.id,), weight=Weight.STRONG, group="nvml")
    found = gpus_of(view)
    for gpu in found[1].gpus or () if found else ():
        if found and gpu.name == "does not answer":
            text = f"NVML gets no answer from GPU {gpu.index}"
            yield Clue(text=text, evidence=(found[0],), weight=Weight.STRONG, group="nvml")


def _xids(view: View) -> Iterator[Clue]:
    """Driver errors that mean the device, by the kernel's log or the server's."""
    rows = [(line, seen.id) for seen in view.case.all(KernelLog, subject=HOST) for line in seen.value.lines]
    rows += [(line.text, line.evidence) for line in view.lines]
    for text, evidence in rows:
        found = _XID.search(text) if is_stated(text, _XID) else None
        if found and int(found[2]) in _DEVICE_XIDS:
            clue = f"Xid {found[2]} of {found[1]}: {text.strip()[:160]}"
            yield Clue(text=clue, evidence=(evidence,), weight=Weight.STRONG, group="xid")


def _in_driver(view: View) -> Iterator[Clue]:
    """Threads that no signal reaches, asleep in the driver, in both looks."""
    for process in view.case.target.processes:
        pair = view.case.pair(Threads, process.key)
        if pair is None:
            continue
        before = {thread.tid: thread for thread in pair.first.value.threads}
        for thread in pair.second.value.threads:
            old = before.get(thread.tid)
            is_stuck = thread.state == "D" and old is not None and old.state == "D"
            if (
                is_stuck
                and old is not None
                and old.cpu_s == thread.cpu_s
                and _DRIVER_WAITS.match(thread.wchan)
            ):
                text = f"a thread of {process.key} is in state D inside the driver ({thread.wchan}), twice"
                yield Clue(text=text, evidence=pair.ids, weight=Weight.STRONG, group="driver")
                break


FELL_OFF = Hypothesis(
    Card(
        cause="gpu-fell-off",
        title="a GPU or its driver is sick (Xid, GSP timeout, fallen off the bus)",
        condition=Condition.STUCK,
        signs=(
            "NVML does not answer within its time; a thread in state D inside the driver",
            "`NVRM: Xid … 79` (fallen off), 119, 120 (GSP), 48, 94, 95 (memory)",
        ),
        vetoes=("every GPU answers NVML, no such Xid, no thread in D",),
        next_test="`dmesg | grep -i xid` (as root); `timeout 10 nvidia-smi`.",
        remedies=same(
            "for the operator: stop using that GPU, `nvidia-bug-report.sh`, then a driver reload or a "
            "reboot; the card goes back when it repeats. Nothing in the server cures it."
        ),
        looks=(Look.GPUS, Look.LOGS, Look.MOTION),
        is_recorded=True,
    ),
    _fell_off,
)

_NUMA_WORDS = (
    r"numactl: ",
    r"libnuma: (?:Warning|Error)",
    r"set_mempolicy: (?:Operation not permitted|Invalid argument)",
    r"mbind: (?:Operation not permitted|Invalid argument)",
    r"sched_setaffinity.{0,60}(?:Invalid argument|\[Errno 22\])",
    r"NUMA.{0,80}(?:bind|binding).{0,60}(?:failed|not permitted|invalid)",
)


def _numa(view: View) -> Judgement | None:
    words = stated(view, *_NUMA_WORDS)
    wrapped = [
        process for process in view.case.target.processes if _is_numactl(process.command, process.comm)
    ]
    asked = argument(view, "--numa-node", "--numa-bind", "numa_node", "numa_bind")
    is_asked = asked is not None and asked.lower() not in ("none", "false")
    silent = [
        seen
        for seen in view.case.all(ExitRecord)
        if seen.value.code == 1 and not seen.value.message and not seen.value.was_told
    ]
    if words is None and not ((wrapped or is_asked) and silent):
        if wrapped or is_asked or not silent:
            return None
        return Judgement(vetoes=(Clue(text="nothing binds it to a NUMA node", evidence=(silent[0].id,)),))
    supports = [words[0]] if words else []
    if wrapped or is_asked:
        text = "it is started through numactl" if wrapped else f"a NUMA node was asked for ({asked})"
        key = wrapped[0].key if wrapped else None
        supports.append(Clue(text=text, evidence=about(view, key), group="binding"))
    if silent:
        text = f"{silent[0].value.name} ended with code 1 and not a word"
        supports.append(Clue(text=text, evidence=(silent[0].id,), group="exit"))
    return Judgement(supports=tuple(supports), subject=silent[0].subject if silent else None)


def _is_numactl(command: tuple[str, ...], comm: str) -> bool:
    return comm == "numactl" or any(part.rpartition("/")[2] == "numactl" for part in command[:3])


NUMA_BIND = Hypothesis(
    Card(
        cause="numa-bind",
        title="binding to a NUMA node fails: the node is outside of the allowed set, or it is not permitted",
        condition=Condition.DEAD,
        signs=("exit code 1 without a traceback; numactl in the tree; `set_mempolicy: …`, `numactl: …`",),
        vetoes=("nothing binds it",),
        next_test="`numactl --show` and `grep Mems_allowed_list /proc/self/status` in the same container.",
        remedies=Remedies(
            native="our engine binds to no NUMA node: start it without `numactl`, or widen the container's "
            "cpuset.",
            vllm="leave out `--numa-bind` (and `numactl`), or widen the container's cpuset and allow "
            "SYS_NICE.",
            sglang="SGLANG_NUMA_BIND_V2=0, leave out `--numa-node`, or widen the container's cpuset and "
            "allow SYS_NICE.",
        ),
        looks=(Look.EXITS, Look.LOGS),
        is_recorded=True,
    ),
    _numa,
)

_PLACEMENT = r"Waiting for creating a placement group of specs for"
_RAY = (
    _PLACEMENT,
    r"No available node types can fulfill resource request",
    r"placement group .{0,80}cannot be (?:created|scheduled)",
    r"The number of required (?:GPUs|accelerators) exceeds the total number of available",
)


def _placement(view: View) -> Judgement | None:
    backend = argument(view, "--distributed-executor-backend", "distributed_executor_backend")
    line = fatal_line(view, *_RAY)
    if line is None:
        return None
    if backend in ("mp", "uni"):
        text = f"the executor is {backend}, not Ray"
        return Judgement(vetoes=(Clue(text=text, evidence=(line.evidence,)),))
    if view.is_followed(
        line, r"Starting to load model|Load weight begin|Model loading took|rank \d+ in world"
    ):
        return Judgement(vetoes=(Clue(text="the workers were placed", evidence=(line.evidence,)),))
    repeats = sum(bool(re.search(_PLACEMENT, one.text)) for one in view.lines)
    supports = [line_clue(line, Weight.STRONG if repeats != 1 else Weight.SOME)]
    return Judgement(
        supports=tuple(supports),
        summary="Ray has no place for the workers: their GPUs are taken, or are on no node that it knows.",
    )


RAY_PLACEMENT = Hypothesis(
    Card(
        cause="ray-placement",
        title="Ray finds no place for the workers",
        condition=Condition.STUCK,
        signs=("`Waiting for creating a placement group of specs for` again and again",),
        vetoes=("the executor is not Ray", "the workers were placed"),
        next_test="`ray status`: GPU demands against what is free.",
        remedies=Remedies(
            native="our engine does not use Ray.",
            vllm="on one machine `--distributed-executor-backend mp`; otherwise join the missing nodes "
            "(`ray start --address=HEAD:6379`), and end actors left over from earlier runs.",
            sglang="join the missing nodes, and end actors left over from earlier runs.",
        ),
        looks=(Look.LOGS,),
        is_recorded=True,
    ),
    _placement,
)

_INTERCEPTOR = re.compile(
    r"lib(?:vgpu|cuda-control|vcuda|hami\w*|gpushare|nvshare|fractional)[\w-]*\.so", re.IGNORECASE
)


def _vgpu(view: View) -> Judgement | None:
    found: dict[str, tuple[str, str]] = {}
    for seen in view.case.all(Libraries):
        for library in seen.value.libraries:
            if _INTERCEPTOR.search(library.name):
                found.setdefault(library.name, (library.path, seen.id))
    for _, value, evidence in view.variable("LD_PRELOAD"):
        if match := _INTERCEPTOR.search(value):
            found.setdefault(match[0], (value, evidence))
    if not found:
        mapped = view.case.all(Libraries)
        if not mapped or not uses_gpus(view):
            return None
        return Judgement(vetoes=(Clue(text="no interceptor is loaded", evidence=(mapped[0].id,)),))
    clues = [
        Clue(text=f"{path} stands between the process and the driver", evidence=(evidence,), group="library")
        for path, evidence in found.values()
    ]
    return Judgement(supports=tuple(clues[:2]), fills={"library": next(iter(found))})


VGPU = Hypothesis(
    Card(
        cause="vgpu-interceptor",
        title="a library that divides GPUs stands between the process and the driver",
        condition=Condition.STUCK,
        signs=("libvgpu (HAMi) or another such library in LD_PRELOAD or in the maps",),
        vetoes=("clean maps and no LD_PRELOAD",),
        next_test="the same command on a node without it, or with LD_PRELOAD empty.",
        remedies=same(
            "update what divides the GPUs ({library}), or give this server whole GPUs without it; with "
            "several ranks NCCL_P2P_DISABLE=1 and NCCL_CUMEM_ENABLE=0 as a probe."
        ),
        looks=(Look.ENVIRONMENT,),
        is_recorded=True,
    ),
    _vgpu,
)
HYPOTHESES = (FELL_OFF, NUMA_BIND, RAY_PLACEMENT, VGPU)
