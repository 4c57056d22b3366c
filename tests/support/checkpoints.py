"""Tiny random models on disk: Hugging Face folders and GGUF files, written by other people's libraries.

Used by tests of facts, loading and everything above. The GGUF names, the block quantisation and the headers
come from the `gguf` package, so that our own reading is checked against an independent writer. Invariant: the
same description and seed give the same weights in both kinds of files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import torch
from gguf import GGMLQuantizationType as GgmlType
from safetensors.torch import save_file

from firstlight.facts.description import ModelDescription
from firstlight.facts.hf.hf_config_writer import hf_config
from support import nested

Weights = dict[str, np.ndarray]
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
TORCH_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_TINY = ModelDescription(
    architecture="llama",
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    intermediate_size=96,
    vocab_size=64,
    max_position=256,
    norm_eps=1e-5,
    rope_theta=10000.0,
    bos_token_id=1,
    eos_token_ids=(2,),
)
_CHANGES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 32},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True, "head_size": 32},
}


def tiny_description(architecture: str = "llama", **changes: Any) -> ModelDescription:
    """A small, complete description; `changes` replace fields."""
    fields = {"architecture": architecture, **_CHANGES.get(architecture, {}), **changes}
    return msgspec.structs.replace(_TINY, **fields)


def weight_shapes(description: ModelDescription) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by Hugging Face name."""
    d = description
    queries, keys = d.num_heads * d.head_size, d.num_kv_heads * d.head_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (d.vocab_size, d.hidden_size),
        "model.norm.weight": (d.hidden_size,),
    }
    if not d.tie_embeddings:
        shapes["lm_head.weight"] = (d.vocab_size, d.hidden_size)
    for layer in range(d.num_layers):
        prefix = f"model.layers.{layer}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        shapes[prefix + "input_layernorm.weight"] = (d.hidden_size,)
        shapes[prefix + "post_attention_layernorm.weight"] = (d.hidden_size,)
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{attention}{name}_proj.weight"] = (rows, d.hidden_size)
            if d.attention_bias:
                shapes[f"{attention}{name}_proj.bias"] = (rows,)
        shapes[attention + "o_proj.weight"] = (d.hidden_size, queries)
        if d.output_bias:
            shapes[attention + "o_proj.bias"] = (d.hidden_size,)
        if d.qk_norm:
            shapes[attention + "q_norm.weight"] = (d.head_size,)
            shapes[attention + "k_norm.weight"] = (d.head_size,)
        shapes[mlp + "gate_proj.weight"] = (d.intermediate_size, d.hidden_size)
        shapes[mlp + "up_proj.weight"] = (d.intermediate_size, d.hidden_size)
        shapes[mlp + "down_proj.weight"] = (d.hidden_size, d.intermediate_size)
        if d.mlp_bias:
            shapes[mlp + "gate_proj.bias"] = (d.intermediate_size,)
            shapes[mlp + "up_proj.bias"] = (d.intermediate_size,)
            shapes[mlp + "down_proj.bias"] = (d.hidden_size,)
    return shapes


def random_weights(description: ModelDescription, seed: int = 0) -> Weights:
    """float32 weights of a sensible size: matrices keep the variance, norms are near 1."""
    random = np.random.default_rng(seed)
    weights = {}
    for name, shape in weight_shapes(description).items():
        values = random.standard_normal(shape, dtype=np.float32)
        if len(shape) == 2:
            values /= np.float32(np.sqrt(shape[1]))
        else:
            values = values * np.float32(0.1) + np.float32(name.endswith("norm.weight"))
        weights[name] = values
    return weights


def write_hf_folder(
    folder: Path,
    description: ModelDescription,
    weights: Mapping[str, np.ndarray],
    *,
    dtype: str = "F32",
    num_shards: int = 1,
) -> Path:
    """A Hugging Face folder without a tokenizer; sharded with an index when `num_shards` is above 1."""
    folder.mkdir(parents=True, exist_ok=True)
    torch_type = TORCH_TYPES[dtype]
    config = hf_config(description, str(torch_type).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: torch.from_numpy(values.copy()).to(torch_type) for name, values in weights.items()}
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for number in range(num_shards):
        name = f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[number::num_shards]}
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, name))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def interleave_heads(values: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's row order of q and k: the two halves of each head interleaved."""
    half = values.shape[0] // num_heads // 2
    return values.reshape(num_heads, 2, half, -1).swapaxes(1, 2).reshape(values.shape)


def quantise(values: np.ndarray, kind: GgmlType) -> np.ndarray:
    """The bytes that the gguf package makes of float32 values; of nested formats our tests' own."""
    if kind in (GgmlType.Q4_K, GgmlType.Q6_K):
        return nested.quantize(values, kind.name)
    if kind in (GgmlType.F32, GgmlType.F16):
        return values.astype(np.float32 if kind == GgmlType.F32 else np.float16)
    return gguf.quants.quantize(values, kind)


FormatOf = Callable[[str], GgmlType]


def mixed_formats(name: str) -> GgmlType:
    """Formats as real files mix them: Q8_0 embedding, Q4_1 matrices, F32 vectors."""
    if not name.endswith("proj.weight"):
        return GgmlType.Q8_0 if name == "model.embed_tokens.weight" else GgmlType.F32
    return GgmlType.Q4_0 if "mlp.up" in name else GgmlType.Q4_1


def write_gguf(
    path: Path,
    description: ModelDescription,
    weights: Mapping[str, np.ndarray],
    *,
    format_of: FormatOf = lambda _: GgmlType.F32,
    edit: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """A GGUF file of the model; `edit` may add metadata or tensors before it is written."""
    name = "llama" if description.architecture == "mistral" else description.architecture
    writer = gguf.GGUFWriter(path, name)
    _add_metadata(writer, name, description)
    model_arch = next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == name)
    names = gguf.get_tensor_name_map(model_arch, description.num_layers)
    for hf_name, values in weights.items():
        gguf_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, hf_name
        if name == "llama" and ".q_proj." in hf_name:
            values = interleave_heads(values, description.num_heads)
        if name == "llama" and ".k_proj." in hf_name:
            values = interleave_heads(values, description.num_kv_heads)
        kind = format_of(hf_name)
        writer.add_tensor(gguf_name, quantise(values, kind), raw_dtype=kind)
    if edit is not None:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(writer: gguf.GGUFWriter, name: str, description: ModelDescription) -> None:
    writer.add_context_length(description.max_position)
    writer.add_embedding_length(description.hidden_size)
    writer.add_block_count(description.num_layers)
    writer.add_feed_forward_length(description.intermediate_size)
    writer.add_head_count(description.num_heads)
    writer.add_head_count_kv(description.num_kv_heads)
    writer.add_key_length(description.head_size)
    writer.add_value_length(description.head_size)
    writer.add_rope_dimension_count(description.head_size)
    writer.add_rope_freq_base(description.rope_theta)
    writer.add_layer_norm_rms_eps(description.norm_eps)
    if description.sliding_window:
        writer.add_uint32(f"{name}.attention.sliding_window", description.sliding_window)
    tokens = ["<pad>", "<s>", "</s>", *(f"t{number}" for number in range(3, description.vocab_size))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["t 3", "t 4"])
    writer.add_pad_token_id(0)
    if description.bos_token_id is not None:
        writer.add_bos_token_id(description.bos_token_id)
    if description.eos_token_ids:
        writer.add_eos_token_id(description.eos_token_ids[0])
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
