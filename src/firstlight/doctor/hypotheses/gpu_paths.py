"""The data path between GPUs: peer writes that get lost, a mapping that is too small, custom all-reduce.

A lost peer write spins a GPU at 100 %, so that idle GPUs exclude the first. Invariant: "can access peer"
proves nothing; only a copy whose data was compared does.
"""

from __future__ import annotations

from collections.abc import Iterator

from firstlight.doctor.case.view import View
from firstlight.doctor.hypotheses.gpu_case import (
    AFTER_WEIGHTS,
    WEIGHTS,
    alone,
    gpus_of,
    in_main_stack,
    is_silent_start,
    line_clue,
    num_ranks,
    pattern_clue,
    place_clue,
    ras_mismatch,
    stacks_elsewhere,
    switch,
    uses_gpus,
    variable_is,
)
from firstlight.doctor.hypotheses.gpu_links import bar1, paths, transport
from firstlight.doctor.hypothesis import Card, Clue, Condition, Hypothesis, Judgement, Look, Remedies, Weight
from firstlight.doctor.motion.gpu_pattern import Pattern

_NCCL_STACK = (
    r"pynccl.*:",
    r"nccl.*:all_reduce",
    r"distributed_c10d\.py:all_reduce",
    r"cudaStreamSynchronize",
)
_COMM_INIT = (
    r"ncclCommInitRank",
    r"pynccl.*:__init__",
    r"_new_process_group_helper",
    r"ncclCommInitRankConfig",
)
_CUSTOM = (r"custom_all_reduce.*:", r"custom_allreduce", r"quick_all_reduce", r"cross_device_reduce")
_CUSTOM_OFF = (
    r"Custom allreduce is disabled",
    r"[Cc]ustom all-?reduce is (?:not supported|disabled)",
    r"disable_custom_all_reduce['\"]?[=:] ?True",
)
_ZERO_ADDRESSES = r"Registering 0 cuda graph addresses"
_WORLDS = (2, 4, 6, 8)
_OFF_NATIVE = "start with NCCL_P2P_DISABLE=1; our engine has no custom all-reduce, so that this is all"


def _p2p_broken(view: View) -> Judgement | None:
    if not uses_gpus(view):
        return None
    vetoes = _p2p_vetoes(view)
    if vetoes:
        return Judgement(vetoes=vetoes)
    spins = pattern_clue(view, Pattern.WAITING)
    if spins is None and not view.has_stopped_moving and not is_silent_start(view):
        return None
    supports = list(_after_nccl(view))
    if spins is not None:  # most machines have such paths, so that they mean nothing by themselves
        supports += [spins, *paths(view), *transport(view)]
    places = in_main_stack(view, *_NCCL_STACK)
    if places and view.has_stopped_moving:
        supports.append(place_clue(places[0], Weight.WEAK))
    return Judgement(
        supports=tuple(supports),
        contradicts=tuple(clue for clue in (ras_mismatch(view), _has_worked(view)) if clue),
        summary="what one GPU writes to another seems to get lost (P2P over PCIe): all of them wait inside a "
        "kernel.",
    )


def _p2p_vetoes(view: View) -> tuple[Clue, ...]:
    one = alone(view)
    still = pattern_clue(view, Pattern.IDLE)
    busy = pattern_clue(view, Pattern.COMPUTING)
    off = variable_is(view, "NCCL_P2P_DISABLE", "1")
    custom_off = switch(view, "--disable-custom-all-reduce", "disable_custom_all_reduce")
    found = [one] if one else []
    if still:
        found.append(
            Clue(text=f"a lost peer write spins a GPU at 100 %, but {still.text}", evidence=still.evidence)
        )
    if busy:
        found.append(Clue(text=f"the GPUs compute: {busy.text}", evidence=busy.evidence))
    if off and custom_off:
        found.append(Clue(text=f"{off.text}, and custom all-reduce is off", evidence=off.evidence))
    gpus = gpus_of(view)
    rows = [gpu for gpu in gpus[1].gpus or ()] if gpus else []
    if gpus and len(rows) > 1 and all(gpu.num_nvlinks for gpu in rows):
        found.append(Clue(text="all GPUs have NVLink: peer writes do not cross PCIe", evidence=(gpus[0],)))
    return tuple(found)


