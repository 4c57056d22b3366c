"""Drafter checkpoints of three dialects, and what is wrong with a file, by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from firstlight.base.errors import FirstlightError, ModelFileError, UnsupportedError
from firstlight.facts.description import ModelDescription
from firstlight.models.eagle3 import Eagle3Drafter
from firstlight.models.eagle3_file import load_eagle3, save_eagle3
from support.checkpoints import tiny_description
from support.drafters import LATENT, random_drafter

TARGET: ModelDescription = tiny_description(hidden_size=32, num_layers=8, head_size=8, vocab_size=64)
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]


@pytest.fixture
def drafter() -> Eagle3Drafter:
    return random_drafter(state_layers=(2, 4, 6))


@pytest.fixture
def folder(tmp_path: Path, drafter: Eagle3Drafter) -> Path:
    save_eagle3(tmp_path / "drafter", drafter, torch.float32)
    return tmp_path / "drafter"


def embedding() -> torch.Tensor:
    return torch.ones(TARGET.vocab_size, TARGET.hidden_size)


def change(folder: Path, edit: Callable[[Config, Tensors], None]) -> Path:
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    edit(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: values.contiguous() for name, values in tensors.items()}, folder / "model.safetensors")
    return folder


def rename(tensors: Tensors, old: str, new: str) -> None:
    for name in list(tensors):
        if name.startswith(old):
            tensors[new + name.removeprefix(old)] = tensors.pop(name)


def as_speculators(config: Config, tensors: Tensors) -> None:
    rename(tensors, "midlayer.", "layers.0.")
    outer = {name: config.pop(name) for name in ("draft_vocab_size", LAYER_IDS)}
    inner = dict(config)
    config.clear()
    config.update(
        outer,
        architectures=["Eagle3Speculator"],
        speculators_model_type="eagle3",
        transformer_layer_config=inner,
    )


def as_model_optimizer(config: Config, tensors: Tensors) -> None:
    rename(tensors, "midlayer.", "layers.0.")
    tensors.pop("t2d")
    ids = config.pop(LAYER_IDS)
    names = ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm")
    switches = dict.fromkeys(names, True)
    config["eagle_config"] = {LAYER_IDS: [layer - 1 for layer in ids], **switches}


def as_specforge(config: Config, tensors: Tensors) -> None:
    ids = config.pop(LAYER_IDS)
    config["eagle_config"] = {LAYER_IDS: [layer - 1 for layer in ids]}
    tensors["embed_tokens.weight"] = embedding()


def keep(config: Config, tensors: Tensors) -> None:
    """The raw dialect as we write it."""


def equal(first: Eagle3Drafter, second: Eagle3Drafter) -> bool:
    pairs = zip(first.named_parameters(), second.named_parameters(), strict=True)
    return all(a[0] == b[0] and a[1].equal(b[1]) for a, b in pairs)


@pytest.mark.parametrize(
    ("edit", "dialect", "residual"),
    [
        (keep, "raw", False),
        (as_specforge, "raw", False),
        (as_speculators, "speculators", True),
        (as_model_optimizer, "Model-Optimizer", False),
    ],
)
def test_three_dialects_say_the_same(
    folder: Path,
    drafter: Eagle3Drafter,
    edit: Callable[[Config, Tensors], None],
    dialect: str,
    residual: bool,
) -> None:
    loaded = load_eagle3(change(folder, edit), TARGET, embedding())
    assert loaded.dialect == dialect
    assert loaded.drafter.config.state_layers == (2, 4, 6)
    assert loaded.drafter.config.norm_before_residual is residual
    assert equal(loaded.drafter, drafter)
    assert loaded.drafter.target_ids_R.equal(drafter.target_ids_R)
    assert loaded.drafter.embedding_VH.equal(embedding())
    assert any(note.startswith("layers:") for note in loaded.notes)


def test_layers_that_are_the_default_are_not_moved(folder: Path) -> None:
    """SGLang's rule: ids in eagle_config that are already counted as blocks that have run."""

    def edit(config: Config, tensors: Tensors) -> None:
        config.pop(LAYER_IDS)
        config["eagle_config"] = {LAYER_IDS: [2, 4, 5]}

    assert load_eagle3(change(folder, edit), TARGET, embedding()).drafter.config.state_layers == (2, 4, 5)


def test_a_file_that_names_no_layers_gets_the_default_and_a_note(folder: Path) -> None:
    loaded = load_eagle3(change(folder, lambda config, _: config.pop(LAYER_IDS)), TARGET, embedding())
    assert loaded.drafter.config.state_layers == (2, 4, 5)
    assert "the file names no layers" in " ".join(loaded.notes)


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
def test_flags_and_their_tensors_come_back(tmp_path: Path, flag: str) -> None:
    drafter = random_drafter(**{flag: True})
    save_eagle3(tmp_path, drafter, torch.float32)
    loaded = load_eagle3(tmp_path, TARGET, embedding())
    assert getattr(loaded.drafter.config, flag) is True
    assert equal(loaded.drafter, drafter)


