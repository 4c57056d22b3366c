"""Every metadata key that gguf knows for a language model: followed, refused by name, or of no matter.

A key that a release of gguf brings is in none of the lists, and fails here until somebody has said which. The
groups `attention` and `rope` are closed: whatever else stands there is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest

from firstlight.base.errors import UnsupportedError
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from support.checkpoints import random_weights, tiny_description, write_gguf

FOLLOWED = {
    "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "attention.sliding_window", "attention.causal",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length",
}  # fmt: skip
# Such a value is refused.
REFUSED: dict[str, object] = {
    "expert_count": 8, "use_parallel_residual": True, "logit_scale": 0.5, "residual_scale": 0.5,
    "embedding_scale": 2.0, "attn_logit_softcapping": 30.0, "final_logit_softcapping": 30.0,
    "router_logit_softcapping": 30.0, "swiglu_clamp_exp": 7.0, "swiglu_clamp_shexp": 7.0,
    "activation_sparsity_scale": 0.5, "full_attention_interval": 4,
    "attention.clamp_kqv": 8.0, "attention.max_alibi_bias": 8.0, "attention.scale": 0.5,
    "attention.shared_kv_layers": 2, "attention.temperature_scale": 0.1, "rope.scaling.attn_factor": 1.2,
}  # fmt: skip
NO_MATTER = {
    "attention.layer_norm_epsilon": "of a norm that these have not",
    "attention.temperature_length": "only beside temperature_scale",
    "rope.scaling.finetuned": "a remark",
    "rope.scaling.yarn_attn_factor": "only with yarn, which is refused",
    "rope.scaling.yarn_beta_fast": "only with yarn, which is refused",
    "rope.scaling.yarn_beta_slow": "only with yarn, which is refused",
    "rope.scaling.yarn_ext_factor": "only with yarn, which is refused",
    "rope.scaling.yarn_log_multiplier": "only with yarn, which is refused",
    "pooling_type": "of embeddings, not of answers",
    "embedding_length_out": "of embeddings, not of answers",
    "tensor_data_layout": "the order of rows, which the architecture says",
}
# Not read for these architectures, by llama.cpp neither: of experts (there are none), of recurrent layers, of
# encoders, of other models' tensors (which are refused by their names).
OF_OTHERS = {
    "expert_chunk_feed_forward_length", "expert_feed_forward_length", "expert_gating_func",
    "expert_group_count", "expert_group_scale", "expert_group_used_count", "expert_shared_count",
    "expert_shared_feed_forward_length", "expert_used_count", "expert_weights_norm", "expert_weights_scale",
    "experts_per_group", "interleave_moe_layer_step", "leading_dense_block_count", "moe_every_n_layers",
    "moe_latent_size", "altup.active_idx", "altup.num_inputs", "embedding_length_per_layer_input",
    "decoder_block_count", "decoder_start_token_id", "features_length", "n_deepstack_layers",
    "nextn_predict_layers", "rescale_every_n_layers", "swin_norm", "time_decay_extra_dim",
    "time_mix_extra_dim", "token_shift_count", "{dense}_feat_in", "{dense}_feat_out",
}  # fmt: skip


def keys_of(group: type) -> Iterator[str]:
    for name, value in vars(group).items():
        if isinstance(value, type) and not name.startswith("_"):
            yield from keys_of(value)
        elif isinstance(value, str) and value.startswith("{arch}."):
            yield value.removeprefix("{arch}.")


KEYS = gguf.constants.Keys
IN_CLOSED_GROUPS = {*keys_of(KEYS.Attention), *keys_of(KEYS.Rope)}


def with_key(tmp_path: Path, key: str, value: object) -> Path:
    types = gguf.GGUFValueType
    kind = {bool: types.BOOL, int: types.UINT32, float: types.FLOAT32}[type(value)]

    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_key_value(f"llama.{key}", value, kind)

    description = tiny_description()
    return write_gguf(tmp_path / "m.gguf", description, random_weights(description), edit=edit)


def test_every_key_has_its_verdict() -> None:
    known = FOLLOWED | REFUSED.keys() | NO_MATTER.keys() | OF_OTHERS
    assert set(keys_of(KEYS.LLM)) - known == set(), "keys that nobody has looked at"
    assert (FOLLOWED | REFUSED.keys() | NO_MATTER.keys()) - {*keys_of(KEYS.LLM), *IN_CLOSED_GROUPS} == set()


@pytest.mark.parametrize("key", REFUSED)
def test_what_changes_the_arithmetic_is_refused_by_name(tmp_path: Path, key: str) -> None:
    with pytest.raises(UnsupportedError, match=f"llama.{key}"):
        open_checkpoint(with_key(tmp_path, key, REFUSED[key]))


@pytest.mark.parametrize("key", sorted(IN_CLOSED_GROUPS - FOLLOWED - REFUSED.keys() - NO_MATTER.keys()))
def test_closed_groups_hold_nothing_else(tmp_path: Path, key: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"llama\.{key}"):
        open_checkpoint(with_key(tmp_path, key, 2))


@pytest.mark.parametrize("key", ["attention.brand_new", "rope.brand_new"])
def test_a_key_that_nobody_knows_yet_is_refused_there(tmp_path: Path, key: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"llama\.{key}"):
        open_checkpoint(with_key(tmp_path, key, 2))


@pytest.mark.parametrize("key", NO_MATTER)
def test_what_is_of_no_matter_changes_nothing(tmp_path: Path, key: str) -> None:
    description = tiny_description()
    plain = write_gguf(tmp_path / "plain.gguf", description, random_weights(description))
    assert open_checkpoint(with_key(tmp_path, key, 2)).description == open_checkpoint(plain).description
