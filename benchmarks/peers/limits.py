"""What the machine can do at most, and what the model asks of it: `python -m peers.limits GGUF THREADS`, as
JSON.

Started by `rounds` in every round, in a process of its own. Invariant: rates are the best of several
passes, so that a share above 1 can only come from a noisy neighbour.
"""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import torch

from firstlight.bench.engine.offline import Work
from firstlight.bench.machine.machine_rates import measure_rates
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.facts.machine.machine import inspect_machine
from firstlight.ops.cpu.library import (
    MULTIPLY,
    READ,
    MissingLibraryError,
    Op,
    Pool,
    Step,
    address,
    open_library,
    open_pool,
)

READ_BYTES = 256 * 2**20
MULTIPLY_TURNS = 4_000_000
_SUMS, _PRODUCTS = 6, 32  # of MULTIPLY: products of 8-bit codes in a turn of one thread
PASSES = 10


def main() -> None:
    checkpoint, threads = open_checkpoint(Path(sys.argv[1])), int(sys.argv[2])
    torch.set_num_threads(threads)
    print(msgspec.json.encode({"rates": rates(threads), "facts": facts(checkpoint)}).decode())  # noqa: T201


def rates(threads: int) -> dict[str, float]:
    """Bytes read a second, and operations (a product and a sum are two) a second by type."""
    stock = measure_rates()
    found = {"read_bytes_per_s": stock.read_bytes_per_s}
    found |= {f"{name}_operations_per_s": rate for name, rate in stock.matrix_flops.items()}
    try:
        pool = open_pool(open_library(), threads)
    except MissingLibraryError:
        return found
    found["read_bytes_per_s"] = max(stock.read_bytes_per_s, _read(pool))
    found["int8_operations_per_s"] = _multiply(pool)
    return found


def facts(checkpoint: Any) -> dict[str, float]:
    """What a token makes necessary."""
    work = Work(checkpoint, (2, 2))
    return {
        "weight_bytes": work.weight_bytes,
        "decode_operations": work.decode(1, 128)[1],
        "prefill_64_operations": work.prefill(64)[1],
        "prefill_512_operations": work.prefill(512)[1],
        "usable_cores": inspect_machine(with_gpus=False).num_usable_cores,
    }


def _read(pool: Pool) -> float:
    values = torch.zeros(READ_BYTES // 4).fill_(1.0)
    seen = torch.zeros(64 * pool.num_threads, dtype=torch.uint8)
    op = Op(kind=READ)
    op.n[0], op.p[0], op.p[1] = READ_BYTES, address(values), address(seen)
    return READ_BYTES / _best_s(pool, op)


def _multiply(pool: Pool) -> float:
    seen = torch.zeros(64 * pool.num_threads, dtype=torch.uint8)
    op = Op(kind=MULTIPLY)
    op.n[0], op.n[1], op.p[1] = MULTIPLY_TURNS, 5, address(seen)
    return 2 * MULTIPLY_TURNS * _SUMS * _PRODUCTS * pool.num_threads / _best_s(pool, op)


def _best_s(pool: Pool, op: Op) -> float:
    best_s = float("inf")
    for _ in range(PASSES):
        start_s = perf_counter()
        pool.run([op], Step())
        best_s = min(best_s, perf_counter() - start_s)
    return best_s


if __name__ == "__main__":
    main()
