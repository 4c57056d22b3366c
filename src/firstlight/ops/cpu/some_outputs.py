"""Some outputs of a packed weight as a packed weight of their own, whose tiles hold nothing else.

Called by `native_backend.NativeBackend.only_outputs`. A product reads whole tiles of 8 outputs, and those of
a draft vocabulary are scattered over almost all tiles: copied together, they are read without the others.
Invariant: an output keeps its bytes, only their places change; so its products keep their bits.

Shapes: N outputs that are wanted, B blocks of a row.
"""

from __future__ import annotations

import torch

from firstlight.ops.cpu.packed import TILE, Layout

# Outputs copied at once, so that what is copied on the way stays small.
AT_ONCE = 1024


def copy_outputs(packed: torch.Tensor, layout: Layout, outputs_N: torch.Tensor, room: torch.Tensor) -> None:
    """Copies outputs of `packed` into `room` [Layout.packed_bytes], in this order; the rest of it is 0."""
    places = _places(layout)
    blocks = packed.view(-1, _blocks_of(packed, room, len(outputs_N), layout), TILE * layout.block_bytes)
    new = room.zero_().view(-1, *blocks.shape[1:])
    for start in range(0, len(outputs_N), AT_ONCE):
        outputs = outputs_N[start : start + AT_ONCE]
        to = torch.arange(start, start + len(outputs))
        from_places = places[outputs % TILE][:, None].expand(-1, blocks.shape[1], -1)
        values_NBX = blocks[outputs // TILE].gather(2, from_places)
        for lane in range(TILE):
            mine = to % TILE == lane
            new[(to // TILE)[mine][:, None], :, places[lane]] = values_NBX[mine].transpose(1, 2)


def _blocks_of(packed: torch.Tensor, room: torch.Tensor, num_wanted: int, layout: Layout) -> int:
    tile_bytes = len(room) // -(-num_wanted // TILE)
    assert len(packed) % tile_bytes == 0, "both have rows of one length"
    return tile_bytes // (TILE * layout.block_bytes)


def _places(layout: Layout) -> torch.Tensor:
    """[8, block_bytes]: where in a tile's block the bytes of each output lie, in one order for all."""
    starts, at = [], 0
    for width in layout.lane_bytes:
        starts.append(torch.arange(TILE)[:, None] * width + torch.arange(width) + at)
        at += TILE * width
    return torch.cat(starts, 1)
