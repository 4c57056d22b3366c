"""Models of random weights, of any size: folders with real tensor names, nesting and configuration.

A family whose weights fit nowhere near is served, sharded and measured by a small one of its shape.
Invariant: the folder holds every tensor that the description's own model declares, and no other; the same
description and seed give the same values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from firstlight.facts.description import ModelDescription
from firstlight.facts.hf.hf_config_writer import hf_config, hf_generation_config
from firstlight.loading.safetensors_writer import MAX_SHARD_BYTES, SafetensorsWriter
from firstlight.models.declare import Declaration
from firstlight.models.registry import find
from firstlight.ops.collectives import Group
from firstlight.ops.reference import ReferenceBackend

Progress = Callable[[int, int], None]
BIAS_SPREAD, NORM_SPREAD = 0.1, 0.1  # small, but not nothing: a mistake in them should show


class Packing(Protocol):
    """How the tensors of a model are written: types, and formats that write several for one."""

    @property
    def dtype_name(self) -> str:
        """torch's name of the type of what is not packed, for config.json."""
        ...

    def config(self) -> dict[str, Any]:
        """What config.json says of it."""
        ...

    def written(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Which tensors stand for this one."""
        ...

    def pack(self, name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """These tensors, of float32 values."""
        ...


class Unpacked:
    """One type for all; biases of routers stay float32, as published."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    @property
    def dtype_name(self) -> str:
        return str(self._dtype).removeprefix("torch.")

    def config(self) -> dict[str, Any]:
        return {}

    def written(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {name: (self._type_of(name), shape)}

    def pack(self, name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: values.to(self._type_of(name))}

    def _type_of(self, name: str) -> torch.dtype:
        return torch.float32 if name.endswith("e_score_correction_bias") else self._dtype


class Counted:
    """Another packing that tells `progress(done, total)` the bytes it has packed."""

    def __init__(self, packing: Packing, total_bytes: int, progress: Progress) -> None:
        self._packing, self._progress = packing, progress
        self._done_bytes, self._total_bytes = 0, total_bytes

    @property
    def dtype_name(self) -> str:
        return self._packing.dtype_name

    def config(self) -> dict[str, Any]:
        return self._packing.config()

    def written(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return self._packing.written(name, shape)

    def pack(self, name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
        packed = self._packing.pack(name, values)
        self._done_bytes += sum(tensor.nbytes for tensor in packed.values())
        self._progress(self._done_bytes, self._total_bytes)
        return packed


def num_bytes(description: ModelDescription, packing: Packing) -> int:
    """Of all that is written."""
    return sum(
        dtype.itemsize * math.prod(stored)
        for name, shape in declared_shapes(description).items()
        for dtype, stored in packing.written(name, shape).values()
    )


def declared_shapes(description: ModelDescription) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by its name, in the order in which its layers declare them."""
    declare = Declaration(ReferenceBackend("only names are asked for"), Group())
    find(description.architecture)(declare, description)
    return {wanted.name: wanted.shape for wanted in declare.wanted}


def random_values(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Float32 values of a sensible size: matrices keep the variance, norms are near 1."""
    values = torch.randn(shape, generator=generator)
    if len(shape) == 2:
        return values / shape[1] ** 0.5
    return values * NORM_SPREAD + 1.0 if name.endswith("norm.weight") else values * BIAS_SPREAD


def write_random_model(
    folder: Path,
    description: ModelDescription,
    packing: Packing,
    *,
    seed: int = 0,
    wrapper: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Writes into the folder, new or empty. `wrapper`: the type of a model of text and images (kimi_k25).

    Weights are drawn and written one after the other; the model never lies in memory.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prefix = "" if wrapper is None else "language_model."
    shapes = declared_shapes(description)
    announced = {
        written: kind
        for name, shape in shapes.items()
        for written, kind in packing.written(prefix + name, shape).items()
    }
    types = {name: dtype for name, (dtype, _) in announced.items()}
    only_shapes = {name: shape for name, (_, shape) in announced.items()}
    default = getattr(torch, packing.dtype_name)
    writer = SafetensorsWriter(folder, only_shapes, default, max_shard_bytes, types)
    generator = torch.Generator().manual_seed(seed)
    try:
        for name, shape in shapes.items():
            values = random_values(name, shape, generator)
            for written, tensor in packing.pack(prefix + name, values).items():
                writer.write(written, tensor)
        writer.finish()
    finally:
        writer.close()
    config = hf_config(description, packing.dtype_name) | packing.config()
    generation = hf_generation_config(description, {})
    if wrapper is not None:
        config = _wrapped(config, wrapper)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    return folder


def _wrapped(text: dict[str, Any], model_type: str) -> dict[str, Any]:
    """The publisher's nesting; what is packed is said inside, too."""
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": model_type,
        "text_config": text,
        "bos_token_id": text["bos_token_id"],
        "eos_token_id": text["eos_token_id"],
        "pad_token_id": text["pad_token_id"],
        "tie_word_embeddings": text["tie_word_embeddings"],
        "torch_dtype": text["torch_dtype"],
    }
