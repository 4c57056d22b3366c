"""Kernels that this GPU, driver or assembler cannot run, and those that the driver compiles itself.

All but the last say so in words. Invariant: a claim about a kernel quotes the error and the place that raised
it; a library that merely lacks an architecture is no cause.
"""

from __future__ import annotations

import re

from firstlight.doctor.case.values_process import Libraries
from firstlight.doctor.case.view import View
from firstlight.doctor.hypotheses.gpu_case import PTX_COMPILER, gpus_of, pattern_clue, uses_gpus
from firstlight.doctor.hypotheses.texts import by_text, failing_place
from firstlight.doctor.hypothesis import Card, Clue, Condition, Hypothesis, Judgement, Look, Remedies, Weight
from firstlight.doctor.motion.gpu_pattern import Pattern
from firstlight.doctor.motion.motion import State

_NATIVE_BUILD = (
    "install a torch build for this GPU: `python -c 'import torch; print(torch.cuda.get_arch_list())'`."
)
_BUSY_CORES = 0.8


def _name_kernel(view: View, clue: Clue) -> str:
    """The error with the place that raised it and the GPUs' compute capability."""
    place = failing_place(view, clue.evidence[0], clue.text.removeprefix("log: ")[:80])
    raised = f", raised by {place}" if place else ""
    return f"a kernel has no code for this GPU{_capability(view)}{raised}: {clue.text}."


def _capability(view: View) -> str:
    found = gpus_of(view)
    told = (
        {gpu.compute_capability for gpu in found[1].gpus or () if gpu.compute_capability} if found else set()
    )
    return f" (compute capability {', '.join(f'{a}.{b}' for a, b in sorted(told))})" if told else ""


NO_KERNEL_IMAGE = by_text(
    Card(
        cause="no-kernel-image",
        title="a kernel has no code for this GPU",
        condition=Condition.DEAD,
        signs=(
            "`no kernel image is available for execution on the device`, often wrapped as a failed CUDA "
            "graph",
            "the failing operator's symbol is in none of the images that this GPU can run",
        ),
        vetoes=("the failing operator's symbol is covered",),
        next_test="launch that operator alone; `cuobjdump --list-elf` of the library *in which its symbol "
        "is*.",
        remedies=Remedies(
            native=_NATIVE_BUILD,
            vllm="another backend for that operator (`--attention-backend`, `--moe-backend`), or the wheel "
            "built for this GPU.",
            sglang="another backend for that operator (`--attention-backend`, `--moe-runner-backend`, "
            "`--fp8-gemm-backend`, `--sampling-backend pytorch`), or the wheel built for this GPU.",
        ),
        looks=(Look.LOGS, Look.EXITS),
        is_recorded=True,
    ),
    r"no kernel image is available for execution on the device",
    r"cudaErrorNoKernelImageForDevice",
    r"CUDA_ERROR_NO_BINARY_FOR_GPU",
    r"has no device code compatible with CUDA arch",
    r"TllmGenFmhaRunner.{0,120}Unsupported architecture",
    r"with CUDA capability sm_\d+\w? is not compatible with the current PyTorch installation",
    summarize=_name_kernel,
)


def _driver(view: View) -> dict[str, str]:
    found = gpus_of(view)
    return {
        "driver": f"{found[1].driver} (CUDA {found[1].driver_cuda})" if found and found[1].driver else "?"
    }


PTX_TOO_NEW = by_text(
    Card(
        cause="ptx-too-new",
        title="PTX was made by a CUDA newer than the driver",
        condition=Condition.DEAD,
        signs=("`the provided PTX was compiled with an unsupported toolchain`",),
        vetoes=("the driver's CUDA is at least as new as the PTX",),
        next_test="`nvidia-smi` (CUDA Version) against the toolkit that the library was built with; the "
        "driver here: {driver}.",
        remedies=Remedies(
            native="a newer driver, or cuda-compat first on LD_LIBRARY_PATH, or a torch build for an older "
            "CUDA.",
            vllm="a newer driver, or cuda-compat first on LD_LIBRARY_PATH (minor version compatibility does "
            "not cover PTX), or the wheel for an older CUDA.",
            sglang="a newer driver, or cuda-compat first on LD_LIBRARY_PATH (minor version compatibility "
            "does not cover PTX), or the wheel for an older CUDA.",
        ),
        looks=(Look.LOGS, Look.EXITS, Look.GPUS),
        is_recorded=True,
    ),
    r"provided PTX was compiled with an unsupported toolchain",
    r"CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
    r"cudaErrorUnsupportedPtxVersion",
    fill=_driver,
)
_PTXAS = re.compile(r"Value '(sm_\w+)' is not defined")


