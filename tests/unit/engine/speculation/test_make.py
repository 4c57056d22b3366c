"""What `--drafter` names is read, or the start ends with an error that says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from firstlight.base.config import EngineSection
from firstlight.base.errors import FirstlightError
from firstlight.engine.speculation.draft_model_load import DraftModelDrafting
from firstlight.engine.speculation.make import read_drafting
from firstlight.facts.checkpoint.checkpoint import Checkpoint, open_checkpoint
from firstlight.loading.tensor_file import read_tensor_file, write_tensor_file
from support.eagle3 import write_pair

Break = Callable[[Path], object]
USAGE, FILE, UNSUPPORTED = 2, 3, 4


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    return write_pair(tmp_path)


def read(target: Path, drafter: str | None, **section: int) -> object:
    checkpoint: Checkpoint = open_checkpoint(target)
    return read_drafting(EngineSection(drafter=drafter, **section), checkpoint)


def config(folder: Path, **changes: object) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **changes}))


def tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    found = {**read_tensor_file(path), **{name.replace("__", "."): value for name, value in changes.items()}}
    write_tensor_file(path, {name: value for name, value in found.items() if value is not None}, {})


BROKEN: dict[str, tuple[Break, int, str]] = {
    "an older EAGLE": (
        lambda f: config(f, architectures=["LlamaForCausalLMEagle"]),
        UNSUPPORTED,
        "no EAGLE-3",
    ),
    "latent attention without its sizes": (
        lambda f: config(f, architectures=["Eagle3DeepseekV2ForCausalLM"]),
        FILE,
        "kv_lora_rank is missing",
    ),
    "another vocabulary": (lambda f: config(f, vocab_size=97), FILE, "trained for another model"),
    "another width": (lambda f: config(f, hidden_size=48, head_dim=12), FILE, "48 wide and the target 64"),
    "layers that are not there": (
        lambda f: config(f, eagle_aux_hidden_state_layer_ids=[1, 2, 9]),
        FILE,
        "do not fit a target with 4 blocks",
    ),
    "a tensor is missing": (lambda f: tensors(f, fc__weight=None), FILE, "fc.weight is missing"),
    "a tensor too many": (
        lambda f: tensors(f, extra__weight=torch.ones(2)),
        FILE,
        "extra.weight has no place",
    ),
    "a wrong shape": (lambda f: tensors(f, fc__weight=torch.ones(64, 64)), FILE, "fc.weight is"),
    "absolute ids": (lambda f: tensors(f, d2t=torch.arange(56, 96)), FILE, "outside of the 96"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), FILE, "holds no safetensors file"),
    "no config": (lambda f: (f / "config.json").unlink(), FILE, "has no config.json"),
    "half a file": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:500]),
        FILE,
        "model.safetensors",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_drafter_that_cannot_be_served_ends_the_start(folders: tuple[Path, Path], case: str) -> None:
    spoil, code, words = BROKEN[case]
    spoil(folders[1])
    with pytest.raises(FirstlightError, match=words) as raised:
        read(folders[0], str(folders[1]))
    assert raised.value.exit_code == code
    assert raised.value.hint


@pytest.mark.parametrize(("name", "words"), [("ngrams", "there is no drafter"), ("./a/b", "no such folder")])
def test_what_is_not_there_is_a_usage_error(folders: tuple[Path, Path], name: str, words: str) -> None:
    with pytest.raises(FirstlightError, match=words) as raised:
        read(folders[0], name)
    assert raised.value.exit_code == USAGE
    assert "ngram" in raised.value.hint


def test_none_and_nothing_ask_for_no_drafts(folders: tuple[Path, Path]) -> None:
    assert read(folders[0], None) is None
    assert read(folders[0], "none") is None


@pytest.mark.parametrize(
    ("drafter", "top_k", "words"),
    [
        ("ngram", 4, "prompt lookup makes chains alone"),
        ("target", 4, "a draft model makes chains alone"),
        ("drafter", 41, "this drafter's vocabulary has 40 tokens"),
    ],
)
def test_trees_that_a_drafter_cannot_make(
    folders: tuple[Path, Path], drafter: str, top_k: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {"target": str(folders[0]), "drafter": str(folders[1])}.get(drafter, drafter)
    monkeypatch.setattr(DraftModelDrafting, "read", lambda path, target: DraftModelDrafting(target, target))
    with pytest.raises(FirstlightError, match=words) as caught:
        read(folders[0], named, draft_top_k=top_k)
    assert caught.value.exit_code == USAGE
    assert caught.value.hint
    read(folders[0], str(folders[1]), draft_top_k=40)
