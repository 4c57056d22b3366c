"""GPU memory: too little for what was asked for, or held by somebody else.

Invariant: memory of others is counted only where the driver's process numbers are those of this machine;
inside a container they match nothing.
"""

from __future__ import annotations

from firstlight.doctor.case.values_host import Gpu
from firstlight.doctor.case.view import View
from firstlight.doctor.hypotheses.gpu_case import gpus_of
from firstlight.doctor.hypotheses.texts import overcome, stated
from firstlight.doctor.hypothesis import Card, Clue, Condition, Hypothesis, Judgement, Look, Remedies, Weight

_GIB = 1 << 30
_OOM = (
    r"CUDA out of memory",
    r"torch\.(?:cuda\.)?OutOfMemoryError",
    r"CUDA error: out of memory",
    r"CUDA_ERROR_OUT_OF_MEMORY",
    r"cudaErrorMemoryAllocation",
    r"No available memory for the cache blocks",
    r"[Nn]ot enough memory\. Please try (?:to increase|increasing) --mem-fraction-static",
    r"larger than the available KV cache memory",
    r"cudaMalloc failed: out of memory",
)
_TAKEN = (
    r"Free memory on device .{0,160}less than desired GPU memory utilization",
    r"The memory capacity is unbalanced",
)
_FULL_SHARE = 0.95


def _out_of_memory(view: View) -> Judgement | None:
    found = stated(view, *_OOM)
    if found is None:
        return None
    clue, subject = found
    supports, contradicts = [clue], []
    gpus = gpus_of(view)
    if gpus is not None:
        full = [gpu for gpu in gpus[1].gpus or () if _share(gpu) >= _FULL_SHARE]
        if full:
            text = "; ".join(f"GPU {gpu.index}: {_share(gpu):.0%} of its memory is used" for gpu in full)
            supports.append(Clue(text=text, evidence=(gpus[0],), weight=Weight.WEAK, group="memory"))
    if (against := overcome(view)) is not None:
        contradicts.append(against)
    return Judgement(
        supports=tuple(supports),
        contradicts=tuple(contradicts),
        subject=subject,
        summary=f"a GPU had too little memory for what was asked of it: {clue.text}.",
    )


def _share(gpu: Gpu) -> float:
    if not gpu.memory_total_bytes or gpu.memory_used_bytes is None:
        return 0.0
    return gpu.memory_used_bytes / gpu.memory_total_bytes


OUT_OF_MEMORY = Hypothesis(
    Card(
        cause="gpu-out-of-memory",
        title="a GPU has too little memory for what was asked of it",
        condition=Condition.DEAD,
        signs=("`CUDA out of memory` as an error, not as advice", "memory used near the GPU's total"),
        vetoes=("no such words; the memory was low when they were said",),
        next_test="add up the budget: weights / tensor parallel + KV cache + graphs + 0.6 GB of context, "
        "against `nvidia-smi --query-gpu=memory.total,memory.used --format=csv` before the start.",
        remedies=Remedies(
            native="lower `--memory-fraction`, `--kv-memory` or `--max-model-len`, or raise "
            "`--tensor-parallel`.",
            vllm="lower `--gpu-memory-utilization` (when graphs or activations fail) or `--max-model-len` "
            "and `--max-num-seqs` (when the KV cache does not fit), or raise `--tensor-parallel-size`.",
            sglang="lower `--mem-fraction-static` (when graphs or activations fail), `--cuda-graph-max-bs` "
            "or `--chunked-prefill-size`, or raise `--tp-size`.",
        ),
        looks=(Look.LOGS, Look.EXITS, Look.GPUS),
        is_recorded=True,
    ),
    _out_of_memory,
)


