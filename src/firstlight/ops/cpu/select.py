"""Chooses the layouts of each weight shape by measuring them for a few milliseconds at start.

The measurement runs on random weights of the real shapes; between timings of few rows the caches are flushed,
because a model's weights never lie in them. Invariant: the choice and the figures behind it end in the
start-up report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from firstlight.ops.contract import MatrixKind
from firstlight.ops.cpu.layouts import BITS_PER_VALUE, GROUP, STOCK_LAYOUTS, Layout, TwoLayouts, allowed
from firstlight.ops.matrix import Matrix

# The layouts cross between 8 and 32 rows: a point in between would be decided by noise.
ROW_COUNTS = (1, 4, 8, 32, 128)
FEW_ROWS = (1, 4)  # where the layout for few rows is judged
MANY_ROWS = 128  # where the layout for many rows is judged
# A second resident copy must make many rows at least this much faster.
SECOND_COPY_GAIN = 1.15
# A measurement on a shared machine is noisy, and another layout rounds otherwise: the smaller layout is kept
# unless another is clearly faster, so that a model answers the same after a restart.
CLEARLY_FASTER = 1.25
FLUSH_BYTES = 20 * 2**20
ROUNDS = 3  # neighbours on a shared machine disturb some of them


@dataclass(frozen=True)
class Choice:
    """Layout names for few and many rows (equal: one copy), the switch between them, and why."""

    few: str
    many: str
    max_few_rows: int
    reason: str

    def resident_bytes(self, kind: MatrixKind) -> int:
        values = kind.shape[0] * kind.shape[1]
        return sum(int(values * BITS_PER_VALUE[name]) // 8 for name in {self.few, self.many})

    def build(self, weight: Matrix) -> Layout | TwoLayouts:
        if self.few == self.many:
            return STOCK_LAYOUTS[self.few](weight)
        return TwoLayouts(
            STOCK_LAYOUTS[self.few](weight), STOCK_LAYOUTS[self.many](weight), self.max_few_rows
        )


class RandomMatrix:
    """A `contract.Matrix` with random values, for measuring."""

    def __init__(self, kind: MatrixKind) -> None:
        self.shape: tuple[int, ...] = kind.shape
        self.format = kind.format
        self.order: torch.Tensor | None = None

    def dequantize(self) -> torch.Tensor:
        return torch.rand(self.shape).sub_(0.5)

    def stored(self) -> None:
        return None

    def first_rows(self, num_rows: int) -> RandomMatrix:
        outputs, inputs = self.shape
        return RandomMatrix(MatrixKind("layer", self.format, (min(outputs, num_rows), inputs)))

    def affine(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        groups = (self.shape[0], self.shape[1] // GROUP)
        return torch.randint(0, 16, self.shape, dtype=torch.uint8), torch.rand(groups), torch.rand(groups)

    def nested(self) -> None:
        return None


def choose(kinds: Sequence[MatrixKind], *, two_copies: bool) -> dict[MatrixKind, Choice]:
    """Measures each kind. `two_copies` false: memory is short, one layout each."""
    flush = torch.zeros(FLUSH_BYTES // 4)
    return {kind: _choose(kind, flush, two_copies=two_copies) for kind in kinds}


def _choose(kind: MatrixKind, flush: torch.Tensor, *, two_copies: bool) -> Choice:
    names = allowed(kind.format, kind.shape)
    if kind.role == "head":
        # Logits must not be rounded to bfloat16: neighbours would tie. Only layouts with a float32 result.
        name = "fp16" if "fp16" in names else "fp32"
        return Choice(name, name, 0, "the output head needs a float32 result")
    if len(names) > 1:
        names.remove("fp32")
    layouts = {name: STOCK_LAYOUTS[name](RandomMatrix(kind)) for name in names}
    times = _measure(layouts, kind.shape[1], flush)
    few = _best_for_few(names, times)
    many = min(names, key=lambda name: times[name][MANY_ROWS])
    gain = times[few][MANY_ROWS] / times[many][MANY_ROWS]
    if not two_copies or gain < SECOND_COPY_GAIN:
        many = few
    switch = max((rows for rows in ROW_COUNTS if times[few][rows] <= times[many][rows]), default=0)
    figures = "; ".join(
        f"{name} {times[name][1] * 1e6:.0f} us at 1 row, {times[name][MANY_ROWS] * 1e6:.0f} at {MANY_ROWS}"
        for name in names
    )
    what = (
        f"{few}" if few == many else f"{few} up to {switch} rows, {many} above ({gain:.1f}x at {MANY_ROWS})"
    )
    return Choice(few, many, switch, f"{what}: measured {figures}")


def _best_for_few(names: list[str], times: dict[str, dict[int, float]]) -> str:
    """The fastest for few rows; a smaller layout gives way only to one that is clearly faster."""
    cost = {name: sum(times[name][rows] / rows**0.5 for rows in FEW_ROWS) for name in names}
    best = names[0]
    for name in sorted(names, key=BITS_PER_VALUE.__getitem__)[::-1]:
        if cost[name] <= CLEARLY_FASTER * min(cost.values()):
            best = name
    return best


def _measure(layouts: dict[str, Layout], num_inputs: int, flush: torch.Tensor) -> dict[str, dict[int, float]]:
    """Seconds by layout and row count: the best of a few rounds, in which the layouts take turns."""
    times = {name: dict.fromkeys(ROW_COUNTS, float("inf")) for name in layouts}
    for rows in ROW_COUNTS:
        x = torch.rand(rows, num_inputs)
        for _ in range(ROUNDS):
            for name, layout in layouts.items():
                times[name][rows] = min(times[name][rows], _time(layout, x, flush))
    return times


def _time(layout: Layout, x: torch.Tensor, flush: torch.Tensor) -> float:
    if x.shape[0] < MANY_ROWS:
        flush.sum()
    start = perf_counter()
    layout(x)
    return perf_counter() - start
