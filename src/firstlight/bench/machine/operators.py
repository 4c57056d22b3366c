"""`firstlight bench operators`: each of our own CPU operators over a model's shapes, beside the machine.

The operators are those of the engine's recorded step: all layers' operators of a kind run one after the
other, and before each run other memory is read, so that weights come from memory as in a step. Invariant: the
limits (bytes read, 8-bit multiplications) are measured by the same threads, between the operators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np
from rich.table import Table

from firstlight.base.config import EngineSection
from firstlight.base.errors import UnsupportedError
from firstlight.bench.engine.in_process import open_engine
from firstlight.bench.report import plain_table
from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.worker.replay import RecordedReplay
from firstlight.engine.worker.startup import Started
from firstlight.ops.cpu import library as native
from firstlight.ops.cpu.library import Op, Pool, Step
from firstlight.ops.cpu.packed import PACKED, packed_bytes
from firstlight.ops.kv_rows import row_bytes

READ_BYTES = 256 * 2**20  # above any last-level cache of machines with few cores
LOOPS = 200_000
OPS_A_LOOP = 6 * 32 * 2  # products and additions of `measure_multiply`
NAMES = {
    native.EMBED: "embedding",
    native.NORM: "norm",
    native.SILU: "gate",
    native.TURN_AND_WRITE: "rotary and KV write",
    native.ATTEND: "attention",
}
FORMATS = {number: layout.name for number, layout in PACKED.items()}
KV_DTYPES = {number: dtype for dtype, number in native.KV_TYPES.items()}


@dataclass(frozen=True)
class OperatorsOrder:
    """What is measured: steps of so many sequences, each with `history` tokens behind it."""

    model: Path
    threads: int = 0
    rows: tuple[int, ...] = (1, 2, 4, 8, 16)
    history: int = 256
    rounds: int = 7
    kv_dtype: str = "auto"


@dataclass(frozen=True)
class Limits:
    """What this machine's threads reach with nothing else to do."""

    read_bytes_per_s: float
    multiply_ops_per_s: float


@dataclass(frozen=True)
class OperatorPoint:
    """One operator in a step of `num_rows`: the fastest of the rounds, divided by its number of layers."""

    name: str
    num_layers: int
    num_rows: int
    seconds: float
    read_bytes: int  # weights, or keys and values
    multiply_ops: int  # products and additions of matrices

    @property
    def bytes_per_s(self) -> float:
        return self.read_bytes / self.seconds

    @property
    def ops_per_s(self) -> float:
        return self.multiply_ops / self.seconds


@dataclass
class OperatorsReport:
    """By operator and rows; `step_s` by rows is the whole recorded step in one call."""

    instruction_set: str
    num_threads: int
    history: int
    limits: Limits = field(default_factory=lambda: Limits(0.0, 0.0))
    points: list[OperatorPoint] = field(default_factory=list)
    step_s: dict[int, float] = field(default_factory=dict)


def bench_operators(order: OperatorsOrder, on_point: Callable[[int, int], None]) -> OperatorsReport:
    """Measures all operators; `on_point(done, total)` after each number of rows."""
    most = max(order.rows)
    section = EngineSection(
        threads=order.threads,
        cpu_kernels="native",
        max_num_seqs=most,
        max_model_len=order.history + 2,
        kv_memory_bytes=0,
        kv_dtype=order.kv_dtype,
    )
    engine = open_engine(order.model, "auto", section)
    replay = engine.runner.replay
    description = engine.checkpoint.description
    calls_layers = description.experts is not None or description.latent is not None
    if calls_layers or not isinstance(replay, RecordedReplay):
        raise UnsupportedError(
            "there is no program of native operators to measure",
            "Use --device cpu, the default, and a model without experts and latent attention.",
        )
    pool = replay.pool
    instructions = native.INSTRUCTION_SETS[pool.instruction_set]
    report = OperatorsReport(instructions, pool.num_threads, order.history)
    limits, other = [measure_limits(pool)], MeasuringRoom(pool)
    for done, num_rows in enumerate(order.rows, 1):
        step = _step(engine, replay, num_rows, order.history)
        ops = replay.operators
        report.step_s[num_rows] = _fastest_s(pool, ops, step, order.rounds)
        for name, group in _groups(ops).items():
            seconds = _fastest_s(pool, group, step, order.rounds, [other.read]) / len(group)
            amounts = _amounts(group[0], num_rows, order.history)
            report.points.append(OperatorPoint(name, len(group), num_rows, seconds, *amounts))
        limits.append(measure_limits(pool))
        on_point(done, len(order.rows))
    reads, multiplies = zip(*((one.read_bytes_per_s, one.multiply_ops_per_s) for one in limits), strict=True)
    report.limits = Limits(max(reads), max(multiplies))
    return report