def _d2t(place: int, value: int) -> Callable[[Config, Tensors], None]:
    def edit(config: Config, tensors: Tensors) -> None:
        tensors["d2t"][place] = value

    return edit


FAULTS: dict[str, tuple[Callable[[Config, Tensors], Any], type[FirstlightError], str]] = {
    "unknown tensor": (
        lambda c, t: t.update({"midlayer.extra.weight": torch.ones(2)}),
        ModelFileError,
        r"model\.safetensors: the tensor extra\.weight has no place here.*norm flag",
    ),
    "missing tensor": (
        lambda c, t: t.pop("midlayer.mlp.up_proj.weight"),
        ModelFileError,
        r"the tensor up_proj\.weight is missing",
    ),
    "EAGLE of the first generation": (
        lambda c, t: t.pop("fc.weight"),
        ModelFileError,
        "an EAGLE drafter of another generation",
    ),
    "another hidden size of the target": (
        lambda c, t: t.update({"fc.weight": torch.ones(32, 3 * 48)}),
        ModelFileError,
        "the tensor fc.weight is .*trained for a target of another hidden size",
    ),
    "another number of states": (
        lambda c, t: c.update({LAYER_IDS: [2, 4]}),
        ModelFileError,
        "fc.weight.*another number of states",
    ),
    "head and draft vocabulary": (
        lambda c, t: t.update({"lm_head.weight": torch.ones(21, 32)}),
        ModelFileError,
        "lm_head.weight.*draft_vocab_size",
    ),
    "another vocabulary": (
        lambda c, t: c.update(vocab_size=70),
        ModelFileError,
        "vocab_size is 70, and the target has 64 tokens",
    ),
    "d2t out of range": (_d2t(19, 60), ModelFileError, r"d2t\[19\] leads to the token 79.*absolute ids"),
    "d2t twice the same": (_d2t(1, -1), ModelFileError, "maps two draft tokens to the same token"),
    "d2t missing": (lambda c, t: t.pop("d2t"), ModelFileError, "d2t is missing"),
    "t2d of other tokens": (
        lambda c, t: t.update({"t2d": torch.roll(t["t2d"], 1)}),
        ModelFileError,
        "t2d does not mark the tokens",
    ),
    "layers of another model": (
        lambda c, t: c.update({LAYER_IDS: [2, 30, 58]}),
        ModelFileError,
        "do not fit a target with 8 blocks",
    ),
    "layers that contradict each other": (
        lambda c, t: c.update({LAYER_IDS: [2, 4, 5], "eagle_config": {LAYER_IDS: [2, 4, 6]}}),
        ModelFileError,
        "are .2, 4, 5. at the top level and .2, 4, 6. in eagle_config",
    ),
    "another algorithm": (
        lambda c, t: c.update(architectures=["EagleLlamaForCausalLM"]),
        UnsupportedError,
        "EagleLlamaForCausalLM is no EAGLE-3 drafter",
    ),
    "latent attention without its sizes": (
        lambda c, t: c.update(architectures=["Eagle3DeepseekV2ForCausalLM"]),
        ModelFileError,
        "kv_lora_rank is missing",
    ),
    "a weight that is no number": (
        lambda c, t: t["fc.weight"].view(-1).__setitem__(7, torch.nan),
        ModelFileError,
        "fc.weight has values that are not finite",
    ),
    "two layers": (lambda c, t: c.update(num_hidden_layers=2), UnsupportedError, "has 2 layers"),
}


def test_a_drafter_with_latent_attention_comes_back(tmp_path: Path) -> None:
    drafter = random_drafter(**LATENT)
    save_eagle3(tmp_path, drafter, torch.float32)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Eagle3DeepseekV2ForCausalLM"]
    loaded = load_eagle3(tmp_path, TARGET, embedding()).drafter
    assert loaded.config.score_scale == pytest.approx(drafter.config.score_scale)
    assert loaded.config.latent == drafter.config.latent
    assert loaded.config.rope_scaling == drafter.config.rope_scaling
    for name, parameter in drafter.named_parameters():
        assert torch.equal(dict(loaded.named_parameters())[name], parameter), name
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "midlayer.self_attn.kv_a_proj_with_mqa.weight" in names


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_file_is_named_with_its_cause(folder: Path, fault: str) -> None:
    edit, kind, words = FAULTS[fault]
    with pytest.raises(kind, match=words) as caught:
        load_eagle3(change(folder, edit), TARGET, embedding())
    assert str(folder) in str(caught.value)
    assert caught.value.hint


def test_a_truncated_file_and_a_pickle_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(ModelFileError, match="truncated"):
        load_eagle3(folder, TARGET, embedding())
    path.rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match="only pytorch_model.bin, which is a pickle"):
        load_eagle3(folder, TARGET, embedding())
