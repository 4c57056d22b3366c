"""Values of a config.json that transformers knows: names of activations, rotary scalings, their numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from firstlight.base.errors import FirstlightError
from firstlight.facts.description import ModelDescription
from firstlight.facts.hf.hf_config import describe_hf
from firstlight.facts.hf.hf_config_writer import hf_config
from support.checkpoints import tiny_description


def described(**changes: Any) -> ModelDescription:
    """A tiny Llama; without changes, as its class has it."""
    config = hf_config(tiny_description(), "float32") | {"rope_theta": None, "rope_scaling": None}
    return describe_hf(config | changes, {})


@pytest.mark.parametrize("name", ACT2FN)
def test_every_name_of_an_activation(name: str) -> None:
    x = torch.linspace(-4, 4, 64)
    try:
        is_ours = torch.equal(ACT2FN[name](x), torch.nn.functional.silu(x))
    except (ImportError, RuntimeError, TypeError):  # with parameters, or for GPUs alone
        is_ours = False
    if is_ours:
        assert described(hidden_act=name) == described()
        return
    with pytest.raises(FirstlightError, match=f"hidden_act '{name}'"):
        described(hidden_act=name)


ROPE_FOLLOWED: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.5,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
}
ROPE_REFUSED = ("dynamic", "longrope", "proportional")
# Read only beside others, or in sections that are refused.
ROPE_BESIDE = {"rope_theta", "rope_type", "partial_rotary_factor", "mscale", "mscale_all_dim"}
ROPE_ELSEWHERE = {"short_factor", "long_factor", "mrope_section"}  # of longrope, and of images


def test_every_kind_of_rotary_scaling_has_its_verdict() -> None:
    assert {"default", *ROPE_INIT_FUNCTIONS} == ROPE_FOLLOWED.keys() | set(ROPE_REFUSED)
    in_sections = {name for section in ROPE_FOLLOWED.values() for name in section}
    assert RopeParameters.__annotations__.keys() == in_sections | ROPE_BESIDE | ROPE_ELSEWHERE


@pytest.mark.parametrize("kind", ROPE_REFUSED)
def test_other_kinds_of_rotary_scaling_are_refused_by_name(kind: str) -> None:
    with pytest.raises(FirstlightError, match=kind):
        described(rope_parameters={"rope_type": kind, "factor": 2.0})


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, section in ROPE_FOLLOWED.items() for name in section]
)
def test_every_number_of_a_rotary_scaling_counts(kind: str, name: str) -> None:
    section = {"rope_type": kind, **ROPE_FOLLOWED[kind]}
    value = section[name]
    other = not value if isinstance(value, bool) else value * 1.25 if isinstance(value, float) else value * 2
    ours = described(rope_parameters=section)
    assert described(rope_parameters={**section, name: other}) != ours


def test_of_two_rotary_sections_the_old_one_counts_as_in_transformers() -> None:
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
    both = {"rope_scaling": linear, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert LlamaConfig(**both).rope_parameters == linear
    assert described(**both).rope_scaling.kind == "linear"
