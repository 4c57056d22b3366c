"""What the hypotheses about GPUs ask of a case again and again: is a GPU used, which option was given.

Invariant: "no GPU" is said only where the driver said so or the server runs on the CPU by its own arguments;
what nobody told is open.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from firstlight.doctor.case.evidence import Case
from firstlight.doctor.case.target import Engine
from firstlight.doctor.case.values_host import Gpus, NcclRas
from firstlight.doctor.case.values_process import Libraries, LogTail, PythonStacks
from firstlight.doctor.case.view import Line, Place, View
from firstlight.doctor.hypothesis import Clue, Weight
from firstlight.doctor.motion.gpu_pattern import GpuPattern, Load, Pattern, gpu_pattern
from firstlight.doctor.motion.motion import State
from firstlight.doctor.servers.identity import option

_ARGUMENT_LINES = re.compile(r"server_args=|non-default args:|Initializing a V1 LLM engine|ServerArgs\(")
_SAID_LIMIT = 220
PTX_COMPILER = "libnvidia-ptxjitcompiler"
WEIGHTS = (
    r"Load weight begin|Starting to load model|Loading safetensors|Loading weights took|Load weight end"
    r"|Model loading took|shards: +\d+% Completed"
)
AFTER_WEIGHTS = (
    r"KV Cache is allocated|GPU KV cache size|Memory pool end|Capture .*[Gg]raph (?:begin|end)|Capturing"
    r"|Graph capturing finished|Application startup complete|ready to roll"
)


def uses_gpus(view: View) -> bool:
    """Whether the server may use GPUs at all."""
    pattern = gpu_pattern(view.case)
    if pattern.pattern is Pattern.NONE:
        return False
    engine = view.case.target.engine
    device = argument(view, "--device", "device", "device_config") or ""
    if device in ("cpu", "xpu", "hpu") or _has_torch_without_cuda(view.case):
        return False
    if engine is Engine.NATIVE:
        return argument(view, "--device", "device") == "cuda" or _is_owner(pattern)
    return engine in (Engine.VLLM, Engine.SGLANG) or _is_owner(pattern) or _has_cuda(view.case)


def _is_owner(pattern: GpuPattern) -> bool:
    return any(reading.owners for reading in pattern.readings)


def _has_cuda(case: Case) -> bool:
    return any(
        library.name.startswith("libcuda.so")
        for seen in case.all(Libraries)
        for library in seen.value.libraries
    )


def _has_torch_without_cuda(case: Case) -> bool:
    """A process has loaded torch, and nobody a part of it that needs a GPU."""
    names = {library.name for seen in case.all(Libraries) for library in seen.value.libraries}
    has_torch = any(name.startswith("libtorch_cpu.so") for name in names)
    return has_torch and not any(
        re.match(r"libtorch_(?:cuda|hip)|libcuda\.so|libcudart", name) for name in names
    )


def num_ranks(view: View) -> int | None:
    """How many there are, or should be; None when nothing says so."""
    return view.motion.expected_ranks or len(view.ranks) or None


def alone(view: View) -> Clue | None:
    """That there is one rank, which waits for no other."""
    if num_ranks(view) != 1:
        return None
    return Clue(text="there is one rank only", evidence=view.motion.evidence[:2])


def argument(view: View, *names: str) -> str | None:
    """The value of an option, from the command lines or from the line in which the engine lists them."""
    found = next(arguments(view, *names), None)
    return found[0] if found else None


def arguments(view: View, *names: str) -> Iterator[tuple[str, str]]:
    """(value, evidence id) of each place where an option is given; the log's word comes first.

    A switch without a value has "". Names: "--enforce-eager" and, as the log has it, "enforce_eager".
    """
    fields = "|".join(re.escape(name.lstrip("-").replace("-", "_")) for name in names)
    told = re.compile(rf"['\"]?\b(?:{fields})\b['\"]?\s*[=:]\s*(?P<value>'[^']*'|\"[^\"]*\"|[^,)}}\s]+)")
    for line in view.lines:
        if _ARGUMENT_LINES.search(line.text) and (match := told.search(line.text)):
            yield match["value"].strip("'\""), line.evidence
    flags = tuple(name for name in names if name.startswith("-"))
    for process in view.case.target.processes:
        if any(part.partition("=")[0].replace("_", "-") in flags for part in process.command):
            value = option(process.command, flags) or ""
            yield ("" if value.startswith("-") else value), about(view, process.key)[0]


def switch(view: View, *names: str) -> Clue | None:
    """That a switch is given, by a command line or by the log."""
    for value, evidence in arguments(view, *names):
        if value.lower() not in ("false", "none", "0", "no"):
            return Clue(
                text=f"{names[0]} is given", evidence=(evidence,), weight=Weight.WEAK, group="options"
            )
    return None


def about(view: View, key: str | None = None) -> tuple[str]:
    """What was seen first of a process, or of the target: the place where its command line is known from."""
    first = next((item.id for item in view.case.evidence if item.subject == key), None)
    return (first or (view.case.evidence[0].id if view.case.evidence else ""),)


def has_arguments(view: View) -> bool:
    """Whether the arguments of the server are known."""
    is_logged = any(_ARGUMENT_LINES.search(line.text) for line in view.lines)
    return is_logged or any(len(process.command) > 1 for process in view.case.target.processes)


def variable_is(view: View, name: str, *values: str) -> Clue | None:
    """A variable that has one of these values in some process."""
    for _, value, evidence in view.variable(name):
        if value.lower() in values:
            return Clue(text=f"{name}={value} is set", evidence=(evidence,))
    return None


def pattern_clue(
    view: View, *patterns: Pattern, weight: Weight = Weight.WEAK, group: str = "gpus"
) -> Clue | None:
    """The pattern of the GPUs, if it is one of these."""
    found = gpu_pattern(view.case)
    if found.pattern not in patterns:
        return None
    return Clue(text=found.text, evidence=found.evidence, weight=weight, group=group)


def line_clue(line: Line, weight: Weight, group: str = "log") -> Clue:
    """A line of a log."""
    return Clue(
        text=f"log: {line.text.strip()[:_SAID_LIMIT]}", evidence=(line.evidence,), weight=weight, group=group
    )


def place_clue(place: Place, weight: Weight, group: str = "stack") -> Clue:
    """A frame of a stack."""
    frame = place.frame
    text = f"{place.key} is in {frame.function} ({frame.file}:{frame.line})"
    return Clue(text=text, evidence=(place.evidence,), weight=weight, group=group)


def in_main_stack(view: View, *patterns: str, innermost: int = 12) -> list[Place]:
    """The ranks whose main threads are in such a frame, by the latest look."""
    keys = [one.key for one in view.ranks] or None
    found: dict[str, Place] = {}
    for place in view.in_stack(*patterns, keys=keys, innermost=innermost):
        seen = view.case.seen(PythonStacks, place.key)
        if seen is not None and seen.value.threads and place.thread == seen.value.threads[0]:
            found.setdefault(place.key, place)
    return list(found.values())


def stacks_elsewhere(view: View, what: str) -> Clue | None:
    """That the stacks of all ranks were seen; the caller has found none of them where it looked."""
    keys = [one.key for one in view.ranks]
    seen = [view.case.seen(PythonStacks, key) for key in keys]
    ids = [one.id for one in seen if one is not None and one.value.threads and one.value.threads[0].frames]
    if not keys or len(ids) < len(keys) or not view.case.target.is_complete:
        return None
    return Clue(text=f"no rank's stack is in {what}", evidence=tuple(ids[:8]))


def ras_mismatch(view: View) -> Clue | None:
    """Counts of collectives that differ between ranks and stand still: a rank is absent from one."""
    by_look = {seen.evidence.look: seen for seen in view.case.all(NcclRas)}
    unequal = [
        (seen.id, [one.counts for one in seen.value.communicators if one.status == "MISMATCH"])
        for seen in by_look.values()
    ]
    if len(unequal) < 2 or not unequal[-1][1] or unequal[0][1] != unequal[-1][1]:
        return None
    text = "NCCL RAS: the ranks have launched unequal numbers of collectives, and they stand still"
    return Clue(text=text, evidence=(unequal[0][0], unequal[-1][0]), weight=Weight.STRONG, group="ras")


def ras_equal(view: View) -> Clue | None:
    """RAS answers in both looks and reports no difference: no rank is missing from a counted collective."""
    looks = {seen.evidence.look: seen for seen in view.case.all(NcclRas)}
    if len(looks) < 2 or any(seen.value.communicators or seen.value.dead_pids for seen in looks.values()):
        return None
    ids = tuple(seen.id for seen in looks.values())
    text = "NCCL RAS: all ranks have launched equally many collectives (those in graphs are not counted)"
    return Clue(text=text, evidence=ids, weight=Weight.WEAK, group="ras")


def waits_for_gpu(view: View, key: str) -> Clue | None:
    """Why a busy core is no loop of its own: a host that waits for a kernel spins, as does the driver's "
    "compiler."""
    pattern = gpu_pattern(view.case)
    if pattern.pattern in (Pattern.WAITING, Pattern.COMPUTING, Pattern.MIXED) and uses_gpus(view):
        text = f"a host that waits for its GPU spins: {pattern.text}"
        return Clue(text=text, evidence=pattern.evidence, weight=Weight.STRONG)
    seen = view.case.seen(Libraries, key)
    if seen is not None and any(one.name.startswith(PTX_COMPILER) for one in seen.value.libraries):
        text = f"{key} has loaded the driver's compiler of PTX, which uses one core"
        return Clue(text=text, evidence=(seen.id,), weight=Weight.STRONG)
    return None


