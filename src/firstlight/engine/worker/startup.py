"""The one file that orders the phases of a start: from an opened checkpoint to a model that has made a token.

Reports each phase as it is entered, with bytes resident while weights arrive. Invariant: `start` returns only
after a token went through the real path.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec
import torch

from firstlight.base.blackbox.recorder import Recorder
from firstlight.base.config import STEP_SIZES, EngineSection
from firstlight.base.errors import EngineError, ResourceError, UnsupportedError
from firstlight.base.heap import give_back_heap
from firstlight.base.phases import BUILD, COMPILE, DEVICE, DRAFTER, KV, PREPARE, SELF_TEST, WEIGHTS
from firstlight.engine.core import EngineCore, Execute
from firstlight.engine.messages import NOT_NUMBERS, Submit
from firstlight.engine.params import SamplingParams
from firstlight.engine.scheduler.scheduler import Scheduler
from firstlight.engine.speculation.drafter import Drafter
from firstlight.engine.speculation.host import Extra, Host
from firstlight.engine.speculation.make import Drafting, describe, make_speculation, read_drafting
from firstlight.engine.worker.assemble import load_weights, make_runner
from firstlight.engine.worker.kv_pool import KVPool, token_row_bytes
from firstlight.engine.worker.model_runner import ModelRunner
from firstlight.engine.worker.not_numbers import SOUND, WIDER, Inspection
from firstlight.engine.worker.sizes import Needs, Sizes, allows_two_layouts, resolve_sizes
from firstlight.facts.checkpoint.checkpoint import Checkpoint
from firstlight.facts.machine.machine import inspect_machine
from firstlight.loading.fit import require_fit
from firstlight.loading.reader import LoadReport
from firstlight.loading.ties import settle_ties
from firstlight.models.declare import Declaration
from firstlight.models.layers.attention import attention_shape
from firstlight.models.registry import find
from firstlight.ops.collectives import Group
from firstlight.ops.contract import AttentionShape, Backend, MatrixKind
from firstlight.ops.cpu.native_backend import NativeBackend
from firstlight.ops.cpu.native_selection import NativeSelection
from firstlight.ops.cpu.pick import pick_cpu_kernels
from firstlight.ops.kv_rows import name_of
from firstlight.ops.reference import ReferenceBackend
from firstlight.ops.selection import Selection, TorchSelection
from firstlight.ops.step_clock import StepClock

COMPILED = "our own CPU kernels, once"
REPORT_BUG = "This is a bug in the engine; run again with --debug and report what it prints."


class Report(Protocol):
    """Where progress goes: `base.phases.PhaseReporter.report`, a progress bar, or nothing."""

    def __call__(
        self, phase: str, done: int = 0, total: int = 0, unit: str = "", detail: str = ""
    ) -> None: ...


def quiet(phase: str, done: int = 0, total: int = 0, unit: str = "", detail: str = "") -> None:
    """A `Report` that shows nothing: whoever starts the engine has a meter of their own, or none."""


@dataclass(frozen=True)
class Started:
    """A rank that is ready to run plans. `report` is the start-up report."""

    runner: ModelRunner
    section: EngineSection  # resolved: no zeros
    num_pages: int
    checkpoint: Checkpoint
    report: dict[str, Any]
    selection: Selection
    drafter: Drafter | None = None  # on rank 0
    clock: StepClock = field(default_factory=StepClock)  # the rank's

    def core(self, execute: Execute, recorder: Recorder | None = None) -> EngineCore:
        """The engine of rank 0 over `execute`, which runs a plan on all ranks."""
        end_ids = self.checkpoint.description.eos_token_ids
        scheduler = Scheduler(self.section, self.num_pages, end_ids)
        speculation = make_speculation(self.section, self.drafter)
        return EngineCore(scheduler, execute, recorder, self.selection, speculation, self.clock)


def start(
    checkpoint: Checkpoint,
    dtype: str,
    section: EngineSection,
    group: Group,
    report: Report,
    capture: Sequence[int] = (),
) -> Started:
    """Declares, sizes, loads. `dtype` as in `ModelSection`. Raises `FirstlightError`s that say what to do.

    `capture`: layers whose states every step leaves in `Started.runner.states`; see `Decoder.capture`.
    """
    started_s = time.monotonic()
    require_fit(checkpoint, section)
    checkpoint = settle_ties(checkpoint)
    drafting = _read_drafting(section, checkpoint, report) if group.rank == 0 else None
    report(DEVICE)
    num_threads = _set_threads(section, group)
    ops = pick_backend(section, dtype, group, num_threads, report)
    description = checkpoint.description
    report(BUILD, 0, description.num_layers, "layers")
    declare = Declaration(
        ops,
        group,
        lambda done, total: report(BUILD, done, total, "layers"),
        expert_parallel=section.expert_parallel,
    )
    decoder = find(description.architecture)(declare, description)
    kinds = declare.kinds(checkpoint)
    available_bytes = _available_bytes(ops)
    _prepare(ops, list(dict.fromkeys(kinds)), report, allows_two_layouts(kinds, available_bytes, section))
    shape = attention_shape(description, group.rank, group.size)
    extra = drafting.extra(ops) if drafting is not None else Extra()
    needs = Needs(description, declare, kinds, shape, extra)
    try:
        sizes = resolve_sizes(section, needs, available_bytes)
    except ResourceError:
        if drafting is None or "drafter" not in section.shrinks:
            raise
        drafting = None
        sizes = _without_drafter(section, needs, ops)
    sizes = _agree(sizes, group)
    loaded = load_weights(checkpoint, declare, lambda done, total: report(WEIGHTS, done, total, "bytes"))
    pool = _make_pool(description.num_layers, sizes, shape, ops, report)
    runner = make_runner(decoder, ops, pool, sizes.section, group)
    assert not (capture and drafting is not None and drafting.layers), "one asks for states, not two"
    layers = tuple(capture) or (drafting.layers if drafting is not None else ())
    if layers:
        runner.capture(decoder, layers)
    host = Host(decoder, runner, ops, sizes.section, sizes.num_pages)
    drafter = drafting.make(host) if drafting is not None else None
    summary = _summary(checkpoint, ops, sizes, loaded) | describe(sizes.section, drafting, drafter)
    if group.transport is not None:
        summary["collectives"] = group.transport.words
    summary |= {"threads": num_threads, "start_s": round(time.monotonic() - started_s, 3)}
    selection = NativeSelection(ops.pool) if isinstance(ops, NativeBackend) else TorchSelection()
    return Started(
        runner, sizes.section, sizes.num_pages, checkpoint, summary, selection, drafter, group.clock
    )


def self_test(core: EngineCore, inspection: Inspection, report: Report) -> None:
    """Makes one token through scheduler, model and sampler.

    Raises `EngineError` if none comes, and `ModelFileError` where the weights are to blame.
    """
    core.handle(Submit("self-test", [0, 1], SamplingParams(temperature=0.0, max_tokens=1, seed=0)))
    for _ in range(4):
        outputs = core.step()
        finished = [o for o in outputs.outputs if o.finish_reason] if outputs is not None else []
        if finished and finished[0].error is None and finished[0].token_ids:
            core.scheduler.forget()
            return
        if finished:
            require_numbers(core, inspection, report)
            raise EngineError(
                f"the self-test failed: {finished[0].error or finished[0].finish_reason}", REPORT_BUG
            )
    raise EngineError("the self-test gave no token in 4 steps", REPORT_BUG)


def require_numbers(core: EngineCore, inspection: Inspection, report: Report) -> None:
    """Before an engine serves: where logits were not numbers, the weights are looked at.

    Raises the `ModelFileError` that names the tensor, or an `EngineError` where all weights are sound.
    """
    if not core.scheduler.stats().num_not_numbers:
        return
    detail = f"{NOT_NUMBERS}: looking for the weight"
    inspection.look(lambda done, total: report(SELF_TEST, done, total, "tensors", detail))
    raise EngineError(f"the self-test failed: {NOT_NUMBERS}, though {SOUND}", WIDER)


def pick_backend(
    section: EngineSection, dtype: str, group: Group, num_threads: int, report: Report
) -> Backend:
    """The operators for a device and a `--dtype`, with the reason."""
    if dtype not in ("auto", "float32"):
        raise UnsupportedError(f"--dtype {dtype} is not supported", "Use auto or float32.")
    if section.device == "cpu":
        if dtype == "float32":
            return ReferenceBackend("--dtype float32: the reference, which rounds nothing", section.kv_dtype)
        return pick_cpu_kernels(
            section.cpu_kernels,
            num_threads,
            group,
            lambda done, total: report(COMPILE, done, total, "files", COMPILED),
            section.kv_dtype,
        )
    if section.device == "cuda":
        from firstlight.ops.cuda.backend import CudaBackend

        return CudaBackend.open(dtype, group.rank, section.kv_dtype)
    raise UnsupportedError(f"--device {section.device} is not supported", "Use cpu or cuda.")


def _read_drafting(section: EngineSection, checkpoint: Checkpoint, report: Report) -> Drafting | None:
    if section.drafts:
        report(DRAFTER)
    drafting = read_drafting(section, checkpoint)
    if drafting is not None:
        report(DRAFTER, detail=drafting.words)
    return drafting


def _without_drafter(section: EngineSection, needs: Needs, ops: Backend) -> Sizes:
    """The sizes where memory does not suffice for a drafter that nobody asked for, once it is forgotten."""
    give_back_heap()
    without = msgspec.structs.replace(section, drafter="none")
    sizes = resolve_sizes(without, replace(needs, extra=Extra()), _available_bytes(ops))
    note = "no drafter: memory does not suffice for the one that comes with the model"
    return Sizes(sizes.section, sizes.num_pages, (note, *sizes.notes))


def _agree(sizes: Sizes, group: Group) -> Sizes:
    """Ranks may see different amounts of free memory: all take the smallest step, length and pool."""
    names = ("max_model_len", *STEP_SIZES)
    least = {name: group.agree_on_least(name, getattr(sizes.section, name)) for name in names}
    num_pages = group.agree_on_least("pages", sizes.num_pages)
    return Sizes(msgspec.structs.replace(sizes.section, **least), num_pages, sizes.notes)


def _prepare(ops: Backend, kinds: list[MatrixKind], report: Report, two_copies: bool) -> None:
    """Choose the layouts, one kind of matrix after the other: each is measured for some milliseconds."""
    for index, kind in enumerate(kinds):
        report(PREPARE, index, len(kinds), "shapes")
        ops.prepare([kind], two_copies=two_copies)
    report(PREPARE, len(kinds), len(kinds), "shapes")


def _make_pool(num_layers: int, sizes: Sizes, shape: AttentionShape, ops: Backend, report: Report) -> KVPool:
    num_slots = sizes.num_pages * sizes.section.page_size_tokens
    total_bytes = num_layers * num_slots * shape.num_kv_heads * sum(token_row_bytes(shape, ops))
    detail = f"{sizes.num_pages} pages"
    report(KV, 0, total_bytes, "bytes", detail)
    pool = KVPool(num_layers, num_slots, shape, ops)
    report(KV, total_bytes, total_bytes, "bytes", detail)
    return pool


def _set_threads(section: EngineSection, group: Group) -> int:
    cores = inspect_machine(with_gpus=False).num_usable_cores
    num_threads = section.threads or max(1, cores // group.size)
    torch.set_num_threads(num_threads)
    return num_threads


def _available_bytes(ops: Backend) -> int:
    if ops.device.type == "cuda":
        return int(torch.cuda.mem_get_info(ops.device)[0])
    return inspect_machine(with_gpus=False).memory_available_bytes


def _summary(checkpoint: Checkpoint, ops: Backend, sizes: Sizes, loaded: LoadReport) -> dict[str, Any]:
    description = checkpoint.description
    return {
        "model": checkpoint.path,
        "architecture": description.architecture,
        "formats": checkpoint.formats,
        "checkpoint_notes": list(checkpoint.notes),
        "backend": f"{ops.name} ({ops.reason})",
        "row_invariant": ops.row_invariant,
        "kv_dtypes": [name_of(ops.key_dtype), name_of(ops.value_dtype)],
        "layouts": ops.layout_notes(),
        "memory": list(sizes.notes),
        "max_model_len": sizes.section.max_model_len,
        "max_num_seqs": sizes.section.max_num_seqs,
        "max_batched_tokens": sizes.section.max_batched_tokens,
        "kv_tokens": (sizes.num_pages - 1) * sizes.section.page_size_tokens,
        "weights_read_bytes": loaded.read_bytes,
        "weights_s": round(loaded.seconds, 3),
    }
