"""Tensor names of GGUF files in Hugging Face words. Used by `gguf_checkpoint`.

Everything above this room knows Hugging Face names only. Invariant: the mapping is one to one.
"""

from __future__ import annotations

import re

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d{1,6})\.([a-z_]+)\.(weight|bias)")

ROPE_FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies: configuration kept as a tensor


def huggingface_name(gguf_name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor, or None for a tensor no supported architecture has."""
    if gguf_name in _GLOBAL:
        return _GLOBAL[gguf_name]
    match = _LAYER_NAME.fullmatch(gguf_name)
    if match is None or match[2] not in _LAYER:
        return None
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"


def is_ignorable(name: str, tie_embeddings: bool) -> bool:
    """Whether a Hugging Face tensor may stay unread: it holds no weight of its own."""
    if name.endswith((".rotary_emb.inv_freq", ".attn_rot_embd.weight", ".masked_bias")):
        return True
    return tie_embeddings and name == "lm_head.weight"
