"""Tensor names of files in the words of a Hugging Face language model.

Everything above this room knows those names only. Invariant: the mapping is one to one.
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


_WRAPPED = "language_model."
_OTHER_PARTS = re.compile(r"^(?:model\.)?(vision_tower|mm_projector)\.")
_DEEP_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")


def text_name(name: str) -> str | None:
    """The name within the language model of a tensor of a wrapped one; None for parts that are not text.

    Some exports leave out the language model's own "model.".
    """
    if _OTHER_PARTS.match(name):
        return None
    inner = name.removeprefix(_WRAPPED)
    return inner if inner == name or inner.startswith(("model.", "lm_head.")) else f"model.{inner}"


def is_behind_last_layer(name: str, num_layers: int) -> bool:
    """Whether a tensor belongs to a layer that predicts further tokens (MTP), behind the model's own."""
    match = _DEEP_LAYER.match(name)
    return match is not None and int(match[1]) >= num_layers
