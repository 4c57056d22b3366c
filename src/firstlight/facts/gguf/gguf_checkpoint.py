"""A GGUF file (or a set of split files) as a `Checkpoint`.

Invariant: every tensor is mapped to its Hugging Face name, has a supported format and lies inside its file;
otherwise the error names the tensor.
"""

from __future__ import annotations

import math
import os
import re
import struct
from pathlib import Path

from firstlight.base.errors import ModelFileError, UnsupportedError
from firstlight.facts.checkpoint.formats import GGML_TYPE_NAMES, SUPPORTED
from firstlight.facts.checkpoint.names import ROPE_FACTORS, huggingface_name
from firstlight.facts.checkpoint.remedies import DOWNLOAD_AGAIN, OTHER_MODEL
from firstlight.facts.checkpoint.tensor_facts import Checkpoint, TensorFacts, find_overlap
from firstlight.facts.gguf.gguf_config import describe_gguf, generation_defaults
from firstlight.facts.gguf.gguf_header import GgufFile, GgufTensor, read_gguf

_SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_PERMUTED = re.compile(r".*\.self_attn\.[qk]_proj\.(weight|bias)")
_MAX_SPLITS = 4096
_READABLE = [name for name in SUPPORTED if name in GGML_TYPE_NAMES.values()]


def open_gguf(path: Path) -> Checkpoint:
    """Opens a GGUF model; of a split model, give the first file."""
    files = _with_splits(read_gguf(path))
    first = files[0]
    tensors: dict[str, TensorFacts] = {}
    rope_factors: tuple[float, ...] = ()
    interleaved = first.architecture == "llama"
    for file in files:
        for tensor in file.tensors.values():
            if tensor.name == ROPE_FACTORS:
                rope_factors = _read_f32(file, tensor)
                continue
            facts = _tensor_facts(file, tensor, interleaved)
            if facts.name in tensors:
                raise ModelFileError(
                    f"{file.path}: the tensor {tensor.name} is also in another split file.", DOWNLOAD_AGAIN
                )
            tensors[facts.name] = facts
    if overlap := find_overlap(list(tensors.values())):
        raise ModelFileError(
            f"{overlap[0].path}: the tensors {overlap[0].name} and {overlap[1].name} share bytes.",
            DOWNLOAD_AGAIN,
        )
    description = describe_gguf(first, tensors.keys(), rope_factors)
    return Checkpoint(first.path, "gguf", description, tensors, dict(generation_defaults(first)))


def _with_splits(first: GgufFile) -> list[GgufFile]:
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return [first]
    name = _SPLIT_NAME.fullmatch(Path(first.path).name)
    if count > _MAX_SPLITS or name is None or int(name[3]) != count:
        raise ModelFileError(
            f"{first.path} is one of {count} split files, but its name does not say which.",
            f"Restore the name the publisher gave it: NAME-00001-of-{count:05d}.gguf.",
        )
    if int(name[2]) != 1:
        raise ModelFileError(f"{first.path} is not the first of its split files.", "Give the first one.")
    files = [first]
    for number in range(2, count + 1):
        path = Path(first.path).with_name(f"{name[1]}-{number:05d}-of-{count:05d}.gguf")
        if not path.exists():
            raise ModelFileError(
                f"{path} is missing: the model has {count} split files.", "Download the missing file."
            )
        files.append(read_gguf(path))
    return files


def _tensor_facts(file: GgufFile, tensor: GgufTensor, interleaved: bool) -> TensorFacts:
    name = huggingface_name(tensor.name)
    if name is None:
        raise UnsupportedError(
            f"{file.path}: the tensor {tensor.name} belongs to an architecture that is not supported.",
            "Supported are dense Llama, Mistral, Qwen2 and Qwen3 models without adapters.",
        )
    format_name = GGML_TYPE_NAMES.get(tensor.type_id, f"type {tensor.type_id}")
    geometry = SUPPORTED.get(format_name)
    if geometry is None:
        raise UnsupportedError(
            f"{file.path}: the tensor {tensor.name} is stored as {format_name}, which is not supported.",
            f"Use a file with only {', '.join(_READABLE)}.",
        )
    if not tensor.shape or len(tensor.shape) > 2 or tensor.shape[-1] % geometry.block_values:
        raise ModelFileError(
            f"{file.path}: the tensor {tensor.name} has the shape {list(tensor.shape)}, which {format_name} "
            "cannot hold.",
            DOWNLOAD_AGAIN,
        )
    nbytes = math.prod(tensor.shape[:-1]) * geometry.row_bytes(tensor.shape[-1])
    _require_inside(file, tensor, nbytes)
    return TensorFacts(
        name=name,
        format=format_name,
        shape=tensor.shape,
        path=file.path,
        offset=tensor.offset,
        nbytes=nbytes,
        rope_permuted=interleaved and _PERMUTED.fullmatch(name) is not None,
    )


def _require_inside(file: GgufFile, tensor: GgufTensor, nbytes: int) -> None:
    if tensor.offset + nbytes > file.size_bytes:
        raise ModelFileError(
            f"{file.path} is truncated: the tensor {tensor.name} ends at byte "
            f"{tensor.offset + nbytes}, the file at {file.size_bytes}.",
            DOWNLOAD_AGAIN,
        )


def _read_f32(file: GgufFile, tensor: GgufTensor) -> tuple[float, ...]:
    """The values of a small F32 vector that is configuration rather than a weight."""
    if GGML_TYPE_NAMES.get(tensor.type_id) != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 4096:
        raise UnsupportedError(
            f"{file.path}: the tensor {tensor.name} is not a short F32 vector.", OTHER_MODEL
        )
    count = tensor.shape[0]
    _require_inside(file, tensor, 4 * count)
    with Path(file.path).open("rb") as handle:
        raw = os.pread(handle.fileno(), 4 * count, tensor.offset)
    values = struct.unpack(f"<{count}f", raw)
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise ModelFileError(
            f"{file.path}: the tensor {tensor.name} holds values that are not above 0.", DOWNLOAD_AGAIN
        )
    return values
