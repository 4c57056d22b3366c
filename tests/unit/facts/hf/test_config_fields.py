"""Every field of transformers' configuration classes: followed, refused by name, or of no matter, and why.

The lists are held against the classes themselves, against what their models' code reads, and against ours: a
field that a release of transformers brings is in none of them, and fails here until somebody has said which.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from typing import Any

import pytest
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Kimi_K25Config,
    LlamaConfig,
    MiniMaxM2Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    cache_utils,
    masking_utils,
    modeling_rope_utils,
)

from firstlight.base.errors import FirstlightError, ModelFileError
from firstlight.facts.description import ModelDescription
from firstlight.facts.hf.hf_config import describe_hf
from firstlight.facts.hf.hf_config_writer import hf_config
from firstlight.facts.hf.hf_families import ALIASES, FAMILIES
from support.checkpoints import ARCHITECTURES as DENSE
from support.checkpoints import tiny_description
from support.config_fields import (
    FIELDS,
    NO_FIELDS,
    OF_ALL,
    OF_WRAPPER,
    READ_BESIDE,
    Followed,
    NoMatter,
    Refused,
    Required,
    Verdict,
)
from support.experts import description_of, kimi

CLASSES: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig, "mistral": MistralConfig, "ministral": MinistralConfig,
    "qwen2": Qwen2Config, "qwen3": Qwen3Config, "qwen3_moe": Qwen3MoeConfig,
    "mixtral": MixtralConfig, "minimax_m2": MiniMaxM2Config,
    "deepseek_v2": DeepseekV2Config, "deepseek_v3": DeepseekV3Config, "kimi_k2": DeepseekV3Config,
}  # fmt: skip

SHARED_CODE = (masking_utils, cache_utils, modeling_rope_utils)
_READS = re.compile(r"\bconfig\.(\w+)|[gh](?:et|as)attr\((?:self\.)?\w*config, ?\"(\w+)\"")


def base(architecture: str) -> dict[str, Any]:
    """A config.json of a tiny model."""
    if architecture in DENSE or architecture == "ministral":
        made = hf_config(tiny_description(ALIASES.get(architecture, architecture)), "float32")
        made["model_type"] = architecture
    elif architecture.startswith(("deepseek", "kimi")):
        made = hf_config(kimi(architecture="kimi_k2"), "float32") | {"rope_scaling": None}
        made |= {"model_type": architecture, "num_key_value_heads": None}
    else:
        made = hf_config(description_of(architecture), "float32")
    if architecture == "deepseek_v2":
        made |= {"scoring_func": "softmax", "norm_topk_prob": False, "topk_method": "greedy"}
    made.pop("rope_theta")
    return {name: value for name, value in made.items() if name != "rope_scaling"}


def described(config: dict[str, Any]) -> ModelDescription:
    return describe_hf(config, {})


def verdicts(architecture: str) -> dict[str, Verdict]:
    return OF_ALL | FIELDS[architecture]


def declared(architecture: str) -> dict[str, Any]:
    """The fields of the class and their defaults."""
    return {field.name: field.default for field in dataclasses.fields(CLASSES[architecture])}


def cases(kind: type[Any]) -> list[tuple[str, str]]:
    return [(a, name) for a in CLASSES for name, verdict in verdicts(a).items() if isinstance(verdict, kind)]


def reads(module: Any) -> set[str]:
    found = {a or b for a, b in _READS.findall(inspect.getsource(module))}
    return {name for name in found if name not in NO_FIELDS}


def test_every_family_is_looked_at() -> None:
    assert FAMILIES.keys() == CLASSES.keys() == FIELDS.keys()


@pytest.mark.parametrize("architecture", CLASSES)
def test_every_declared_field_has_its_verdict(architecture: str) -> None:
    fields, known = declared(architecture).keys(), verdicts(architecture).keys()
    assert fields - known == set(), "fields of transformers' class that nobody has looked at"
    assert known - fields == set(), "fields that the class does not have"


@pytest.mark.parametrize("architecture", CLASSES)
def test_every_field_that_its_code_reads_has_its_verdict(architecture: str) -> None:
    package = CLASSES[architecture].__module__.rpartition(".configuration_")
    module = importlib.import_module(f"{package[0]}.modeling_{package[2]}")
    assert reads(module) - verdicts(architecture).keys() - READ_BESIDE.keys() == set()


def test_every_field_of_the_wrapper_has_its_verdict() -> None:
    fields = {field.name for field in dataclasses.fields(Kimi_K25Config)}
    assert fields - {"text_config", *OF_WRAPPER, *OF_ALL} == set()
    wrapped = {"model_type": "kimi_k25", "text_config": base("deepseek_v3")}
    for name, verdict in OF_WRAPPER.items():
        assert isinstance(verdict, NoMatter)
        assert described(wrapped | {name: verdict.value}) == described(wrapped), name


@pytest.mark.parametrize("module", SHARED_CODE, ids=lambda module: module.__name__)
def test_every_field_that_shared_code_reads_has_its_verdict(module: Any) -> None:
    assert reads(module) - OF_ALL.keys() - READ_BESIDE.keys() == set()


@pytest.mark.parametrize(("architecture", "name"), cases(Followed))
def test_what_is_followed_makes_another_model(architecture: str, name: str) -> None:
    verdict, config = verdicts(architecture)[name], base(architecture)
    assert isinstance(verdict, Followed)
    if isinstance(verdict, Required):
        with pytest.raises(ModelFileError, match=f"the field {name} is missing"):
            described({field: value for field, value in config.items() if field != name})
    config |= verdict.beside
    assert described(config | {name: verdict.value}) != described(config), name


@pytest.mark.parametrize(("architecture", "name"), cases(Followed))
def test_where_a_file_is_silent_the_class_speaks(architecture: str, name: str) -> None:
    if isinstance(verdicts(architecture)[name], Required):
        return
    config, default = base(architecture), declared(architecture)[name]
    # Defaults of large models, which a tiny one could not have.
    config |= {"vocab_size": 300_000, "num_attention_heads": 32, "num_hidden_layers": 40}
    config |= {"hidden_size": 2048} | (
        {"num_key_value_heads": 32} if FAMILIES[architecture].is_latent else {}
    )
    config |= {"use_sliding_window": True} if FAMILIES[architecture].window_switch else {}
    config |= {"n_routed_experts": 64, "n_group": 8, "topk_group": 4} if architecture != "deepseek_v2" else {}
    config |= {field: 64 for field in ("num_experts", "num_local_experts") if field in config}
    silent = {field: value for field, value in config.items() if field != name}
    assert described(silent) == described(config | {name: default}), (name, default)


@pytest.mark.parametrize(("architecture", "name"), cases(Refused))
def test_what_is_refused_is_named(architecture: str, name: str) -> None:
    verdict, config = verdicts(architecture)[name], base(architecture)
    assert isinstance(verdict, Refused)
    with pytest.raises(FirstlightError, match=name):
        described(config | {name: verdict.value})
    config.pop(name, None)
    described(config)


@pytest.mark.parametrize(("architecture", "name"), cases(NoMatter))
def test_what_is_of_no_matter_changes_nothing(architecture: str, name: str) -> None:
    verdict, config = verdicts(architecture)[name], base(architecture)
    assert isinstance(verdict, NoMatter)
    assert verdict.value is not None
    assert described(config | {name: verdict.value}) == described(config)


@pytest.mark.parametrize(
    "name", [name for name, verdict in READ_BESIDE.items() if isinstance(verdict, Refused)]
)
@pytest.mark.parametrize("architecture", CLASSES)
def test_what_no_class_declares_is_refused_where_it_is_not_followed(architecture: str, name: str) -> None:
    verdict, config = READ_BESIDE[name], base(architecture)
    assert isinstance(verdict, Refused)
    if name in FIELDS[architecture] or (name == "partial_rotary_factor" and architecture == "minimax_m2"):
        assert isinstance(FIELDS[architecture].get(name, Followed(0)), Followed)
        return
    with pytest.raises(FirstlightError, match=name):
        described(config | {name: verdict.value, "use_sliding_window": True})


def test_mistral_with_layer_types_is_what_transformers_calls_ministral() -> None:
    mistral, ministral = declared("mistral"), dataclasses.fields(MinistralConfig)
    assert {field.name: field.default for field in ministral} == mistral | {"layer_types": None}
    config = base("mistral") | {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]}
    assert described(config) == described(config | {"model_type": "ministral"})