class MeasuringRoom:
    """Memory that is no part of the model, and the operator that reads all of it."""

    def __init__(self, pool: Pool) -> None:
        self.memory = np.ones(READ_BYTES // 4, np.int32)
        self.out = np.zeros(64 * pool.num_threads, np.uint8)
        self.read = Op(native.READ, n=(READ_BYTES,), p=(self.memory.ctypes.data, self.out.ctypes.data))


def measure_limits(pool: Pool) -> Limits:
    """The best of some passes over memory, and of products out of registers."""
    room = MeasuringRoom(pool)
    multiply = Op(native.MULTIPLY, n=(LOOPS, 1), p=(None, room.out.ctypes.data))
    read_s, multiply_s = (_fastest_s(pool, [op], Step(num_rows=1), 5) for op in (room.read, multiply))
    return Limits(READ_BYTES / read_s, LOOPS * OPS_A_LOOP * pool.num_threads / multiply_s)


def _step(engine: Started, replay: RecordedReplay, num_rows: int, history: int) -> Step:
    """A decode step of `num_rows` sequences, which has run once. They share their pages but the last one."""
    size, numbers = engine.section.page_size_tokens, list(range(num_rows))
    num_shared = history // size
    shared = list(range(1, num_shared + 1))
    num_others = engine.num_pages - num_shared - 1
    pages = [(slot, 0, [*shared, num_shared + 1 + slot % num_others]) for slot in numbers]
    plan = StepPlan(0, numbers, [history] * num_rows, [1] * num_rows, [5] * num_rows, numbers, pages)
    engine.runner.run(plan)
    return replay.step


def _groups(ops: list[Op]) -> dict[str, list[Op]]:
    groups: dict[str, list[Op]] = {}
    for op in ops:
        groups.setdefault(_name(op), []).append(op)
    return groups


def _name(op: Op) -> str:
    if op.kind != native.LINEAR:
        return NAMES[op.kind]
    what = "head" if op.flags & native.LOGIT_ROWS else "product"
    return f"{what} {FORMATS[op.n[0]]} {op.n[1]}x{op.n[2]}"


def _amounts(op: Op, num_rows: int, history: int) -> tuple[int, int]:
    """Bytes read from memory, and operations of products."""
    if op.kind == native.LINEAR:
        outputs, inputs = op.n[1], op.n[2]
        return packed_bytes(FORMATS[op.n[0]], (outputs, inputs)), 2 * num_rows * outputs * inputs
    if op.kind == native.ATTEND:
        heads, kv_heads, size = op.n[0], op.n[1], op.n[2]
        seen = num_rows * (history + 1)
        return 2 * seen * kv_heads * row_bytes(size, KV_DTYPES[op.n[5]]), 4 * seen * heads * size
    return 0, 0


def _fastest_s(pool: Pool, ops: list[Op], step: Step, rounds: int, before: list[Op] | None = None) -> float:
    program = (Op * len(ops))(*ops)
    pool.run(program, step)
    best_s = float("inf")
    for _ in range(rounds):
        pool.run(before or [], step)
        started_s = perf_counter()
        pool.run(program, step)
        best_s = min(best_s, perf_counter() - started_s)
    return best_s


def tables(report: OperatorsReport) -> list[Table]:
    """The operators, then what a step of several rows costs beside a step of one."""
    limits = report.limits
    title = (
        f"{report.instruction_set}, {report.num_threads} threads, {report.history} tokens of history; "
        f"limits: {limits.read_bytes_per_s / 1e9:.1f} GB/s read, "
        f"{limits.multiply_ops_per_s / 1e9:.0f} Gop/s of 8-bit products"
    )
    columns = ("operator", "layers", "rows", "us", "GB/s", "of limit", "Gop/s", "of limit")
    operators = [_row(point, limits) for point in report.points]
    first_rows = min(report.step_s)
    steps = [
        (f"{rows} rows", f"{seconds * 1e3:.2f} ms", f"{seconds / report.step_s[first_rows]:.2f}")
        for rows, seconds in report.step_s.items()
    ]
    ratio = f"T(m)/T({first_rows})"
    return [plain_table(title, columns, operators), plain_table("the step", ("step", "time", ratio), steps)]


def _row(point: OperatorPoint, limits: Limits) -> tuple[str, ...]:
    read, multiply = point.bytes_per_s, point.ops_per_s
    return (
        point.name,
        str(point.num_layers),
        str(point.num_rows),
        f"{point.seconds * 1e6:.1f}",
        f"{read / 1e9:.2f}" if read else "",
        f"{100 * read / limits.read_bytes_per_s:.0f} %" if read else "",
        f"{multiply / 1e9:.1f}" if multiply else "",
        _share(multiply, limits.multiply_ops_per_s) if multiply else "",
    )


def _share(rate: float, limit: float) -> str:
    """Beside no limit where the instruction set has no measure of it."""
    return f"{100 * rate / limit:.0f} %" if limit else ""
