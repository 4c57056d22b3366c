"""config.json to a description and back: families, both spellings of rope fields, refusals by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.base.errors import ModelFileError, UnsupportedError
from firstlight.facts.description import ModelDescription, RopeScaling
from firstlight.facts.hf.hf_config import describe_hf
from firstlight.facts.hf.hf_config_writer import hf_config, hf_generation_config
from support.checkpoints import ARCHITECTURES, tiny_description
from support.experts import SOFTMAX, description_of

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config(architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    return hf_config(tiny_description(architecture), "float32") | changes


def described(architecture: str = "llama", **changes: Any) -> ModelDescription:
    return describe_hf(config(architecture, **changes), {})


def test_old_and_new_rope_fields_mean_the_same() -> None:
    old = described(rope_theta=500000.0, rope_scaling=LLAMA3)
    new = described(rope_theta=None, rope_scaling=None, rope_parameters={"rope_theta": 500000.0, **LLAMA3})
    assert old == new
    assert old.rope_scaling == RopeScaling(kind="llama3", factor=32.0)
    assert old.rope_theta == 500000.0


@pytest.mark.parametrize(
    ("section", "scaling"),
    [
        (None, RopeScaling()),
        ({}, RopeScaling()),
        ({"rope_type": "default", "rope_theta": 10000.0}, RopeScaling()),
        (
            {"type": "linear", "factor": 2.0},
            RopeScaling(kind="linear", factor=2.0, original_max_position=256),
        ),
        (
            {"rope_type": "linear", "factor": 2},
            RopeScaling(kind="linear", factor=2.0, original_max_position=256),
        ),
        (
            {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "attention_factor": 1.5},
            RopeScaling(kind="yarn", factor=8.0, original_max_position=32, turn_factor=1.5),
        ),
        (
            {"rope_type": "yarn", "original_max_position_embeddings": 64, "truncate": False, "mscale": 1.0},
            RopeScaling(
                kind="yarn",
                factor=4.0,  # of 256 positions
                original_max_position=64,
                truncate=False,
                turn_factor=0.1 * math.log(4.0) + 1.0,
            ),
        ),
    ],
)
def test_rope_scaling(section: Any, scaling: RopeScaling) -> None:
    assert described(rope_scaling=section).rope_scaling == scaling
    assert described(rope_scaling=None, rope_parameters=section).rope_scaling == scaling


QWEN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("stated", "section", "longest"),
    [
        (32768, None, 32768),
        (32768, QWEN, 131072),  # Qwen's recipe, the rest of config.json as it was
        (40960, QWEN, 131072),  # Qwen3's, which has room for an answer
        (131072, QWEN, 131072),  # already raised
        (32768, {"rope_type": "yarn", "factor": 4.0}, 131072),
        (131072, {"rope_type": "yarn", "original_max_position_embeddings": 32768}, 131072),
        (
            163840,
            {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
            163840,
        ),  # DeepSeek
        (4096, {"type": "linear", "factor": 4.0}, 16384),
        (16384, {"type": "linear", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        (131072, LLAMA3, 131072),
    ],
)
def test_a_scaling_stretches_the_original_positions_once(stated: int, section: Any, longest: int) -> None:
    changes = {"max_position_embeddings": stated, "rope_scaling": section}
    description = described(**changes)
    assert description.max_position == longest
    assert describe_hf(hf_config(description, "float32"), {}) == description


def test_the_original_positions_may_stand_beside_the_section() -> None:
    scaling = described(original_max_position_embeddings=64, rope_scaling={"type": "yarn", "factor": 4.0})
    assert scaling.rope_scaling.original_max_position == 64


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope"])
def test_other_rope_types_are_refused(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=f"rope_scaling: rope_type '{kind}'"):
        described(rope_scaling={"rope_type": kind, "factor": 4.0})


def test_incomplete_rope_scaling() -> None:
    with pytest.raises(ModelFileError, match="the field factor is missing"):
        described(rope_scaling={"rope_type": "linear"})
    with pytest.raises(ModelFileError, match="high_freq_factor"):
        described(rope_scaling={**LLAMA3, "high_freq_factor": 1.0})
    with pytest.raises(UnsupportedError, match="differ from layer to layer"):
        described(rope_parameters={"full_attention": {"rope_theta": 1.0}})


@pytest.mark.parametrize(
    ("architecture", "fields", "window"),
    [
        ("mistral", {"sliding_window": 4096}, 4096),
        ("mistral", {"sliding_window": None}, None),
        ("llama", {"sliding_window": 4096, "use_sliding_window": False}, None),
        ("mistral", {"sliding_window": 4096, "use_sliding_window": False}, 4096),  # knows no switch
        ("qwen2", {"use_sliding_window": False, "sliding_window": 4096}, None),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}, 16),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 28}, None),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 16, "layer_types": ["full_attention"] * 2},
            None,
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 16, "layer_types": ["sliding_attention"] * 2},
            16,
        ),
        ("qwen3", {"use_sliding_window": True, "sliding_window": None}, None),
    ],
)
def test_sliding_windows(architecture: str, fields: dict[str, Any], window: int | None) -> None:
    assert described(architecture, **fields).sliding_window == window


def test_mistral_without_the_field_has_the_window_of_its_class() -> None:
    fields = config("mistral")
    del fields["sliding_window"], fields["num_key_value_heads"]
    fields |= {"num_attention_heads": 8}
    description = describe_hf(fields, {})
    assert (description.sliding_window, description.num_kv_heads) == (4096, 8)


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("architecture", "fields", "full_layers"),
    [
        ("mistral", {"sliding_window": 16}, ()),
        ("mistral", {"sliding_window": 16, "layer_types": [SLIDING, FULL]}, (1,)),
        ("mistral", {"sliding_window": 16, "layer_types": [SLIDING, "attention"]}, (1,)),  # the old name
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, (0,)),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "layer_types": [FULL, SLIDING]}, (0,)),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, ()),
    ],
)
def test_the_layers_that_have_the_window(
    architecture: str, fields: dict[str, Any], full_layers: tuple[int, ...]
) -> None:
    original = description_of(architecture) if architecture == "qwen3_moe" else tiny_description(architecture)
    description = describe_hf(hf_config(original, "float32") | fields, {})
    assert (description.sliding_window, description.full_layers) == (16, full_layers)
    assert describe_hf(hf_config(description, "float32"), {}).full_layers == full_layers


@pytest.mark.parametrize(
    ("architecture", "fields", "error", "match"),
    [
        ("llama", {"sliding_window": 16}, UnsupportedError, "sliding_window = 16"),
        (
            "llama",
            {"layer_types": [FULL, SLIDING]},
            ModelFileError,
            "layer_types asks for a window in 1 of 2",
        ),
        ("qwen2", {"layer_types": [FULL, SLIDING]}, ModelFileError, "use_sliding_window"),
        ("mistral", {"layer_types": [FULL]}, ModelFileError, "layer_types must be a list of 2"),
        ("mistral", {"layer_types": [FULL, "chunked_attention"]}, UnsupportedError, "'chunked_attention'"),
        ("mixtral", {"sliding_window": 16, "layer_types": [FULL, SLIDING]}, UnsupportedError, "layer_types"),
    ],
)
def test_a_window_that_no_layer_could_have_is_refused(
    architecture: str, fields: dict[str, Any], error: type[Exception], match: str
) -> None:
    original = tiny_description(architecture, experts=SOFTMAX if architecture == "mixtral" else None)
    with pytest.raises(error, match=match):
        describe_hf(hf_config(original, "float32") | fields, {})


def test_defaults_of_the_families() -> None:
    fields = config("qwen3")
    del fields["head_dim"]
    assert describe_hf(fields, {}).head_size == 128
    fields = config("llama")
    del fields["head_dim"], fields["num_key_value_heads"], fields["tie_word_embeddings"]
    description = describe_hf(fields, {})
    assert (description.head_size, description.num_kv_heads, description.tie_embeddings) == (16, 4, False)
    assert described("qwen2", attention_bias=False).attention_bias
    assert not described("mistral", attention_bias=True).attention_bias
    llama = described(attention_bias=True)
    assert (llama.attention_bias, llama.output_bias) == (True, True)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"residual_multiplier": 0.2}, "residual_multiplier"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_unsupported_models_are_refused_by_field(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(UnsupportedError, match=match):
        described(**changes)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": None}, "model_type is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be an integer"),
        ({"hidden_size": True}, "hidden_size must be"),
        ({"hidden_size": 65, "head_dim": None}, "not a multiple"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": -5}, "vocab_size"),
        ({"num_attention_heads": 3}, "is not a multiple"),
        ({"head_dim": 15}, "even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_theta": "x"}, "rope_theta"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": 64}, "eos_token_id"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
    ],
)
def test_impossible_values_are_named(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelFileError, match=match):
        described(**changes)


def test_end_tokens_of_both_files() -> None:
    description = describe_hf(config(eos_token_id=2), {"eos_token_id": [5, 2]})
    assert description.eos_token_ids == (5, 2)
    assert describe_hf(config(eos_token_id=None), {}).eos_token_ids == ()
    silent = config()
    del silent["eos_token_id"]
    assert describe_hf(silent, {}).eos_token_ids == (2,)  # as its class has it
    assert describe_hf(silent, {"eos_token_id": 5}).eos_token_ids == (5,)


scalings = st.one_of(
    st.just(RopeScaling()),
    st.builds(
        RopeScaling,
        kind=st.just("linear"),
        factor=st.floats(1, 64),
        original_max_position=st.integers(1, 4096),
    ),
    st.builds(
        RopeScaling,
        kind=st.just("llama3"),
        factor=st.floats(1, 64),
        low_freq_factor=st.floats(0.5, 1),
        high_freq_factor=st.floats(2, 8),
        original_max_position=st.integers(1, 1 << 20),
    ),
)


@given(
    architecture=st.sampled_from(ARCHITECTURES),
    scaling=scalings,
    tied=st.booleans(),
    window=st.none() | st.integers(1, 4096),
    bias=st.booleans(),
    eos=st.lists(st.integers(0, 63), unique=True, max_size=3).map(tuple),
)
def test_a_description_survives_its_own_config(
    architecture: str, scaling: RopeScaling, tied: bool, window: int | None, bias: bool, eos: tuple[int, ...]
) -> None:
    changes: dict[str, Any] = {"rope_scaling": scaling, "tie_embeddings": tied, "eos_token_ids": eos}
    if scaling.kind == "linear":
        changes["max_position"] = round(scaling.original_max_position * scaling.factor)
    if architecture in ("llama", "qwen3"):
        changes |= {"attention_bias": bias, "output_bias": bias}
    if architecture != "llama":
        changes["sliding_window"] = window
    description = tiny_description(architecture, **changes)
    assert describe_hf(hf_config(description, "bfloat16", 0), {}) == description


def test_what_the_format_cannot_express_is_refused() -> None:
    factors = tiny_description(rope_scaling=RopeScaling(kind="factors", factors=(2.0,) * 8))
    with pytest.raises(UnsupportedError, match="rotary factors"):
        hf_config(factors, "float32")
    with pytest.raises(UnsupportedError, match="other biases or norms than Qwen2ForCausalLM"):
        hf_config(tiny_description("qwen2", attention_bias=False), "float32")
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM"):
        hf_config(tiny_description("llama", attention_bias=True), "float32")


def test_generation_config() -> None:
    description = tiny_description(eos_token_ids=(2, 5))
    written = hf_generation_config(description, {"temperature": 0.5}, 0)
    assert written == {
        "bos_token_id": 1,
        "eos_token_id": [2, 5],
        "pad_token_id": 0,
        "do_sample": True,
        "temperature": 0.5,
    }
    assert hf_generation_config(tiny_description(bos_token_id=None), {}) == {"eos_token_id": 2}