def _has_worked(view: View) -> Clue | None:
    """That the start went on to where collectives of the profile run have come back."""
    line = view.find_line(AFTER_WEIGHTS)
    if line is None:
        return None
    text = f"data has moved between the GPUs before: {line.text.strip()[:140]}"
    return Clue(text=text, evidence=(line.evidence,), weight=Weight.STRONG, group="worked")


def _after_nccl(view: View) -> Iterator[Clue]:
    """The log ends where NCCL was made ready: the first data that was to move did not."""
    line = view.find_line(r"Init COMPLETE", r"(?:vLLM|sglang) is using nccl==")
    if line is None or view.is_followed(line, WEIGHTS):
        return
    text = f"the log ends after NCCL was ready: {line.text.strip()[:160]}"
    yield Clue(text=text, evidence=(line.evidence,), weight=Weight.SOME, group="log")


P2P_BROKEN = Hypothesis(
    Card(
        cause="p2p-broken",
        title="peer writes between GPUs over PCIe get lost (IOMMU, ACS or driver)",
        condition=Condition.STUCK,
        signs=(
            "NCCL `Init COMPLETE`, then silence; all GPUs 100 % at low power",
            "the GPUs' IOMMU groups are translated (type DMA), bridges redirect peer traffic (ACS)",
            "channels `via P2P`, no NVLink",
        ),
        vetoes=(
            "one GPU only, or NVLink between all of them",
            "GPUs at 0 %: a lost write spins them at 100 %",
            "P2P and custom all-reduce are off already",
            "a functional probe with compared data passes",
        ),
        next_test="two ranks that copy and all-reduce known data and compare it, once as it is and once with "
        "NCCL_P2P_DISABLE=1: `all_reduce_perf -b 8 -e 64M -g 2 -c 1` of nccl-tests in a process of its own.",
        remedies=Remedies(
            native=f"{_OFF_NATIVE}. Later: `iommu=pt`, ACS off in the BIOS. GPUs that stay at 100 % without "
            f"a "
            "process need a reset by the operator.",
            vllm="NCCL_P2P_DISABLE=1 *and* `--disable-custom-all-reduce` (both use the path). Later: "
            "`iommu=pt` on the kernel's command line, ACS off in the BIOS.",
            sglang="NCCL_P2P_DISABLE=1 *and* `--disable-custom-all-reduce` (both use the path), "
            "`--enable-p2p-check`. Later: `iommu=pt` on the kernel's command line, ACS off in the BIOS.",
        ),
        looks=(Look.GPUS, Look.LOGS, Look.STACKS, Look.RAS),
        is_recorded=True,
        for_idle_gpus=False,
    ),
    _p2p_broken,
)


def _bar1_too_small(view: View) -> Judgement | None:
    if not uses_gpus(view):
        return None
    one, told = alone(view), bar1(view)
    if one:
        return Judgement(vetoes=(one,))
    if told is not None and told[0] is None:
        return Judgement(vetoes=(told[1],))
    places = in_main_stack(view, *_COMM_INIT)
    if told is None and not places:
        return Judgement() if is_silent_start(view) and not _nccl_ready(view) else None
    supports = []
    if told is not None:
        supports.append(told[1])
    if places and view.has_stopped_moving:
        supports.append(place_clue(places[0], Weight.SOME))
    if not view.has_stopped_moving and not is_silent_start(view):
        return None
    return Judgement(supports=tuple(supports))


def _nccl_ready(view: View) -> bool:
    return view.find_line(r"Init COMPLETE") is not None


