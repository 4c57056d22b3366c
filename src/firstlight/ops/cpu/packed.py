"""Weights as the native kernels read them: tiles of 8 outputs, the file's own codes and scales, unrounded.

All weights of a backend lie in one arena, for which huge pages are asked. Invariant: `NativeLinear.rows`
gives bit for bit what `Matrix.dequantize` gave.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from firstlight.facts.checkpoint.formats import SUPPORTED
from firstlight.ops.cpu.library import (
    EMBED,
    GROUP,
    LINEAR,
    PACK,
    QUANTIZE,
    TILE,
    Codes,
    Op,
    Pool,
    Step,
    address,
)
from firstlight.ops.matrix import Matrix, NestedScales

ARENA_BYTES = 64 * 2**20
HUGE_PAGE_BYTES = 2 * 2**20


@dataclass(frozen=True)
class Layout:
    """How `native/formats.h` keeps a format of `facts.checkpoint.formats`: the bytes of an output of a block.

    `lane_bytes`: a block is a sequence of runs, in each of which an output has so many bytes, and the 8 of a
    tile follow each other. They are the file's, but for scales that become 16 bits (INT4_ZERO) or bytes of
    their own (Q4_K).
    """

    name: str
    lane_bytes: tuple[int, ...]
    dtype: torch.dtype | None = None  # of values that are floats; None: activations come as codes too

    @property
    def block_inputs(self) -> int:
        return SUPPORTED[self.name].block_values

    @property
    def block_bytes(self) -> int:
        return sum(self.lane_bytes)

    def packed_bytes(self, outputs: int, inputs: int) -> int:
        """What a matrix takes; outputs are filled up to whole tiles."""
        return -(-outputs // TILE) * TILE * (inputs // self.block_inputs) * self.block_bytes


PACKED = {  # by the library's number
    0: Layout("Q4_1", (*[4] * 4, 2, 2)),
    1: Layout("Q4_0", (*[4] * 4, 2)),
    2: Layout("Q8_0", (*[4] * 8, 2)),
    3: Layout("F32", (4,), torch.float32),
    4: Layout("F16", (2,), torch.float16),
    5: Layout("BF16", (2,), torch.bfloat16),
    6: Layout("Q4_K", (2, 2, *[*[4] * 4, 1, 1] * 8)),
    7: Layout("Q6_K", (2, *[*[4] * 6, 1, 1] * 8)),
    8: Layout("INT4_ZERO", (*[4] * 4, 2, 2)),
    9: Layout("FP8", (*[1] * 32, 4), torch.float8_e4m3fn),
    10: Layout("FP4", (*[1] * 8, 4), torch.float4_e2m1fn_x2),
}
_OWN_NUMBERS = {layout.name: number for number, layout in PACKED.items()}
# Formats of safetensors that come in the blocks of another one, see `Matrix.stored`.
NUMBERS = _OWN_NUMBERS | {"INT4": _OWN_NUMBERS["Q4_0"], "INT8": _OWN_NUMBERS["Q8_0"]}
SCALE_BYTES = {"Q4_1": 4, "INT4_ZERO": 4}  # of a block, with its minimum or zero point; others have 2


def formats_here() -> dict[str, int]:
    """The numbers and sizes of the formats, by the names that `native/interface.cpp` has."""
    return _OWN_NUMBERS | {
        f"tile_bytes {layout.name}": layout.packed_bytes(TILE, 256) for layout in PACKED.values()
    }


def number_of(weight_format: str) -> int:
    """The layout's number; a format without a layout of its own is kept as float32."""
    return NUMBERS.get(weight_format, NUMBERS["F32"])


def packed_bytes(weight_format: str, shape: Sequence[int]) -> int:
    """What a matrix [O, I] of this format takes."""
    return PACKED[number_of(weight_format)].packed_bytes(shape[0], shape[1])


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