def _memory_taken(view: View) -> Judgement | None:
    words = stated(view, *_TAKEN)
    others = _others(view)
    failed = stated(view, *_OOM)
    if words is None and failed is None:
        return None
    if others is not None and not others[1] and words is None:
        return Judgement(vetoes=(Clue(text="all memory in use is the server's own", evidence=(others[0],)),))
    supports = [words[0]] if words else []
    fills = {"pids": "PID"}
    if others is not None and others[1]:
        rows = [f"{size / 1e9:.1f} GB of GPU {index} by {who}" for index, who, size in others[1][:4]]
        text = f"others hold {', '.join(rows)}"
        supports.append(Clue(text=text, evidence=(others[0],), weight=Weight.STRONG, group="others"))
        if failed is not None:
            supports.append(failed[0])
        pids = [who.removeprefix("pid ") for _, who, _ in others[1] if who.startswith("pid ")]
        fills["pids"] = ",".join(dict.fromkeys(pids)) or "PID"
    return Judgement(
        supports=tuple(supports),
        subject=words[1] if words else failed[1] if failed else None,
        summary=f"memory of a GPU was in use before this server asked for it: "
        f"{supports[0].text if supports else 'nobody measured by whom'}.",
        fills=fills,
    )


def _others(view: View) -> tuple[str, list[tuple[int, str, int]]] | None:
    """(evidence, [(GPU, who, bytes)]) of at least 1 GiB that is not the target's; None where nobody can tell.

    Memory of no process that the driver names is an orphan's: of another name space, or of a context that
    was never freed.
    """
    gpus = gpus_of(view)
    if gpus is None:
        return None
    pids = {process.pid for process in view.case.target.processes}
    rows = gpus[1].gpus or ()
    named = {pid for gpu in rows for pid in gpu.process_bytes}
    if named and not named & pids and view.motion.living_ranks:
        return None  # the driver's numbers are not those of this name space
    found = []
    for gpu in rows:
        for pid, size in gpu.process_bytes.items():
            if pid not in pids and (size or 0) >= _GIB:
                found.append((gpu.index, f"pid {pid}", size or 0))
        known = sum(size or 0 for size in gpu.process_bytes.values())
        is_told = all(size is not None for size in gpu.process_bytes.values())
        if is_told and gpu.memory_used_bytes is not None and gpu.memory_used_bytes - known >= 2 * _GIB:
            found.append((gpu.index, "nobody the driver knows", gpu.memory_used_bytes - known))
    return gpus[0], found


MEMORY_TAKEN = Hypothesis(
    Card(
        cause="gpu-memory-taken",
        title="another process, or one left over, holds memory of the GPU",
        condition=Condition.DEAD,
        signs=(
            "used memory far above zero before the launch",
            "processes on the GPU that are none of this server's, or memory of no process at all",
            "vLLM: `Free memory on device … is less than desired GPU memory utilization`",
        ),
        vetoes=("the GPUs were empty when it started", "all memory in use is the server's own"),
        next_test="`nvidia-smi --query-compute-apps=pid,used_memory --format=csv`, then `ps -o "
        "pid,lstart,args -p {pids}`: what is left of an earlier run of yours has its FIRSTLIGHT_RUN_ID or "
        "its command line.",
        remedies=Remedies(
            native="end a process left over from your own run by its number (`kill {pids}`; `firstlight ps` "
            "shows runs); leave those of others alone and choose another GPU with CUDA_VISIBLE_DEVICES.",
            vllm="end a process left over from your own run (`kill {pids}`); otherwise choose another GPU "
            "with CUDA_VISIBLE_DEVICES, or lower `--gpu-memory-utilization` to what is free.",
            sglang="end a process left over from your own run (`kill {pids}`); otherwise choose another GPU "
            "with CUDA_VISIBLE_DEVICES or `--base-gpu-id`, or lower `--mem-fraction-static` to what is free.",
        ),
        looks=(Look.GPUS, Look.LOGS),
        is_recorded=True,
    ),
    _memory_taken,
)
HYPOTHESES = (MEMORY_TAKEN, OUT_OF_MEMORY)
