"""GGUF to a Hugging Face folder that transformers and vLLM load: the work behind `firstlight convert`.

Streams tensor by tensor. Invariant: the target appears whole, by one rename, or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from firstlight.base.errors import UnsupportedError, UsageError
from firstlight.facts.checkpoint.checkpoint import Checkpoint, open_checkpoint
from firstlight.facts.gguf.gguf_header import read_gguf
from firstlight.facts.gguf.gguf_tokenizer import chat_template, pad_token_id, tokenizer_config
from firstlight.facts.hf.hf_config_writer import hf_config, hf_generation_config
from firstlight.loading.new_folder import new_folder
from firstlight.loading.plan import Wanted, make_plan
from firstlight.loading.reader import read_tensors
from firstlight.loading.safetensors_writer import MAX_SHARD_BYTES, SafetensorsWriter
from firstlight.quant.registry import dequantize
from firstlight.quant.weight import Weight

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
_MAKE_ROOM = "Make room, choose another disk, or use --dtype bf16."

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ConvertReport:
    """What was written: the folder, its files, and the bytes of the weights."""

    folder: Path
    files: tuple[str, ...]
    num_tensors: int
    weight_bytes: int


def convert_gguf(
    source: str | Path,
    target: str | Path,
    tokenizer_json: str,
    *,
    dtype: str = "bf16",
    progress: Progress | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> ConvertReport:
    """Writes the GGUF model `source` as the new Hugging Face folder `target`.

    `tokenizer_json` is the content of tokenizer.json; `dtype` is a key of `DTYPES`; `progress(done, total)`
    counts bytes of the source. "f32" keeps every value exactly, "bf16" and "f16" round. Raises `UsageError`
    for an existing target or another kind of source, `UnsupportedError` for what the Hugging Face format
    cannot express, `ResourceError` for a disk too small.
    """
    if dtype not in DTYPES:
        raise UsageError(f"The dtype {dtype!r} is unknown.", f"Choose one of: {', '.join(DTYPES)}.")
    checkpoint = open_checkpoint(source)
    if checkpoint.kind != "gguf":
        raise UsageError(
            f"{source} is a Hugging Face folder already; only GGUF files are converted.", "Give a GGUF file."
        )
    target = Path(target).absolute()
    configs = _config_files(checkpoint, tokenizer_json, DTYPES[dtype])
    wanted = [Wanted.whole(tensor.name, tensor.shape) for tensor in checkpoint.tensors.values()]
    shapes = {s.wanted.name: s.wanted.shape for s in make_plan(checkpoint, wanted).segments}
    weight_bytes = SafetensorsWriter.total_bytes(shapes, DTYPES[dtype])
    with new_folder(target, weight_bytes, "the converted model", _MAKE_ROOM) as partial:
        for name, text in configs.items():
            (partial / name).write_text(text, encoding="utf-8")
        writer = SafetensorsWriter(partial, shapes, DTYPES[dtype], max_shard_bytes)
        _write_weights(checkpoint, wanted, writer, progress)
    return ConvertReport(target, (*configs, *writer.file_names), len(shapes), weight_bytes)


def _config_files(checkpoint: Checkpoint, tokenizer_json: str, dtype: torch.dtype) -> dict[str, str]:
    """Every small file of the folder by name."""
    header = read_gguf(checkpoint.path)
    description, pad = checkpoint.description, pad_token_id(header)
    dtype_name = str(dtype).removeprefix("torch.")
    contents: dict[str, dict[str, Any]] = {
        "config.json": hf_config(description, dtype_name, pad),
        "generation_config.json": hf_generation_config(description, checkpoint.generation_defaults, pad),
        "tokenizer_config.json": tokenizer_config(header, description.max_position),
    }
    files = {
        name: json.dumps(content, indent=2, ensure_ascii=False) + "\n" for name, content in contents.items()
    }
    files["tokenizer.json"] = tokenizer_json
    template = chat_template(header)
    if template is not None:
        files["chat_template.jinja"] = template
    return files


def _write_weights(
    checkpoint: Checkpoint, wanted: list[Wanted], writer: SafetensorsWriter, progress: Progress | None
) -> None:
    def deliver(item: Wanted, weight: Weight) -> None:
        values = dequantize(weight)
        rounded = values.to(writer.dtype)
        if not torch.isfinite(rounded).all() and torch.isfinite(values).all():
            raise UnsupportedError(
                f"{checkpoint.path}: values of {item.name} are too large for {writer.dtype}.",
                "Use --dtype bf16 or f32.",
            )
        writer.write(item.name, rounded)

    try:
        read_tensors(checkpoint, wanted, deliver, progress)
        writer.finish()
    finally:
        writer.close()
