"""Writes safetensors files tensor by tensor, in shards, without holding the model in memory.

Invariant: tensors arrive in exactly the announced order with the announced shapes, so the headers written
first are true; the order is asserted.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import torch

MAX_SHARD_BYTES = 5_000_000_000
INDEX_FILE = "model.safetensors.index.json"
TYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32"}

Shapes = dict[str, tuple[int, ...]]
Types = Mapping[str, torch.dtype]


@dataclass
class _Shard:
    name: str = ""
    shapes: Shapes = field(default_factory=dict)
    nbytes: int = 0


class SafetensorsWriter:
    """A model in `folder`. `shapes` announces every tensor in the order of the `write` calls.

    `others`: the types of tensors that are not of `dtype`.
    """

    def __init__(
        self,
        folder: Path,
        shapes: Shapes,
        dtype: torch.dtype,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        others: Types = MappingProxyType({}),
    ) -> None:
        self._folder = folder
        self.dtype = dtype
        self._types = {name: others.get(name, dtype) for name in shapes}
        self._shards = _divide(shapes, self._types, max_shard_bytes)
        self._pending = [(shard, name) for shard in self._shards for name in shard.shapes]
        self._pending.reverse()
        self._file: BinaryIO | None = None
        self._open_name = ""
        self.file_names: list[str] = [shard.name for shard in self._shards]

    @staticmethod
    def total_bytes(shapes: Shapes, dtype: torch.dtype) -> int:
        """Bytes of the tensors alone."""
        return sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize

    def write(self, name: str, values: torch.Tensor) -> None:
        """Appends the next announced tensor; `values` has the announced shape and type."""
        shard, expected = self._pending.pop()
        assert name == expected, f"{name} came before {expected}"
        assert tuple(values.shape) == shard.shapes[name], f"{name} has the shape {tuple(values.shape)}"
        assert values.dtype == self._types[name], f"{name} is {values.dtype}"
        file = self._switch_to(shard)
        file.write(values.contiguous().view(-1).view(torch.uint8).numpy().data)

    def finish(self) -> None:
        """Closes the last file and writes the index of a sharded model."""
        assert not self._pending, f"{len(self._pending)} announced tensors were not written"
        self.close()
        if len(self._shards) > 1:
            weight_map = {name: shard.name for shard in self._shards for name in shard.shapes}
            index = {
                "metadata": {"total_size": sum(shard.nbytes for shard in self._shards)},
                "weight_map": weight_map,
            }
            (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
            self.file_names.append(INDEX_FILE)

    def close(self) -> None:
        """Closes the open file, finished or not."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _switch_to(self, shard: _Shard) -> BinaryIO:
        if self._file is None or self._open_name != shard.name:
            self.close()
            self._file = (self._folder / shard.name).open("xb")
            self._open_name = shard.name
            self._file.write(_header(shard, self._types))
        return self._file


def _divide(shapes: Shapes, types: Types, max_shard_bytes: int) -> list[_Shard]:
    shards = [_Shard()]
    for name, shape in shapes.items():
        nbytes = math.prod(shape) * types[name].itemsize
        if shards[-1].shapes and shards[-1].nbytes + nbytes > max_shard_bytes:
            shards.append(_Shard())
        shards[-1].shapes[name] = shape
        shards[-1].nbytes += nbytes
    if len(shards) == 1:
        shards[0].name = "model.safetensors"
    for number, shard in enumerate(shards, 1):
        shard.name = shard.name or f"model-{number:05d}-of-{len(shards):05d}.safetensors"
    return shards


def _header(shard: _Shard, types: Types) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in shard.shapes.items():
        dtype = types[name]
        end = position + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": TYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data begins aligned
    return struct.pack("<Q", len(text)) + text
