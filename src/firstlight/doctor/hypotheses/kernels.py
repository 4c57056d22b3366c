"""Kernels that are tuned, compiled for warm-up, or never come back.

A livelocked kernel and a wait inside a collective look alike from outside: without RAS, a stack or a single
rank they are not told apart. Invariant: idle GPUs exclude tuning and a livelock.
"""

from __future__ import annotations

from firstlight.doctor.case.target import Engine, Role
from firstlight.doctor.case.values_host import Compilers
from firstlight.doctor.case.view import Place, View
from firstlight.doctor.hypotheses.gpu_case import (
    alone,
    in_main_stack,
    last_phase_line,
    line_clue,
    pattern_clue,
    place_clue,
    ras_equal,
    ras_mismatch,
    stacks_elsewhere,
    switch,
    uses_gpus,
    variable_is,
)
from firstlight.doctor.hypothesis import Card, Clue, Condition, Hypothesis, Judgement, Look, Remedies, Weight
from firstlight.doctor.motion.gpu_pattern import Pattern

_TUNES = (
    r"Running FlashInfer autotune|[Aa]utotuning process starts|Autotuning (?:kernel|process)"
    r"|AutoTuner.{0,40}start"
)
_TUNED = (
    r"FlashInfer autotune completed",
    r"[Aa]utotuning process ends",
    r"Capture .{0,40}[Gg]raph begin|Capturing",
    r"Application startup complete|ready to roll",
)
_TUNING_STACK = (r"autotuner\.py:", r"autotune.*:", r"flashinfer_autotune")


def _autotune(view: View) -> Judgement | None:
    if not uses_gpus(view) or view.case.target.engine is Engine.NATIVE:
        return None
    off = switch(view, "--disable-flashinfer-autotune", "--no-enable-flashinfer-autotune")
    if off:
        return Judgement(vetoes=(off,))
    still = pattern_clue(view, Pattern.IDLE)
    if still:
        return Judgement(
            vetoes=(Clue(text=f"tuning runs kernels, but {still.text}", evidence=still.evidence),)
        )
    line = last_phase_line(view, _TUNES, _TUNED)
    places = in_main_stack(view, *_TUNING_STACK, innermost=30)
    if line is None and not places:
        elsewhere = stacks_elsewhere(view, "an autotuner")
        return Judgement(vetoes=(elsewhere,)) if elsewhere else None
    supports = [line_clue(line, Weight.SOME)] if line else []
    supports += [place_clue(place, Weight.STRONG if line is None else Weight.SOME) for place in places[:1]]
    crawl = pattern_clue(view, Pattern.COMPUTING, weight=Weight.SOME)
    apart = pattern_clue(view, Pattern.WAITING, Pattern.MIXED, weight=Weight.SOME)
    supports += [clue for clue in (crawl, apart) if clue]
    if apart and not crawl:
        summary = (
            "the ranks came apart while kernels were tuned: they wait for each other in different kernels."
        )
        return Judgement(supports=tuple(supports), summary=summary, condition=Condition.STUCK)
    return Judgement(supports=tuple(supports), summary="kernels are being tuned, which takes minutes.")


AUTOTUNE = Hypothesis(
    Card(
        cause="autotune",
        title="kernels are tuned by trial, which crawls or parts the ranks",
        condition=Condition.STARTING,
        signs=(
            "the log's last phase is autotuning; GPUs at high power (it crawls), or some at low power (the "
            "ranks chose different kernels)",
        ),
        vetoes=("the log or the stacks are elsewhere", "GPUs at 0 %", "tuning is off"),
        next_test="the same command with tuning off.",
        remedies=Remedies(
            native="our engine tunes no kernels.",
            vllm="`--no-enable-flashinfer-autotune`.",
            sglang="`--disable-flashinfer-autotune`.",
        ),
        looks=(Look.LOGS, Look.STACKS, Look.GPUS),
        is_recorded=True,
        for_idle_gpus=False,
    ),
    _autotune,
)

_DEEP = r"Entering DeepGEMM JIT|Try DeepGEMM JIT Compiling for|DeepGEMM warmup|JIT kernel warmup starting"
_DEEP_DONE = (
    r"JIT kernel warmup finished",
    r"Capture .{0,40}[Gg]raph begin|Capturing",
    r"KV Cache is allocated|GPU KV cache size",
    r"Application startup complete|ready to roll",
)
_DEEP_STACK = (r"deep_gemm\w*.*compile\w*", r"deep_gemm.*jit", r"deep_gemm_warmup", r"compile_utils\.py:")


def _deepgemm(view: View) -> Judgement | None:
    if not uses_gpus(view) or view.case.target.engine is Engine.NATIVE:
        return None
    off = variable_is(view, "SGLANG_ENABLE_JIT_DEEPGEMM", "0", "false") or variable_is(
        view, "VLLM_USE_DEEP_GEMM", "0"
    )
    if off:
        return Judgement(vetoes=(off,))
    line = last_phase_line(view, _DEEP, _DEEP_DONE)
    places = in_main_stack(view, *_DEEP_STACK, innermost=30)
    if line is None and not places:
        return None
    supports = [line_clue(line, Weight.SOME)] if line else []
    supports += [place_clue(place, Weight.SOME) for place in places[:1]]
    seen = next(reversed(view.case.all(Compilers)), None)
    if seen is not None and seen.value.running:
        text = f"{len(seen.value.running)} compilers run ({seen.value.running[0].name})"
        supports.append(Clue(text=text, evidence=(seen.id,), group="compilers"))
    return Judgement(
        supports=tuple(supports),
        summary="DeepGEMM compiles its kernels before the first use, which takes 10 to 20 minutes once.",
    )


