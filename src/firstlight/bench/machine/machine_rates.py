"""What this machine can do at best with plain torch operators: read memory, multiply matrices. Measured now.

Invariant: the figures are the best of several passes in this process with its threads, so that a share above
1 can only come from a noisy neighbour.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

READ_BYTES = 256 * 2**20  # far above any last-level cache of today's machines with few cores
MATRIX_ROWS, MATRIX_SIDE = 512, 2048
_PASSES = 12
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class MachineRates:
    """Bytes a second read from memory, and floating-point operations a second of a product by type."""

    num_threads: int
    read_bytes_per_s: float
    matrix_flops: dict[str, float]

    @property
    def best_flops(self) -> float:
        return max(self.matrix_flops.values())


def measure_rates() -> MachineRates:
    """Takes about a second. Uses the threads that torch is set to.

    bf16 is left out where the processor cannot multiply it: torch then takes minutes for the same product.
    """
    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    dtypes = {name: dtype for name, dtype in _DTYPES.items() if name != "bf16" or has_bf16}
    return MachineRates(
        num_threads=torch.get_num_threads(),
        read_bytes_per_s=read_bytes_per_s(),
        matrix_flops={name: _matrix_flops(dtype) for name, dtype in dtypes.items()},
    )


def read_bytes_per_s() -> float:
    """Of memory, by all threads that torch is set to."""
    values = torch.zeros(READ_BYTES // 4)  # written once, so that the pages are there
    values.fill_(1.0)
    fastest_s = min(_best_s(values.sum), _best_s(values.amax))
    return READ_BYTES / fastest_s


def _matrix_flops(dtype: torch.dtype) -> float:
    left = torch.rand(MATRIX_ROWS, MATRIX_SIDE).to(dtype)
    right = torch.rand(MATRIX_SIDE, MATRIX_SIDE).to(dtype)
    return 2 * MATRIX_ROWS * MATRIX_SIDE * MATRIX_SIDE / _best_s(lambda: left @ right)


def _best_s(run: Callable[[], object]) -> float:
    run()
    best_s = float("inf")
    for _ in range(_PASSES):
        start_s = perf_counter()
        run()
        best_s = min(best_s, perf_counter() - start_s)
    return best_s