def pack(weight: Matrix, room: torch.Tensor, pool: Pool) -> int:
    """Packs a weight into `room` [packed_bytes], and gives the layout's number.

    The caller orders the inputs where `weight.order` says so.
    """
    number = number_of(weight.format)
    layout = PACKED[number]
    outputs, inputs = weight.shape
    if layout.name in ("FP8", "FP4"):
        _pack_scaled(weight, layout, room)
        return number
    if layout.dtype is not None:
        tiles = room.view(layout.dtype).view(-1, inputs, TILE)
        tiles.copy_(_whole_tiles(weight.dequantize()).view(-1, TILE, inputs).transpose(1, 2))
        return number
    nested = weight.nested()
    if nested is None:
        _pack_stored(weight, layout, room, pool)
    else:
        _pack_nested(nested, room.view(-(-outputs // TILE), inputs // layout.block_inputs, -1))
    return number


def _pack_stored(weight: Matrix, layout: Layout, room: torch.Tensor, pool: Pool) -> None:
    """The file's bytes in another order: its halves of a group lie in one byte as the kernels want them."""
    stored = weight.stored()
    assert stored is not None, "a block format comes from a file"
    rows = stored.contiguous()
    outputs, row_bytes = rows.shape
    scale_bytes = SCALE_BYTES.get(layout.name, 2)
    if outputs % TILE:
        room.zero_()
    op = Op(
        PACK,
        n=(outputs, row_bytes, layout.block_bytes, scale_bytes),
        p=(address(rows), address(room)),
    )
    pool.run([op], Step(num_rows=-(-outputs // TILE)))


def _pack_scaled(weight: Matrix, layout: Layout, room: torch.Tensor) -> None:
    """Blocks that begin with a float32 scale: the codes of 8 outputs side by side, then their scales."""
    stored = weight.stored()
    assert stored is not None, "a block format comes from a file"
    blocks = _whole_tiles(stored).unflatten(0, (-1, TILE)).unflatten(-1, (-1, layout.block_bytes))
    tiles = room.view(len(blocks), blocks.shape[2], -1)
    scales_at = TILE * (layout.block_bytes - 4)
    tiles[..., :scales_at].unflatten(-1, (-1, TILE)).copy_(blocks[..., 4:].permute(0, 2, 3, 1))
    tiles[..., scales_at:].unflatten(-1, (TILE, 4)).copy_(blocks[..., :4].transpose(1, 2))


def _pack_nested(nested: NestedScales, blocks: torch.Tensor) -> None:
    head = 2 * TILE if nested.minimum_scale is None else 4 * TILE
    _put_tiles(nested.scale.half(), blocks[..., : 2 * TILE])
    if nested.minimum_scale is not None:
        _put_tiles(nested.minimum_scale.half(), blocks[..., 2 * TILE : head])
    groups = blocks[..., head:].unflatten(-1, (8, -1))
    of_group = nested.sub_scales.shape[1] * GROUP // nested.codes.shape[1]
    sub_scales = nested.sub_scales.view(torch.uint8).unflatten(-1, (-1, 8, of_group))
    if nested.sub_minima is not None:
        code_bytes = _put_quads(_nibble_quads(nested.codes), groups)
        sub_minima = nested.sub_minima.unflatten(-1, (-1, 8, 1))
        sub_scales = torch.cat([sub_scales, sub_minima], -1)
    else:
        codes = (nested.codes + 32).view(torch.uint8)
        code_bytes = _put_quads(_nibble_quads(codes & 15), groups)
        # Inputs 4 apart share a byte of upper bits.
        fours = _whole_tiles(codes >> 4).unflatten(-1, (-1, 2, 4, 4))
        upper = fours[..., 0, :] | fours[..., 1, :] << 2 | fours[..., 2, :] << 4 | fours[..., 3, :] << 6
        code_bytes += _put_quads(upper, groups[..., code_bytes:])
    for k in range(2):
        at = code_bytes + k * TILE
        each = _whole_tiles(sub_scales[..., k]).unflatten(0, (-1, TILE))
        groups[..., at : at + TILE].copy_(each.permute(0, 2, 3, 1))


def _nibble_quads(codes: torch.Tensor) -> torch.Tensor:
    """[outputs, groups, 4, 4]: as in the file, inputs i and i + 16 of a group share a byte."""
    halves = _whole_tiles(codes).unflatten(-1, (-1, 2, 4, 4))
    return halves[:, :, 0] | halves[:, :, 1] << 4


def _put_quads(quads: torch.Tensor, groups: torch.Tensor) -> int:
    """Puts quads [outputs, groups, Q, 4] first into each group; the bytes that they took."""
    num_quads = quads.shape[2]
    tiles = quads.unflatten(0, (-1, TILE)).permute(0, 2, 3, 1, 4)
    out = groups[..., : num_quads * TILE * 4]
    out.copy_(tiles.reshape(out.shape))
    return num_quads * TILE * 4


def _put_tiles(values_OG: torch.Tensor, room: torch.Tensor) -> None:
    """Puts float16 values of 8 outputs side by side. Exact: the file holds them as float16."""
    tiles = _whole_tiles(values_OG).unflatten(0, (-1, TILE)).transpose(1, 2).contiguous()
    room.copy_(tiles.view(torch.uint8))


def _whole_tiles(rows: torch.Tensor) -> torch.Tensor:
    missing = -len(rows) % TILE
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows.contiguous()


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
    order: torch.Tensor | None = None  # see `contract.Matrix.order`
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_bytes = self.packed.numel()

    @property
    def takes_codes(self) -> bool:
        """Whether the input is needed as 8-bit codes, and not as floats."""
        return PACKED[self.number].dtype is None

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        x = x_TI.float().contiguous()
        if self.order is not None:
            x = x.index_select(1, self.order)
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

    def rows(self, indices_T: torch.Tensor) -> torch.Tensor | None:
        if self.order is not None:
            return None
        indices = indices_T.contiguous()
        out = torch.empty(len(indices), self.shape[1])
        self.pool.run([self.embed_op(out)], Step(num_rows=len(indices), tokens=address(indices)))
        return out

    def embed_op(self, out: torch.Tensor) -> Op:
        """Rows of the weight by the step's tokens, as an operator of a program."""
        return Op(EMBED, n=(self.number, self.shape[1]), p=(address(self.packed), address(out)))
