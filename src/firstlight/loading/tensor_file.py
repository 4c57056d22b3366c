"""Small safetensors files of several types, read and written whole: hidden states, drafters, optimisers.

Invariant: a file that is cut short, or whose header contradicts its content, is an error before a tensor is
handed out.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from firstlight.base.errors import ModelFileError
from firstlight.base.files import replacing
from firstlight.facts.checkpoint.remedies import CHECK_FILE
from firstlight.facts.checkpoint.safetensors_header import SafetensorsEntry, read_safetensors_header

_TYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


def read_tensor_file(path: Path, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a file (or those of `names` that it has), each in memory of its own.

    Raises `ModelFileError` for a file that is missing, cut short or damaged.
    """
    entries = read_safetensors_header(path)
    tensors = {}
    try:
        with path.open("rb") as file:
            for name, entry in entries.items():
                if names is None or name in names:
                    tensors[name] = _read(file, path, entry)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}.", CHECK_FILE) from error
    return tensors


def _read(file: BinaryIO, path: Path, entry: SafetensorsEntry) -> torch.Tensor:
    if entry.dtype not in _TYPES:
        raise ModelFileError(
            f"{path}: the tensor {entry.name[:200]} has the type {entry.dtype}, which is not read here.",
            f"Convert it to one of {', '.join(_TYPES)}.",
        )
    file.seek(entry.offset)
    raw = np.fromfile(file, dtype=np.uint8, count=entry.nbytes)
    if len(raw) < entry.nbytes:
        raise ModelFileError(f"{path} became shorter while it was read.", CHECK_FILE)
    dtype = _TYPES[entry.dtype]
    if not len(raw):
        return torch.empty(entry.shape, dtype=dtype)
    return torch.from_numpy(raw).view(dtype).view(entry.shape)


def read_metadata(path: Path) -> dict[str, str]:
    """The texts in the header of a file that `read_safetensors_header` accepts."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    metadata: dict[str, str] = header.get("__metadata__", {})
    return metadata


def write_tensor_file(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Writes a file that appears whole or not at all."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    position = 0
    # The widest types first, so that every tensor lies aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    for name, values in ordered:
        end = position + values.numel() * values.dtype.itemsize
        entry = {"dtype": _NAMES[values.dtype], "shape": list(values.shape), "data_offsets": [position, end]}
        header[name] = entry
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, values in ordered:
            flat = values.detach().cpu().contiguous().view(-1)
            file.write(flat.view(torch.uint8).numpy().data)
