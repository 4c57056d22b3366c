"""GGUF tensor names against the gguf package's own tables."""

from __future__ import annotations

import gguf
import pytest

from firstlight.facts.checkpoint.names import huggingface_name, is_ignorable

MODULES = (
    "model.embed_tokens",
    "model.norm",
    "lm_head",
    *(f"model.layers.{layer}.self_attn.{part}_proj" for layer in (0, 31) for part in "qkvo"),
    *(f"model.layers.7.mlp.{part}_proj" for part in ("gate", "up", "down")),
    "model.layers.7.input_layernorm",
    "model.layers.7.post_attention_layernorm",
    "model.layers.7.self_attn.q_norm",
    "model.layers.7.self_attn.k_norm",
)


@pytest.mark.parametrize("module", MODULES)
def test_names_are_those_of_gguf(module: str) -> None:
    gguf_name = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 32).get_name(module)
    assert gguf_name is not None
    assert huggingface_name(f"{gguf_name}.weight") == f"{module}.weight"


def test_biases() -> None:
    assert huggingface_name("blk.3.attn_q.bias") == "model.layers.3.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "blk.0.attn_q",
        "blk.x.attn_q.weight",
        "blk.0.ssm_in.weight",
        "token_embd.bias",
        "a\nblk.0.attn_q.weight",
    ],
)
def test_unknown_names(name: str) -> None:
    assert huggingface_name(name) is None


def test_ignorable_tensors() -> None:
    assert is_ignorable("model.layers.0.self_attn.rotary_emb.inv_freq", tie_embeddings=False)
    assert is_ignorable("lm_head.weight", tie_embeddings=True)
    assert not is_ignorable("lm_head.weight", tie_embeddings=False)
    assert not is_ignorable("model.norm.weight", tie_embeddings=True)
