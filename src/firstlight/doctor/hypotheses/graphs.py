"""CUDA graphs that hang while they are captured or replayed, and modules that are loaded too late.

Invariant: a hang in capture is said only where the log or a stack puts a rank into capture; one in replay
only after capture is done, and never of GPUs at 0 %.
"""

from __future__ import annotations

from collections.abc import Iterator

from firstlight.doctor.case.target import Engine
from firstlight.doctor.case.view import View
from firstlight.doctor.hypotheses.gpu_case import (
    about,
    has_log,
    in_main_stack,
    last_phase_line,
    line_clue,
    pattern_clue,
    place_clue,
    ras_mismatch,
    stacks_elsewhere,
    switch,
    uses_gpus,
    variable_is,
)
from firstlight.doctor.hypothesis import Card, Clue, Condition, Hypothesis, Judgement, Look, Remedies, Weight
from firstlight.doctor.motion.gpu_pattern import Pattern

_BEGIN = (
    r"Capture .{0,40}[Gg]raph begin|Capturing batches \(|Capturing CUDA graphs|Registering \d+ cuda graph"
)
_END = (
    r"Capture .{0,40}[Gg]raph end",
    r"Graph capturing finished",
    r"init engine \(profile",
    r"max_total_num_tokens=",
    r"ready to roll|Application startup complete",
)
_CAPTURE_STACK = (
    r"cuda_?graph.*:_?capture",
    r"graph_runner.*:_?capture",
    r"gpu_model_runner.*:(?:capture_model|_capture_cudagraphs)",
    r"torch/cuda/graphs\.py:(?:__enter__|capture_begin|capture_end|__exit__)",
)
_REPLAY_STACK = (r":replay$", r"cuGraphLaunch", r"cudaGraphLaunch")
_ZERO = r"Registering 0 cuda graph addresses"
_OFF = ("--enforce-eager", "enforce_eager", "--disable-cuda-graph", "disable_cuda_graph")
_NATIVE = "our engine captures no CUDA graphs."
_OFF_VLLM = '`--enforce-eager`, or `--compilation-config \'{{"cudagraph_mode": "PIECEWISE"}}\'`'
_OFF_SGLANG = (
    "`--disable-cuda-graph` (0.5.23: `--cuda-graph-backend-decode=disabled`), or fewer of them with "
    "`--cuda-graph-max-bs 8`"
)


def graphs_off(view: View) -> Clue | None:
    """That no graph is captured at all."""
    if view.case.target.engine is Engine.NATIVE:
        return Clue(text="our engine captures no CUDA graphs", evidence=about(view))
    return switch(view, *_OFF)


def _capture(view: View) -> Judgement | None:
    if not uses_gpus(view):
        return None
    off = graphs_off(view)
    if off:
        return Judgement(vetoes=(off,))
    line = last_phase_line(view, _BEGIN, _END)
    places = in_main_stack(view, *_CAPTURE_STACK, innermost=30)
    if line is None and not places:
        reason = stacks_elsewhere(view, "a capture") or _not_in_log(view)
        return Judgement(vetoes=(reason,)) if reason else None
    supports = list(_of_capture(view))
    if line is not None:
        supports.append(line_clue(line, Weight.SOME))
    if places and view.has_stopped_moving:
        supports.append(place_clue(places[0], Weight.STRONG))
    unequal = ras_mismatch(view)
    where = f": {line.text.strip()[-120:]}" if line else ""
    return Judgement(
        supports=tuple(supports),
        contradicts=(unequal,) if unequal else (),
        subject=places[0].key if places else None,
        summary=f"the capture of CUDA graphs does not get on{where}.",
    )


def _of_capture(view: View) -> Iterator[Clue]:
    zero = view.find_line(_ZERO)
    if zero is not None:
        yield line_clue(zero, Weight.SOME, "zero")
    if waits := pattern_clue(view, Pattern.WAITING, Pattern.MIXED):
        yield waits


def _not_in_log(view: View) -> Clue | None:
    if not has_log(view) or view.case.target.engine not in (Engine.VLLM, Engine.SGLANG):
        return None
    done = view.find_line(*_END)
    if done is not None:
        return line_clue(done, Weight.SOME)
    return Clue(text="no log line says that a capture has begun", evidence=(view.lines[-1].evidence,))


CAPTURE = Hypothesis(
    Card(
        cause="graph-capture-hang",
        title="the capture of CUDA graphs hangs",
        condition=Condition.STUCK,
        signs=(
            "the log's last phase is `Capturing …`, its bar stands still, GPU memory does not step up",
            "a stack in capture",
        ),
        vetoes=("capture was not reached, or is done", "graphs are off"),
        next_test="the same command without graphs; if that works, with fewer of them.",
        remedies=Remedies(native=_NATIVE, vllm=f"{_OFF_VLLM}.", sglang=f"{_OFF_SGLANG}."),
        looks=(Look.LOGS, Look.STACKS, Look.GPUS),
        is_recorded=True,
    ),
    _capture,
)