DEEPGEMM = Hypothesis(
    Card(
        cause="deepgemm-warmup",
        title="DeepGEMM compiles its kernels before the first use",
        condition=Condition.STARTING,
        signs=("`Entering DeepGEMM JIT Pre-Compile session`; compilers among the children; the others wait",),
        vetoes=("DeepGEMM is off", "a later phase has begun"),
        next_test="SGLANG_ENABLE_JIT_DEEPGEMM=0 (vLLM: VLLM_USE_DEEP_GEMM=0), and the time of a second "
        "start.",
        remedies=Remedies(
            native="our engine does not use DeepGEMM.",
            vllm="wait; or VLLM_DEEP_GEMM_WARMUP=skip; keep the cache (DG_JIT_CACHE_DIR) between starts.",
            sglang="compile once ahead (`python -m sglang.compile_deep_gemm` with the server's own "
            "options), keep the cache (DG_JIT_CACHE_DIR), and a longer `--dist-timeout`; or "
            "SGLANG_ENABLE_JIT_DEEPGEMM=0.",
        ),
        looks=(Look.LOGS, Look.STACKS, Look.MOTION),
        is_recorded=True,
    ),
    _deepgemm,
)

_SYNC = (
    r"torch/cuda/streams\.py:synchronize",
    r"Event.*:synchronize",
    r"cuEventSynchronize",
    r"cudaEventSynchronize",
    r"cuLaunchKernel",
    r"cuStreamSynchronize",
)
_SUSPECTS = (
    r"sampl\w*.*:",
    r"top_?k",
    r"mla.*:",
    r"attention.*:",
    r"fused_moe.*:",
    r"tree_speculative",
)
_COLLECTIVE = (r"all_reduce", r"all_gather", r"reduce_scatter", r"pynccl")


def _livelock(view: View) -> Judgement | None:
    if not uses_gpus(view):
        return None
    vetoes = _livelock_vetoes(view)
    if vetoes:
        return Judgement(vetoes=vetoes)
    waits = pattern_clue(view, Pattern.WAITING)
    places = _waits_for_kernel(view) if view.has_stopped_moving else []
    if waits is None and not places:
        return None
    supports = [waits] if waits else []
    inner = next(view.in_stack(*_SUSPECTS, keys=[place.key for place in places], innermost=12), None)
    if places:
        supports.append(place_clue(places[0], Weight.SOME if waits and inner else Weight.WEAK))
    one = alone(view)
    if one and waits:
        text = "there is one rank only, so that no collective can be what the kernel waits in"
        supports.append(Clue(text=text, evidence=one.evidence, weight=Weight.STRONG, group="alone"))
    if waits and (equal := ras_equal(view)):
        supports.append(equal)
    named = f"; it was launched from {inner.frame.function} ({inner.frame.file}) or before" if inner else ""
    return Judgement(
        supports=tuple(supports),
        subject=places[0].key if places else None,
        summary=f"a kernel on the GPU runs without getting anywhere{named}.",
    )


def _waits_for_kernel(view: View) -> list[Place]:
    """Ranks that wait for the GPU, unless their stack says that it is for a collective."""
    inside = {place.key for place in in_main_stack(view, *_COLLECTIVE)}
    return [place for place in in_main_stack(view, *_SYNC, innermost=4) if place.key not in inside]


def _livelock_vetoes(view: View) -> tuple[Clue, ...]:
    found = []
    unequal = ras_mismatch(view)
    if unequal:
        found.append(unequal)
    still = pattern_clue(view, Pattern.IDLE)
    if still:
        text = f"a kernel that never ends keeps its GPU at 100 %, but {still.text}"
        found.append(Clue(text=text, evidence=still.evidence))
    busy = pattern_clue(view, Pattern.COMPUTING)
    if busy:
        found.append(Clue(text=f"the GPUs do work: {busy.text}", evidence=busy.evidence))
    if not any(process.role is Role.RANK for process in view.case.target.processes):
        found.append(Clue(text="no rank is alive", evidence=view.motion.evidence[:2]))
    return tuple(found)


LIVELOCK = Hypothesis(
    Card(
        cause="kernel-livelock",
        title="a kernel that computes (no collective) never ends",
        condition=Condition.STUCK,
        signs=(
            "100 % utilisation at low power, memory 0 %, also with one GPU",
            "the host waits in cuEventSynchronize or is piled up in cuLaunchKernel",
            "RAS: equal counts, at the value before the request",
        ),
        vetoes=("RAS counts unequal", "GPUs at 0 %, or computing", "one rank alone works n times"),
        next_test="the same command on one GPU (or a smaller model); a core dump of the GPU that names the "
        "kernel: CUDA_ENABLE_USER_TRIGGERED_COREDUMP=1 before the start, then one byte into its pipe; or "
        "cuda-gdb.",
        remedies=Remedies(
            native="send a bundle (`firstlight doctor --bundle FILE`): our engine launches torch's kernels "
            "only.",
            vllm="a newer FlashInfer; another `--attention-backend` or `--moe-backend`; "
            "VLLM_USE_FLASHINFER_SAMPLER=0.",
            sglang="a newer FlashInfer; `--sampling-backend pytorch`, another `--attention-backend` or "
            "`--moe-runner-backend`.",
        ),
        looks=(Look.GPUS, Look.STACKS, Look.RAS),
        is_recorded=True,
        for_idle_gpus=False,
    ),
    _livelock,
)
HYPOTHESES = (AUTOTUNE, DEEPGEMM, LIVELOCK)