BAR1_TOO_SMALL = Hypothesis(
    Card(
        cause="bar1-too-small",
        title="the driver offers P2P between GPUs whose memory is not all mapped (BAR1 smaller than VRAM)",
        condition=Condition.STUCK,
        signs=(
            "BAR1 smaller than the GPU's memory while the driver says that peer access is fine (patched "
            "driver)",
            "a pair of GeForce cards; a block in ncclCommInitRank with the GPUs at 0 %",
        ),
        vetoes=("BAR1 is at least as large as the memory", "one GPU only", "the driver refuses peer access"),
        next_test="`nvidia-smi -q -d MEMORY | grep -A3 BAR1`; `nvidia-smi topo -p2p w`; then the copy with "
        "compared data as for p2p-broken.",
        remedies=Remedies(
            native=f"{_OFF_NATIVE}; or the stock driver; or Resizable BAR on in the BIOS.",
            vllm="NCCL_P2P_DISABLE=1 and `--disable-custom-all-reduce`; or the stock driver; or Resizable "
            "BAR on in the BIOS.",
            sglang="NCCL_P2P_DISABLE=1 and `--disable-custom-all-reduce`; or the stock driver; or Resizable "
            "BAR on in the BIOS.",
        ),
        looks=(Look.GPUS, Look.STACKS),
        prior=2,
        is_recorded=True,
    ),
    _bar1_too_small,
)


def _custom_all_reduce(view: View) -> Judgement | None:
    if not uses_gpus(view):
        return None
    vetoes = _custom_vetoes(view)
    if vetoes:
        return Judgement(vetoes=vetoes)
    places = in_main_stack(view, *_CUSTOM)
    zero = view.find_line(_ZERO_ADDRESSES)
    if not places and zero is None:
        elsewhere = stacks_elsewhere(view, "custom all-reduce")
        return Judgement(vetoes=(elsewhere,)) if elsewhere and view.has_stopped_moving else None
    supports = [place_clue(places[0], Weight.STRONG)] if places and view.has_stopped_moving else []
    if zero is not None:
        supports.append(line_clue(zero, Weight.SOME))
    if waits := pattern_clue(view, Pattern.WAITING):
        supports.append(waits)
    return Judgement(supports=tuple(supports), subject=places[0].key if places else None)


def _custom_vetoes(view: View) -> tuple[Clue, ...]:
    one = alone(view)
    found = [one] if one else []
    line = view.find_line(*_CUSTOM_OFF)
    if line is not None:
        found.append(line_clue(line, Weight.SOME))
    elif off := switch(view, "--disable-custom-all-reduce"):
        found.append(off)
    world = num_ranks(view)
    if world is not None and world > 1 and world not in _WORLDS:
        text = f"custom all-reduce does not exist for {world} ranks"
        found.append(Clue(text=text, evidence=view.motion.evidence[:2]))
    return tuple(found)


CUSTOM_ALL_REDUCE = Hypothesis(
    Card(
        cause="custom-all-reduce",
        title="the engine's own all-reduce kernel does not come back",
        condition=Condition.STUCK,
        signs=(
            "a stack in custom_all_reduce; 2, 4, 6 or 8 ranks; no `Custom allreduce is disabled`",
            "SGLang: `Registering 0 cuda graph addresses` (an error during capture was swallowed)",
        ),
        vetoes=("it is off already", "another number of ranks", "the stacks of all ranks are elsewhere"),
        next_test="the same command with custom all-reduce off; when that cures it, test P2P itself as well.",
        remedies=Remedies(
            native="our engine has no custom all-reduce; on GPUs it uses NCCL alone.",
            vllm="`--disable-custom-all-reduce`.",
            sglang="`--disable-custom-all-reduce`; with the line `Registering 0 …` also less memory for the "
            "cache (`--mem-fraction-static`) and smaller graphs (`--cuda-graph-max-bs`).",
        ),
        looks=(Look.STACKS, Look.LOGS, Look.GPUS),
        is_recorded=True,
    ),
    _custom_all_reduce,
)
HYPOTHESES = (CUSTOM_ALL_REDUCE, P2P_BROKEN, BAR1_TOO_SMALL)