def _replay(view: View) -> Judgement | None:
    if not uses_gpus(view):
        return None
    vetoes = tuple(_replay_vetoes(view))
    if vetoes:
        return Judgement(vetoes=vetoes)
    done = view.find_line(*_END[:3], _END[4])
    waits = pattern_clue(view, Pattern.WAITING)
    places = in_main_stack(view, *_REPLAY_STACK)
    if not places and (done is None or waits is None):
        return None
    unequal = ras_mismatch(view)
    supports = [place_clue(places[0], Weight.STRONG)] if places and view.has_stopped_moving else []
    supports += [clue for clue in (waits,) if clue]
    if done is not None and (view.motion.serving.num_requests or view.motion.serving.is_generating is False):
        text = "graphs were captured, and the first request gets no token"
        supports.append(Clue(text=text, evidence=(done.evidence, *view.motion.serving.evidence[:2])))
    return Judgement(
        supports=tuple(supports),
        contradicts=(unequal,) if unequal else (),
        subject=places[0].key if places else None,
    )


def _replay_vetoes(view: View) -> Iterator[Clue]:
    if off := graphs_off(view):
        yield off
    still = pattern_clue(view, Pattern.IDLE)
    if still:
        yield Clue(
            text=f"a graph that hangs keeps its GPU at 100 %, but {still.text}", evidence=still.evidence
        )
    line = last_phase_line(view, _BEGIN, _END)
    if line is not None:
        yield Clue(text="capture is not done yet", evidence=(line.evidence,))


REPLAY = Hypothesis(
    Card(
        cause="graph-replay-hang",
        title="a captured CUDA graph hangs when it is replayed",
        condition=Condition.STUCK,
        signs=(
            "capture is done, the first token never comes; GPUs 100 % at low power",
            "a stack in the graph's replay",
        ),
        vetoes=("it hangs eagerly too", "GPUs at 0 %", "graphs are off, or capture is not done"),
        next_test="the same command without graphs.",
        remedies=Remedies(
            native=_NATIVE,
            vllm=f"{_OFF_VLLM}; then a newer NCCL (2.30.4 has cured such hangs over two nodes).",
            sglang=f"{_OFF_SGLANG}; then a newer NCCL (2.30.4 has cured such hangs over two nodes).",
        ),
        looks=(Look.STACKS, Look.GPUS, Look.GENERATION, Look.LOGS),
        is_recorded=True,
        for_idle_gpus=False,
    ),
    _replay,
)

_LOADS = (
    r"cuLibraryLoad",
    r"cuModuleLoad",
    r"cuModuleGetLoadingMode",
    r"triton/compiler/compiler\.py:_init_handles",
    r"driver\.py:load_binary",
)


def _lazy_load(view: View) -> Judgement | None:
    if not uses_gpus(view):
        return None
    eager = variable_is(view, "CUDA_MODULE_LOADING", "eager")
    if eager:
        return Judgement(vetoes=(eager,))
    places = in_main_stack(view, *_LOADS, innermost=20)
    if not places or not view.has_stopped_moving:
        elsewhere = stacks_elsewhere(view, "the loading of a module")
        return Judgement(vetoes=(elsewhere,)) if elsewhere and not places else None
    still = pattern_clue(view, Pattern.IDLE)
    if still:
        text = f"no kernel runs that the load could wait for: {still.text}"
        return Judgement(vetoes=(Clue(text=text, evidence=still.evidence),))
    supports = [place_clue(place, Weight.STRONG) for place in places[:2]]
    if waits := pattern_clue(view, Pattern.WAITING, Pattern.MIXED, weight=Weight.SOME):
        supports.append(waits)
    return Judgement(supports=tuple(supports), subject=places[0].key)


LAZY_LOAD = Hypothesis(
    Card(
        cause="lazy-module-load",
        title="a kernel is loaded only when it is needed, and the load waits for a kernel that waits for the "
        "host",
        condition=Condition.STUCK,
        signs=("a stack in cuLibraryLoad or cuModuleLoad while a kernel spins on the GPU",),
        vetoes=("the stacks of all ranks are elsewhere", "CUDA_MODULE_LOADING=EAGER", "GPUs at 0 %"),
        next_test="the same command with CUDA_MODULE_LOADING=EAGER.",
        remedies=Remedies(
            native="CUDA_MODULE_LOADING=EAGER.",
            vllm="CUDA_MODULE_LOADING=EAGER.",
            sglang="CUDA_MODULE_LOADING=EAGER.",
        ),
        looks=(Look.STACKS, Look.GPUS, Look.ENVIRONMENT),
        is_recorded=True,
    ),
    _lazy_load,
)
HYPOTHESES = (CAPTURE, REPLAY, LAZY_LOAD)
