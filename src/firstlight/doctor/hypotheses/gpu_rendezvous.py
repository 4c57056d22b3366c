"""Silent meetings of ranks at a shared workspace: symmetric memory, multicast, the fabric manager.

No kernel is launched here, so that the GPUs stand at 0 % and nothing is logged. Invariant: a stack that is
elsewhere on every rank excludes the meeting; the kernel's or NVML's word decides on the fabric.
"""

from __future__ import annotations

from firstlight.doctor.case.target import Engine
from firstlight.doctor.case.view import View
from firstlight.doctor.hypotheses.gpu_case import (
    about,
    alone,
    argument,
    gpus_of,
    in_main_stack,
    is_silent_start,
    pattern_clue,
    place_clue,
    stacks_elsewhere,
    switch,
    uses_gpus,
    variable_is,
)
from firstlight.doctor.hypotheses.texts import stated
from firstlight.doctor.hypothesis import Card, Clue, Condition, Hypothesis, Judgement, Look, Remedies, Weight
from firstlight.doctor.motion.gpu_pattern import Pattern

_MEETING = (
    r"symm\w*_mem\w*.*:.*rendezvous",
    r"symmetric_memory.*:",
    r"create_\w*fusion_workspace",
    r"pre_initialize_workspaces",
    r"flashinfer.*comm.*:.*(?:workspace|rendezvous|alloc)",
    r"ncclCommWindowRegister",
    r"pynccl.*:(?:register_comm_window|ncclCommWindowRegister|window_register)",
    r"cuMulticast(?:AddDevice|BindMem|Create)",
)
_FUSION = (
    "--enable-flashinfer-allreduce-fusion",
    "enable_flashinfer_allreduce_fusion",
    "fuse_allreduce_rms",
    "enable_fi_allreduce_fusion",
)
_NOT_READY = (
    r"system not yet initialized",
    r"cudaErrorSystemNotReady",
    r"CUDA_ERROR_SYSTEM_NOT_READY",
    r"CUDA error:? 802\b",
    r"[Ee]rror 802\b",
)
_MULTICAST = (r"Failed to bind NVLS multicast", r"multicast.{0,80}error:? 401\b", r"cuMulticast\w+ failed")
_FABRIC_STATES = ("not started", "in progress")


def _meeting(view: View) -> Judgement | None:
    if not uses_gpus(view):
        return None
    vetoes = _meeting_vetoes(view)
    if vetoes:
        return Judgement(vetoes=vetoes)
    places = in_main_stack(view, *_MEETING, innermost=20)
    if not places:
        elsewhere = stacks_elsewhere(view, "a rendezvous of symmetric memory or a fusion workspace")
        if elsewhere:
            return Judgement(vetoes=(elsewhere,))
        if not is_silent_start(view):
            return None
    supports = [place_clue(place, Weight.STRONG) for place in places[:2] if view.has_stopped_moving]
    idle = pattern_clue(view, Pattern.IDLE)
    asked = switch(view, "--enable-symm-mem", "enable_symm_mem", *_FUSION)
    if idle and places:
        supports.append(idle)
    if asked:
        supports.append(asked)
    late = [one.key for one in view.ranks if places and one.key not in {place.key for place in places}]
    where = f"; {', '.join(late)} is not there" if late else ""
    named = "the rendezvous of symmetric memory or of a fusion workspace"
    if places:
        named = f"{places[0].frame.function} ({places[0].frame.file})"
    contradicts: tuple[Clue, ...] = ()
    if late:
        text = f"{', '.join(late)} is not there: what holds it is nearer to the root"
        contradicts = (Clue(text=text, evidence=tuple(place.evidence for place in places)),)
    return Judgement(
        supports=tuple(supports),
        contradicts=contradicts,
        subject=late[0] if len(late) == 1 else places[0].key if places else None,
        summary=f"ranks wait for each other, without a limit, at {named}{where}.",
    )


def _meeting_vetoes(view: View) -> tuple[Clue, ...]:
    one = alone(view)
    if one:
        return (one,)
    if view.case.target.engine is Engine.NATIVE:
        text = "our engine uses neither symmetric memory nor fused all-reduce"
        return (Clue(text=text, evidence=about(view)),)
    busy = pattern_clue(view, Pattern.WAITING, Pattern.COMPUTING)
    if busy:
        text = f"at such a rendezvous no kernel runs, but {busy.text}"
        return (Clue(text=text, evidence=busy.evidence),)
    off = variable_is(view, "VLLM_ALLREDUCE_USE_SYMM_MEM", "0")
    fusion = switch(view, *_FUSION) or "allreduce" in (argument(view, "--compilation-config") or "")
    if view.case.target.engine is Engine.VLLM and off and not fusion:
        return (Clue(text=f"{off.text}, and no fusion pass was asked for", evidence=off.evidence),)
    forbidden = switch(view, "--enforce-disable-flashinfer-allreduce-fusion")
    if forbidden and not switch(view, "--enable-symm-mem", "enable_symm_mem"):
        return (forbidden,)
    return ()


