"""Tensors of a folder that are no part of the language model: skipped and said so, or an error."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from firstlight.base.errors import ModelFileError
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.facts.checkpoint.names import text_name
from firstlight.facts.planning.memory_budget import format_bytes
from firstlight.facts.planning.outline import open_outline
from firstlight.loading.plan import Wanted, make_plan
from firstlight.models.random_model import declared_shapes
from support.experts import kimi, write_experts

MODEL = kimi(num_layers=2)


def add(folder: Path, config: dict[str, object], *names: str) -> Path:
    """More tensors of 8 bytes, and other fields."""
    tensors = load_file(folder / "model.safetensors") | {name: torch.zeros(2) for name in names}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def test_images_are_skipped(tmp_path: Path) -> None:
    folder = write_experts(tmp_path / "m", MODEL, wrapper="kimi_k25")
    add(folder, {}, "vision_tower.encoder.blocks.0.wqkv.weight", "mm_projector.proj.0.bias")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tensors.keys() == declared_shapes(MODEL).keys()
    assert checkpoint.notes == ("skipped 2 tensors (16 bytes) for images: only text is served",)


def test_layers_that_predict_further_tokens_are_skipped(tmp_path: Path) -> None:
    folder = write_experts(tmp_path / "m", MODEL)
    names = ("model.layers.2.eh_proj.weight", "model.layers.2.embed_tokens.weight")
    checkpoint = open_checkpoint(add(folder, {"num_nextn_predict_layers": 1}, *names))
    assert checkpoint.tensors.keys() == declared_shapes(MODEL).keys()
    (note,) = checkpoint.notes
    assert note == (
        "skipped 2 tensors (16 bytes) for the prediction of further tokens (MTP): "
        "drafts come from a --drafter"
    )
    planned = open_outline(str(folder))
    assert [note for note in planned.notes if "MTP" in note] == [
        "2 tensors (16 bytes) of layers that predict further tokens (MTP, num_nextn_predict_layers) are "
        "left out: not loaded"
    ]


def test_a_plan_from_a_config_alone_names_the_layer_that_is_left_out(tmp_path: Path) -> None:
    """DeepSeek-V3's: a layer as the last one, eh_proj, four norms, an embedding and a head, by hand."""
    folder = write_experts(tmp_path / "m", MODEL)
    (folder / "model.safetensors").unlink()
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    assert not [note for note in open_outline(str(folder)).notes if "MTP" in note]
    last = f"model.layers.{MODEL.num_layers - 1}."
    numbers = sum(math.prod(shape) for name, shape in declared_shapes(MODEL).items() if name.startswith(last))
    hidden = MODEL.hidden_size
    numbers += 2 * hidden * hidden + 3 * hidden + 2 * MODEL.vocab_size * hidden
    size = {"float32": 4, "bfloat16": 2, "float16": 2}[
        config.get("torch_dtype") or config.get("dtype", "float32")
    ]
    path.write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    (note,) = [note for note in open_outline(str(folder)).notes if "MTP" in note]
    assert note.startswith(f"about {format_bytes(numbers * size)} of layers that predict")


def test_other_tensors_are_an_error_as_ever(tmp_path: Path) -> None:
    """A layer too many, in a file that announces none; images in a model that is not wrapped."""
    folder = write_experts(tmp_path / "m", MODEL)
    checkpoint = open_checkpoint(add(folder, {}, "model.layers.2.x.weight", "vision_tower.x.weight"))
    wanted = [Wanted.whole(name, shape) for name, shape in declared_shapes(MODEL).items()]
    with pytest.raises(ModelFileError, match="2 tensors do not belong"):
        make_plan(checkpoint, wanted)


def test_names_of_a_wrapped_model() -> None:
    assert text_name("language_model.model.layers.3.mlp.gate.weight") == "model.layers.3.mlp.gate.weight"
    assert text_name("language_model.lm_head.weight") == "lm_head.weight"
    assert text_name("language_model.layers.3.mlp.gate.weight") == "model.layers.3.mlp.gate.weight"
    assert text_name("language_model.embed_tokens.weight") == "model.embed_tokens.weight"
    assert text_name("model.vision_tower.patch_embed.weight") is None
