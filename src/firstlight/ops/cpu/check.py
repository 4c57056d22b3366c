"""Whether an instruction set computes here what the portable code computes: asked once, before it is used.

A processor, a hypervisor or a compiler may be wrong about an instruction, and not every one of our machines
has every instruction set. Invariant: what is not confirmed is not used.

The battery: every operator on few odd rows, about 20 ms of one Zen 1 core, most of it the portable code.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache

import numpy as np
import torch

from firstlight.ops.cpu.library import (
    ATTEND,
    EMBED,
    INSTRUCTION_SETS,
    KV_TYPES,
    LARGEST,
    LINEAR,
    NORM,
    PORTABLE,
    QUANTIZE,
    SILU,
    TURN_AND_WRITE,
    Codes,
    Op,
    Pool,
    Step,
    address,
    open_pool,
)
from firstlight.ops.cpu.packed import PACKED
from firstlight.ops.kv_rows import name_of, pack

ROWS = (1, 2, 3, 4, 9)  # each number of rows that is multiplied at once, and a mixture
MOST_ROWS, NUM_OUTPUTS, NUM_INPUTS = 9, 35, 256  # five tiles of outputs, the last one not whole
HEADS, KV_HEADS, HEAD_SIZE = 2, 1, 12
NUM_BEFORE, PAGE_SIZE, NUM_PAGES = 5, 4, 4
# Sets differ in whether a multiplication is rounded before its sum: some units in the last place.
TOLERANCE = 2e-5

Named = Iterator[tuple[str, torch.Tensor]]


@cache
def confirmed_set(library: ctypes.CDLL) -> tuple[int, str]:
    """The best instruction set that passes the check, and what to tell about better ones that did not."""
    notes: list[str] = []
    available = library.fl_instruction_sets()
    for number in sorted(INSTRUCTION_SETS, reverse=True):
        if number == PORTABLE or not available & number:
            continue
        wrong = first_difference(library, number)
        if wrong is None:
            return number, "; ".join(notes)
        notes.append(f"{INSTRUCTION_SETS[number]} computes wrongly on this machine ({wrong})")
    return PORTABLE, "; ".join(notes)


def first_difference(library: ctypes.CDLL, number: int) -> str | None:
    """Which operator gives something else than the portable code; None if none does."""
    wanted = results(open_pool(library, 1, instruction_set=PORTABLE))
    for (name, got), (_, expected) in zip(
        results(open_pool(library, 1, instruction_set=number)), wanted, strict=True
    ):
        if got.dtype != torch.float32:
            same = torch.equal(got, expected)
        else:
            limit = TOLERANCE * float(expected.abs().max())
            same = bool(((got - expected).abs() <= limit).all())
        if not same:
            return name
    return None


def results(pool: Pool) -> Named:
    """What the operators give, by name; bytes and whole numbers must agree exactly."""
    for num_rows in ROWS:
        yield from _products(pool, num_rows)
        yield from _rows(pool, num_rows)
    for kv_dtype in KV_TYPES:
        yield from _attention(pool, kv_dtype)


def _values(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32))


@cache
def _weight(number: int) -> torch.Tensor:
    layout = PACKED[number]
    num_bytes = layout.packed_bytes(NUM_OUTPUTS, NUM_INPUTS)
    packed = np.random.default_rng(number).integers(0, 256, num_bytes, np.uint8)
    # Scales: the bits of any value in float16 and bfloat16 with its top exponent bit cleared are below 2.
    halves = packed.view(np.uint16)
    halves &= np.uint16(0xBFFF)
    return torch.from_numpy(packed)


def _products(pool: Pool, num_rows: int) -> Named:
    x = _values(1, num_rows, NUM_INPUTS)
    codes = Codes(num_rows, NUM_INPUTS)
    ops = [Op(QUANTIZE, n=(NUM_INPUTS,), p=(address(x), codes.address))]
    outs = {number: torch.empty(num_rows, NUM_OUTPUTS) for number in PACKED}
    for number, out in outs.items():
        places = (address(_weight(number)), codes.address, address(x), address(out))
        ops.append(Op(LINEAR, n=(number, NUM_OUTPUTS, NUM_INPUTS, NUM_OUTPUTS), p=places))
    pool.run(ops, Step(num_rows=num_rows))
    yield "codes", codes.groups
    for number, out in outs.items():
        yield f"the product of {num_rows} rows with {PACKED[number].name}", out


def _rows(pool: Pool, num_rows: int) -> Named:
    x, weight = _values(2, num_rows, NUM_OUTPUTS * 2), _values(3, NUM_OUTPUTS * 2)
    normed, gated = torch.empty_like(x), torch.empty(num_rows, NUM_OUTPUTS)
    where, best = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows)
    tokens = torch.arange(num_rows) * 2
    ops = [
        Op(NORM, n=(NUM_OUTPUTS * 2,), p=(address(x), address(weight), address(normed))),
        Op(SILU, n=(NUM_OUTPUTS,), p=(address(x), address(gated))),
        Op(LARGEST, n=(NUM_OUTPUTS * 2,), p=(address(x), address(where), address(best))),
    ]
    ops[0].f[0] = 1e-5
    embedded = {number: torch.empty(num_rows, NUM_INPUTS) for number in PACKED}
    for number, out in embedded.items():
        ops.append(Op(EMBED, n=(number, NUM_INPUTS), p=(address(_weight(number)), address(out))))
    pool.run(ops, Step(num_rows=num_rows, tokens=address(tokens)))
    yield from (("the norm", normed), ("the gate", gated), ("the largest", where))
    yield from (("the embedding", out) for out in embedded.values())


def _attention(pool: Pool, kv_dtype: torch.dtype) -> Named:
    width = (HEADS + 2 * KV_HEADS) * HEAD_SIZE
    qkv, turns = _values(4, MOST_ROWS, width), _values(5, MOST_ROWS, HEAD_SIZE)
    keys, values = (
        pack(_values(seed, NUM_PAGES * PAGE_SIZE, KV_HEADS, HEAD_SIZE), kv_dtype) for seed in (6, 7)
    )
    out = torch.empty(MOST_ROWS, HEADS * HEAD_SIZE)
    slots = torch.arange(NUM_BEFORE, NUM_BEFORE + MOST_ROWS)
    starts, counts, pages = torch.tensor([NUM_BEFORE]), torch.tensor([MOST_ROWS]), torch.arange(NUM_PAGES)
    places = (address(qkv), address(keys), address(values))
    ops = [
        Op(TURN_AND_WRITE, n=(HEADS, KV_HEADS, HEAD_SIZE, KV_TYPES[kv_dtype]), p=places),
        Op(ATTEND, n=(HEADS, KV_HEADS, HEAD_SIZE, width, 0, KV_TYPES[kv_dtype]), p=(*places, address(out))),
    ]
    ops[1].f[0] = HEAD_SIZE**-0.5
    step = Step(num_rows=MOST_ROWS, num_sequences=1, page_size=PAGE_SIZE, table_width=NUM_PAGES)
    step.turns, step.write_slots = address(turns), address(slots)
    step.starts, step.counts, step.pages = address(starts), address(counts), address(pages)
    pool.run(ops, step)
    name = name_of(kv_dtype)
    yield from ((f"keys in {name}", keys.view(torch.int8)), (f"values in {name}", values.view(torch.int8)))
    yield from (("the rotation", qkv), (f"the attention over {name}", out))
