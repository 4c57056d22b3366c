"""A tied head that is there as a tensor: compared with the embedding, and used where it differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from firstlight.base.errors import ModelFileError
from firstlight.drafter.target import open_target, read_ends
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.facts.planning.outline import open_outline
from firstlight.loading import ties
from firstlight.loading.ties import EMBEDDING, HEAD, settle_ties
from support.byte_text import byte_tokenizer
from support.checkpoints import random_weights, tiny_description, write_hf_folder
from support.engines import Harness
from support.transformers_models import difference, logits_of

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tied model, whose head is stored too and differs in its last value."""
    description = tiny_description(tie_embeddings=True)
    made = write_hf_folder(tmp_path / "m", description, random_weights(description))
    with_head(made, lambda head: head[-1, -1].add_(8.0))
    return made


def with_head(folder: Path, change) -> None:  # type: ignore[no-untyped-def]
    path = folder / "model.safetensors"
    tensors = load_file(path)
    head = tensors[EMBEDDING].clone()
    change(head)
    save_file({**tensors, HEAD: head}, path, metadata={"format": "pt"})


def test_a_different_head_is_used_as_transformers_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ties, "PIECE_BYTES", 1000)  # the difference is in the last of several
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = logits_of(theirs, TOKENS)
    ours = Harness(folder)
    assert difference(ours.logits_of(TOKENS), expected) < 1e-4
    (note,) = ours.started.report["checkpoint_notes"]
    assert "lm_head.weight is not model.embed_tokens.weight" in note
    assert not ours.started.checkpoint.description.tie_embeddings
    assert any("loaded too if it differs" in note for note in open_outline(str(folder)).notes)


def test_an_equal_head_is_not_loaded_twice(tmp_path: Path) -> None:
    description = tiny_description(tie_embeddings=True)
    folder = write_hf_folder(tmp_path / "m", description, random_weights(description))
    with_head(folder, lambda head: None)
    checkpoint = settle_ties(open_checkpoint(folder))
    assert checkpoint.description.tie_embeddings
    assert checkpoint.notes == ()
    assert Harness(folder).started.report["checkpoint_notes"] == []


def test_a_head_of_another_type_counts_as_another(tmp_path: Path) -> None:
    description = tiny_description(tie_embeddings=True)
    folder = write_hf_folder(tmp_path / "m", description, random_weights(description))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, HEAD: tensors[EMBEDDING].to(torch.bfloat16)}, path, metadata={"format": "pt"})
    assert not settle_ties(open_checkpoint(folder)).description.tie_embeddings


def test_a_model_that_says_untied_is_left_alone(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False}))
    checkpoint = open_checkpoint(folder)
    assert settle_ties(checkpoint) is checkpoint


def test_a_drafter_is_made_for_the_head_that_is_served(folder: Path) -> None:
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    ends = read_ends(open_target(folder).checkpoint)
    assert not torch.equal(ends.embedding, ends.head)


def test_a_file_that_went_away_is_named(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"model\.safetensors cannot be read"):
        settle_ties(checkpoint)