FUSION_RENDEZVOUS = Hypothesis(
    Card(
        cause="fusion-rendezvous",
        title="ranks wait at the rendezvous of symmetric memory or of a fused all-reduce's workspace",
        condition=Condition.STUCK,
        signs=(
            "a stack at `rendezvous` of symmetric memory, `create_allreduce_fusion_workspace` or a window's "
            "registration",
            "GPUs at 0 %, no thread uses the processor, nothing is logged, no deadline",
        ),
        vetoes=(
            "one rank only",
            "the stacks of all ranks are elsewhere",
            "GPUs busy",
            "the features are off",
        ),
        next_test="the stacks of all ranks (`py-spy dump --nonblocking --pid PID`); then the same command "
        "with the feature off.",
        remedies=Remedies(
            native="our engine has no such feature.",
            vllm="VLLM_ALLREDUCE_USE_SYMM_MEM=0, and the fusion pass off: `--compilation-config "
            '\'{{"pass_config": {{"fuse_allreduce_rms": false}}}}\'`.',
            sglang="`--enforce-disable-flashinfer-allreduce-fusion`; leave out `--enable-symm-mem`.",
        ),
        looks=(Look.STACKS, Look.GPUS, Look.RANKS),
        prior=4,
        is_recorded=True,
    ),
    _meeting,
)


def _fabric(view: View) -> Judgement | None:
    words, multicast = stated(view, *_NOT_READY), stated(view, *_MULTICAST)
    state = _fabric_state(view)
    supports = [found[0] for found in (words, multicast) if found]
    if state is not None and state[0]:
        supports.append(state[1])
    if supports:
        owner = next((found[1] for found in (words, multicast) if found), None)
        return Judgement(
            supports=tuple(supports),
            subject=owner,
            summary=f"the GPUs have not joined their NVLink switches: {supports[0].text}.",
        )
    if not uses_gpus(view):
        return None
    one = alone(view)
    if one is not None or state is not None:
        return Judgement(vetoes=tuple(clue for clue in (one, state[1] if state else None) if clue))
    if view.case.target.engine is Engine.NATIVE or not is_silent_start(view):
        return None
    busy = pattern_clue(view, Pattern.WAITING, Pattern.COMPUTING)
    if busy:
        return Judgement(vetoes=(busy,))
    elsewhere = stacks_elsewhere(view, "a call that waits for NVLink's fabric")
    if elsewhere and not in_main_stack(view, *_MEETING, r"ncclCommInitRank", r"pynccl.*:", innermost=20):
        return Judgement(vetoes=(elsewhere,))
    return Judgement(summary="the fabric manager (or IMEX) of an NVSwitch machine may be down.")


def _fabric_state(view: View) -> tuple[bool, Clue] | None:
    """(whether it is bad, the clue) by NVML; None where it does not say."""
    found = gpus_of(view)
    told = {gpu.index: gpu.fabric for gpu in found[1].gpus or () if gpu.fabric} if found else {}
    if found is None or not told:
        return None
    bad = {i: text for i, text in told.items() if text in _FABRIC_STATES or text.startswith("failed")}
    if bad:
        rows = ", ".join(f"GPU {index} {text}" for index, text in list(bad.items())[:4])
        clue = Clue(text=f"NVML: fabric {rows}", evidence=(found[0],), weight=Weight.STRONG, group="fabric")
        return True, clue
    states = " and ".join(sorted(set(told.values())))
    return False, Clue(text=f"NVML: fabric {states} on every GPU", evidence=(found[0],))


FABRIC_MANAGER = Hypothesis(
    Card(
        cause="fabric-manager",
        title="the NVLink switches are not set up (fabric manager, NVLS or IMEX)",
        condition=Condition.STUCK,
        signs=(
            "error 802 `system not yet initialized`; `Failed to bind NVLS multicast`, error 401",
            "NVML: fabric state not `completed`",
        ),
        vetoes=(
            "not an NVSwitch machine (fabric unsupported)",
            "fabric completed on every GPU",
            "one rank only",
        ),
        next_test="`nvidia-smi -q | grep -A4 -i fabric`; `systemctl status nvidia-fabricmanager`; the same "
        "command with NCCL_NVLS_ENABLE=0.",
        remedies=Remedies(
            native="start the fabric manager (`systemctl start nvidia-fabricmanager`, the driver's very "
            "version); NCCL_NVLS_ENABLE=0 when only multicast fails.",
            vllm="start the fabric manager (`systemctl start nvidia-fabricmanager`, the driver's very "
            "version); NCCL_NVLS_ENABLE=0 and VLLM_ALLREDUCE_USE_SYMM_MEM=0 when only multicast fails or a "
            "subset of the GPUs is visible.",
            sglang="start the fabric manager (`systemctl start nvidia-fabricmanager`, the driver's very "
            "version); leave out `--enable-nccl-nvls` and `--enable-symm-mem`, NCCL_NVLS_ENABLE=0 when only "
            "multicast fails.",
        ),
        looks=(Look.GPUS, Look.LOGS, Look.STACKS),
        prior=4,
        is_recorded=True,
    ),
    _fabric,
)
HYPOTHESES = (FUSION_RENDEZVOUS, FABRIC_MANAGER)