def _architecture(view: View) -> dict[str, str]:
    line = view.find_line(_PTXAS.pattern)
    found = _PTXAS.search(line.text) if line else None
    return {"architecture": found[1] if found else "this GPU"}


PTXAS_TOO_OLD = by_text(
    Card(
        cause="ptxas-too-old",
        title="the assembler (ptxas) is older than the GPU",
        condition=Condition.DEAD,
        signs=("`ptxas fatal : Value 'sm_121a' is not defined for option 'gpu-name'`",),
        vetoes=(),
        next_test="`ptxas --version`, and `ptxas --help | grep {architecture}`, of the one that was called.",
        remedies=Remedies(
            native="our engine compiles no kernels with ptxas; torch.compile does: TRITON_PTXAS_PATH to the "
            "ptxas of a toolkit that knows {architecture}.",
            vllm="TRITON_PTXAS_PATH to the ptxas of a toolkit that knows {architecture}; CUDA_HOME likewise "
            "for nvcc.",
            sglang="TRITON_PTXAS_PATH to the ptxas of a toolkit that knows {architecture}; CUDA_HOME "
            "likewise for nvcc.",
        ),
        looks=(Look.LOGS, Look.EXITS),
        is_recorded=True,
    ),
    r"ptxas fatal\s*: +Value 'sm_\w+' is not defined for option 'gpu-name'",
    r"ptxas fatal\s*: .{0,40}(?:Unsupported|unsupported) (?:\.version|\.target|architecture)",
    fill=_architecture,
)


def _driver_jit(view: View) -> Judgement | None:
    if not uses_gpus(view):
        return None
    loaded = [
        seen
        for seen in view.case.all(Libraries)
        if any(library.name.startswith(PTX_COMPILER) for library in seen.value.libraries)
    ]
    place = next(view.in_stack(r"ptxjit", r"cuModuleLoad.*JIT", r"cuLinkAddData"), None)
    if not loaded and place is None:
        return None
    key = place.key if place else loaded[0].subject
    motion = view.motion.of(key)
    if motion is None or motion.cores is None or motion.cores < _BUSY_CORES:
        text = f"{key} does not use the processor, which compiling would"
        evidence = motion.evidence[:2] if motion else ()
        return Judgement(vetoes=(Clue(text=text, evidence=evidence),))
    if motion.state not in (State.SPINNING, State.MOVING):
        return None
    supports = [
        Clue(text=f"{key} has loaded the driver's compiler of PTX", evidence=(seen.id,), group="library")
        for seen in loaded[:1]
    ]
    if place is not None:
        text = f"{key} is in {place.frame.function} ({place.frame.file})"
        supports.append(Clue(text=text, evidence=(place.evidence,), weight=Weight.STRONG, group="stack"))
    if still := pattern_clue(view, Pattern.IDLE):
        supports.append(still)
    text = f"one core is busy ({motion.cores:.1f} cores) and no compiler runs as a child"
    supports.append(Clue(text=text, evidence=motion.evidence[:3], weight=Weight.WEAK, group="cores"))
    return Judgement(supports=tuple(supports), subject=key)


DRIVER_JIT = Hypothesis(
    Card(
        cause="driver-ptx-jit",
        title="the driver compiles PTX for this GPU, which happens once and takes minutes",
        condition=Condition.STARTING,
        signs=(
            "the main thread is in libnvidia-ptxjitcompiler, one core at 100 %, GPUs at 0 %",
            "~/.nv/ComputeCache grows; the libraries hold only PTX for this compute capability",
        ),
        vetoes=("the processor is not used", "native code for this GPU is there"),
        next_test="`du -s ~/.nv/ComputeCache` twice, and how long the second start takes.",
        remedies=Remedies(
            native="wait; keep ~/.nv/ComputeCache between starts (CUDA_CACHE_PATH, "
            "CUDA_CACHE_MAXSIZE=4294967296).",
            vllm="wait; keep ~/.nv/ComputeCache between starts (CUDA_CACHE_PATH, "
            "CUDA_CACHE_MAXSIZE=4294967296), or a wheel with native code for this GPU.",
            sglang="wait; keep ~/.nv/ComputeCache between starts (CUDA_CACHE_PATH, "
            "CUDA_CACHE_MAXSIZE=4294967296), or a wheel with native code for this GPU.",
        ),
        looks=(Look.STACKS, Look.MOTION, Look.GPUS),
        is_recorded=True,
    ),
    _driver_jit,
)
HYPOTHESES = (NO_KERNEL_IMAGE, PTX_TOO_NEW, PTXAS_TOO_OLD, DRIVER_JIT)
