"""Random damage through the whole door: it opens, or it is a clear error, never another exception."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.base.errors import FirstlightError
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.facts.hf.hf_config import describe_hf
from firstlight.facts.hf.hf_config_writer import hf_config
from support.checkpoints import (
    ARCHITECTURES,
    mixed_formats,
    random_weights,
    tiny_description,
    write_gguf,
)


@pytest.fixture(scope="module")
def intact_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    description = tiny_description("qwen3", num_layers=1)
    path = tmp_path_factory.mktemp("damage") / "m.gguf"
    return write_gguf(path, description, random_weights(description), format_of=mixed_formats)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_damaged_gguf_header_opens_or_is_one_clear_error(intact_gguf: Path, data: st.DataObject) -> None:
    content = bytearray(intact_gguf.read_bytes())
    end = content.index(b"output_norm.weight") + 60
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(4, end))] = data.draw(st.integers(0, 255))
    path = intact_gguf.with_name("damaged.gguf")
    path.write_bytes(content)
    try:
        checkpoint = open_checkpoint(path)
    except FirstlightError:
        return
    assert all(facts.offset + facts.nbytes <= len(content) for facts in checkpoint.tensors.values())


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(architecture=st.sampled_from(ARCHITECTURES), data=st.data())
def test_any_value_in_any_field_of_a_config_is_handled(architecture: str, data: st.DataObject) -> None:
    config = hf_config(tiny_description(architecture), "float32")
    names = [
        *config,
        "rope_parameters",
        "quantization_config",
        "layer_types",
        "use_sliding_window",
        "num_experts",
    ]
    config[data.draw(st.sampled_from(names))] = data.draw(anything)
    rope = {
        name: data.draw(anything) for name in data.draw(st.sets(st.sampled_from(ROPE_FIELDS), max_size=3))
    }
    try:
        description = describe_hf(config | ({"rope_scaling": rope} if rope else {}), {"eos_token_id": 2})
    except FirstlightError:
        return
    assert description.num_heads % description.num_kv_heads == 0


ROPE_FIELDS = ("rope_type", "type", "factor", "rope_theta", "low_freq_factor", "partial_rotary_factor")
