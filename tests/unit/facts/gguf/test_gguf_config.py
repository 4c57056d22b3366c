"""GGUF metadata to a description: what is read, what is recognised, what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from firstlight.base.errors import FirstlightError, ModelFileError, UnsupportedError
from firstlight.facts.checkpoint.checkpoint import Checkpoint, open_checkpoint
from firstlight.facts.description import ModelDescription, RopeScaling
from firstlight.facts.gguf.gguf_config import llama3_factors
from support.checkpoints import random_weights, tiny_description, write_gguf

Edit = Callable[[gguf.GGUFWriter], object]


def opened(tmp_path: Path, edit: Edit, architecture: str = "llama", **changes: object) -> Checkpoint:
    description = tiny_description(architecture, **changes)
    return open_checkpoint(
        write_gguf(tmp_path / "m.gguf", description, random_weights(description), edit=edit)
    )


def described(tmp_path: Path, edit: Edit, architecture: str = "llama", **changes: object) -> ModelDescription:
    return opened(tmp_path, edit, architecture, **changes).description


def llama31_factors(head_size: int, theta: float, factor: float) -> np.ndarray:
    """As llama.cpp's converter makes them, in float32."""
    freqs = 1.0 / (theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size))
    low_wavelength, high_wavelength, factors = 8192 / 1.0, 8192 / 4.0, []
    for freq in freqs:
        wavelength = 2 * np.pi / freq
        if wavelength < high_wavelength:
            factors.append(1)
        elif wavelength > low_wavelength:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array([float(value) for value in factors], dtype=np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("head_size", [64, 128])
def test_the_factors_of_llama_3_are_recognised(tmp_path: Path, factor: float, head_size: int) -> None:
    factors = llama31_factors(head_size, 500000.0, factor)
    checkpoint = opened(
        tmp_path,
        lambda writer: writer.add_tensor("rope_freqs.weight", factors),
        head_size=head_size,
        rope_theta=500000.0,
    )
    scaling = checkpoint.description.rope_scaling
    assert scaling == RopeScaling(
        kind="llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    )
    assert llama3_factors(scaling, head_size, 500000.0) == pytest.approx(factors, rel=2e-6)
    assert "rope" not in "".join(checkpoint.tensors)


def test_other_factors_stay_factors(tmp_path: Path) -> None:
    factors = np.linspace(1, 3, 8, dtype=np.float32)
    scaling = described(tmp_path, lambda writer: writer.add_tensor("rope_freqs.weight", factors)).rope_scaling
    assert scaling.kind == "factors"
    assert scaling.factors == tuple(factors.tolist())


def test_factors_of_one_are_none(tmp_path: Path) -> None:
    ones = np.ones(8, dtype=np.float32)
    scaling = described(tmp_path, lambda writer: writer.add_tensor("rope_freqs.weight", ones)).rope_scaling
    assert scaling == RopeScaling()


@pytest.mark.parametrize(
    "values",
    [
        np.ones(9, np.float32) * 2,
        np.zeros(8, np.float32),
        np.full(8, np.nan, np.float32),
        np.ones((2, 4), np.float32),
    ],
)
def test_bad_factors(tmp_path: Path, values: np.ndarray) -> None:
    with pytest.raises(FirstlightError, match=r"rotary factors|rope_freqs"):
        described(tmp_path, lambda writer: writer.add_tensor("rope_freqs.weight", values))


def test_linear_scaling(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    stretched, stated = described(tmp_path, edit), described(tmp_path, lambda _: None).max_position
    assert stretched.rope_scaling == RopeScaling(kind="linear", factor=4.0, original_max_position=stated)
    assert stretched.max_position == 4 * stated
    old = described(tmp_path, lambda writer: writer.add_float32("llama.rope.scale_linear", 2.0))
    assert old.rope_scaling == RopeScaling(kind="linear", factor=2.0, original_max_position=stated)
    assert old.max_position == 2 * stated

    def raised(writer: gguf.GGUFWriter) -> None:
        edit(writer)
        writer.add_rope_scaling_orig_ctx_len(stated // 4)

    assert described(tmp_path, raised).max_position == stated


def test_a_scaling_of_none_wins_over_a_factor(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(4.0)

    assert described(tmp_path, edit).rope_scaling == RopeScaling()


def test_float32_metadata_reads_as_people_wrote_it(tmp_path: Path) -> None:
    description = described(tmp_path, lambda _: None, norm_eps=1e-5, rope_theta=1e6)
    assert (description.norm_eps, description.rope_theta) == (1e-5, 1e6)


def test_several_end_tokens(tmp_path: Path) -> None:
    description = described(tmp_path, lambda writer: writer.add_eot_token_id(9))
    assert description.eos_token_ids == (2, 9)


def test_absent_special_tokens(tmp_path: Path) -> None:
    description = described(tmp_path, lambda _: None, bos_token_id=None, eos_token_ids=())
    assert (description.bos_token_id, description.eos_token_ids) == (None, ())


def test_biases_are_seen_in_the_tensors(tmp_path: Path) -> None:
    description = described(tmp_path, lambda _: None, attention_bias=True, output_bias=True, mlp_bias=True)
    assert (description.attention_bias, description.output_bias, description.mlp_bias) == (True, True, True)


REFUSED: dict[str, Edit] = {
    "llama.expert_count": lambda writer: writer.add_expert_count(8),
    "llama.rope.scaling.type": lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN),
    "llama.rope.scaling.attn_factor": lambda writer: writer.add_rope_scaling_attn_factors(1.2),
    "llama.attention.causal": lambda writer: writer.add_causal_attention(False),
    "llama.attention.sliding_window_pattern": lambda writer: writer.add_sliding_window_pattern([True, False]),
    "llama.logit_scale": lambda writer: writer.add_logit_scale(0.5),
}


@pytest.mark.parametrize("field", REFUSED)
def test_arithmetic_that_is_not_supported_is_refused_by_name(tmp_path: Path, field: str) -> None:
    with pytest.raises(UnsupportedError, match=field):
        described(tmp_path, REFUSED[field])


def test_a_partial_rotation_is_refused(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["llama.rope.dimension_count"].value = 8

    with pytest.raises(UnsupportedError, match=r"rope\.dimension_count is 8"):
        described(tmp_path, edit)


DAMAGED: dict[str, object] = {
    "llama.embedding_length": 0,
    "llama.block_count": 1 << 30,
    "llama.attention.head_count": 0,
    "llama.attention.layer_norm_rms_epsilon": float("nan"),
    "llama.rope.freq_base": -1.0,
    "tokenizer.ggml.eos_token_id": 64,
}


@pytest.mark.parametrize("field", DAMAGED)
def test_impossible_values_are_named(tmp_path: Path, field: str) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0][field].value = DAMAGED[field]

    with pytest.raises(ModelFileError, match=field.replace(".", r"\.")):
        described(tmp_path, edit)


def test_missing_values_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"llama\.feed_forward_length is missing"):
        described(tmp_path, lambda writer: writer.kv_data[0].pop("llama.feed_forward_length"))


def test_heads_must_divide(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["llama.attention.head_count_kv"].value = 3

    with pytest.raises(ModelFileError, match=r"\(4\) is not a multiple .* \(3\)"):
        described(tmp_path, edit)


def test_head_counts_that_differ_by_layer_are_refused(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop("llama.attention.head_count_kv")
        writer.add_head_count_kv([2, 1])

    with pytest.raises(ModelFileError, match="head_count_kv must be an integer"):
        described(tmp_path, edit)