def without_a_kernel(view: View) -> tuple[str, Clue] | None:
    """The one rank whose GPU stands still while those of the others wait inside a kernel."""
    found = gpu_pattern(view.case)
    odd = [reading for reading in found.readings if reading.index in found.outliers]
    rest = [reading.load for reading in found.readings if reading.index not in found.outliers]
    if len(odd) != 1 or odd[0].load is not Load.IDLE or set(rest) != {Load.WAITING} or not odd[0].owners:
        return None
    text = f"{odd[0].owners[0]} has launched no kernel, and the others wait in one: {found.text}"
    return odd[0].owners[0], Clue(text=text, evidence=found.evidence, weight=Weight.STRONG, group="gpus")


def is_silent_start(view: View) -> bool:
    """A start in which nothing moves, or of which nobody looked whether it does."""
    states = (State.BLOCKED, State.SPINNING, State.UNCLEAR)
    return view.is_starting and view.motion.state in states


def has_log(view: View) -> bool:
    """Whether there is any log to conclude from."""
    return any(seen.value.lines for seen in view.case.all(LogTail))


def last_phase_line(view: View, begins: str, ends: Sequence[str]) -> Line | None:
    """The last line that begins something which no later line of its log ends."""
    line = view.find_line(begins)
    return None if line is None or view.is_followed(line, *ends) else line


def gpus_of(view: View) -> tuple[str, Gpus] | None:
    """The latest look at the GPUs, with the id of its evidence."""
    seen = next((one for one in reversed(view.case.all(Gpus)) if one.value.gpus), None)
    return (seen.id, seen.value) if seen else None
