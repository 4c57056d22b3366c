"""Weights as the native kernels read them: tiles of 8 outputs, the file's own codes and scales, unrounded.

Made by `native_backend.NativeBackend.linear`. All weights of a backend lie in one arena, for which huge pages
are asked. Invariant: `NativeLinear.rows` gives bit for bit what `Matrix.dequantize` gave.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from firstlight.ops.contract import Matrix
from firstlight.ops.cpu.library import EMBED, LINEAR, QUANTIZE, Codes, Op, Pool, Step, address

TILE, GROUP = 8, 32
CODES = {"Q4_1": 0, "Q4_0": 1, "Q8_0": 2}  # by the library's number of the layout
PLAIN = {"F32": (3, torch.float32), "F16": (4, torch.float16), "BF16": (5, torch.bfloat16)}
BLOCK_BYTES = {0: 20, 1: 18, 2: 34}  # of one output and 32 inputs
ARENA_BYTES = 64 * 2**20
HUGE_PAGE_BYTES = 2 * 2**20


def packed_bytes(weight_format: str, shape: Sequence[int]) -> int:
    """What a matrix [O, I] of this format takes; outputs are filled up to whole tiles."""
    outputs, inputs = -(-shape[0] // TILE) * TILE, shape[1]
    if weight_format in CODES:
        return outputs * (inputs // GROUP) * BLOCK_BYTES[CODES[weight_format]]
    _, dtype = PLAIN.get(weight_format, PLAIN["F32"])
    return outputs * inputs * dtype.itemsize


class Arena:
    """Memory for weights, taken from the system in large pieces and never given back one by one."""

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] on a cache line of its own."""
        if self._used + num_bytes > len(self._piece):
            self._piece = _huge_pages(max(ARENA_BYTES, num_bytes))
            self._used = 0
        start = self._used
        self._used += -(-num_bytes // 64) * 64
        return self._piece[start : start + num_bytes]


def pack(weight: Matrix, arena: Arena) -> tuple[int, torch.Tensor]:
    """The layout's number and the packed bytes of a weight."""
    room = arena.take(packed_bytes(weight.format, weight.shape))
    if weight.format in CODES:
        layout = CODES[weight.format]
        _pack_codes(weight, layout, room)
        return layout, room
    layout, dtype = PLAIN.get(weight.format, PLAIN["F32"])
    outputs, inputs = weight.shape
    tiles = room.view(dtype).view(-1, inputs, TILE)
    tiles.copy_(_whole_tiles(weight.dequantize()).view(-1, TILE, inputs).transpose(1, 2))
    return layout, room


def _pack_codes(weight: Matrix, layout: int, room: torch.Tensor) -> None:
    affine = weight.affine()
    assert affine is not None, "a block format has codes"
    codes, scale, offset = (_whole_tiles(part) for part in affine)
    groups = scale.shape[1]
    num_tiles = scale.shape[0] // TILE
    out = room.view(num_tiles, groups, TILE * BLOCK_BYTES[layout])
    if layout == CODES["Q8_0"]:
        quads = codes.view(torch.uint8).view(num_tiles, TILE, groups, 8, 4)
    else:
        # As in the file: input i and input i + 16 of a group share a byte.
        halves = codes.view(num_tiles, TILE, groups, 2, 4, 4)
        quads = halves[:, :, :, 0] | halves[:, :, :, 1] << 4
    num_quads = quads.shape[3]
    code_bytes = TILE * num_quads * 4
    out[:, :, :code_bytes].view(num_tiles, groups, num_quads, TILE, 4).copy_(quads.permute(0, 2, 3, 1, 4))
    _pack_halves(scale, out[:, :, code_bytes : code_bytes + 2 * TILE])
    if layout == CODES["Q4_1"]:
        _pack_halves(offset, out[:, :, code_bytes + 2 * TILE :])


def _pack_halves(values_OG: torch.Tensor, room: torch.Tensor) -> None:
    """Exact: the file holds them as float16."""
    halves = values_OG.to(torch.float16).view(-1, TILE, values_OG.shape[1]).transpose(1, 2).contiguous()
    room.copy_(halves.view(torch.uint8))


def _whole_tiles(rows: torch.Tensor) -> torch.Tensor:
    missing = -len(rows) % TILE
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows.contiguous()


def _huge_pages(num_bytes: int) -> torch.Tensor:
    """Zeroed memory that starts on a huge page; where the system has none to give, ordinary pages."""
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _advise(memory)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[start : start + num_bytes]


def _advise(memory: mmap.mmap) -> None:
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return  # a kernel without transparent huge pages


@dataclass
class NativeLinear:
    """A `contract.LinearOp` over a packed weight. Float32 results; a Q format rounds its input to 8 bits."""

    pool: Pool
    shape: tuple[int, int]
    number: int  # the library's number of the layout
    packed: torch.Tensor
    layout: str
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_bytes = self.packed.numel()

    @property
    def takes_codes(self) -> bool:
        """Whether the input is needed as 8-bit codes, and not as floats."""
        return self.number in BLOCK_BYTES

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        x = x_TI.float().contiguous()
        num_rows = len(x)
        out = torch.empty(num_rows, self.shape[0])
        ops, codes = [], None
        if self.takes_codes:
            codes = Codes(num_rows, self.shape[1])
            ops.append(Op(QUANTIZE, n=(self.shape[1],), p=(address(x), codes.address)))
        ops.append(self.op(codes, x, out))
        self.pool.run(ops, Step(num_rows=num_rows))
        return out

    def op(
        self, codes: Codes | None, x: torch.Tensor | None, out: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Op:
        """The product as an operator of a program; `out` [.., O] may be a slice of wider rows."""
        places = (address(self.packed), codes and codes.address, address(x), address(out), address(bias))
        return Op(LINEAR, n=(self.number, *self.shape, out.stride(0)), p=places)

    def rows(self, indices_T: torch.Tensor) -> torch.Tensor:
        indices = indices_T.contiguous()
        out = torch.empty(len(indices), self.shape[1])
        self.pool.run([self.embed_op(out)], Step(num_rows=len(indices), tokens=address(indices)))
        return out

    def embed_op(self, out: torch.Tensor) -> Op:
        """Rows of the weight by the step's tokens, as an operator of a program."""
        return Op(EMBED, n=(self.number, self.shape[1]), p=(address(self.packed), address(out)))
