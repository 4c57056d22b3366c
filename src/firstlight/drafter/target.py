"""The target of a drafter: opened once, named by the content of its files, with the weights that training
uses.

Invariant: the rows handed out are those of the checkpoint, in float32, whatever layout the engine serves them
in.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from firstlight.base.files import sha256_of
from firstlight.drafter.stages import TargetRecord
from firstlight.facts.checkpoint.checkpoint import Checkpoint, open_checkpoint
from firstlight.loading.plan import Wanted
from firstlight.loading.reader import read_tensors
from firstlight.loading.ties import settle_ties
from firstlight.quant.registry import dequantize
from firstlight.quant.weight import Weight
from firstlight.text.model import TextModel

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"


@dataclass(frozen=True)
class Target:
    """An opened model: its headers, its text side, and what names it."""

    path: Path
    checkpoint: Checkpoint
    text: TextModel
    record: TargetRecord


@dataclass(frozen=True)
class Ends:
    """The two ends of the target, float32: embedding [V, H], final norm [H], head [V, H]."""

    embedding: torch.Tensor
    norm: torch.Tensor
    head: torch.Tensor


def open_target(path: Path) -> Target:
    """Opens a model and hashes its weights: a second for each gigabyte."""
    checkpoint = settle_ties(open_checkpoint(path))
    text = TextModel.load(path)
    files = sorted({path for facts in checkpoint.tensors.values() for path in facts.paths})
    weights = hashlib.sha256("".join(sha256_of(Path(file)) for file in files).encode()).hexdigest()
    record = TargetRecord(
        name=path.name,
        weights_sha256=weights,
        tokenizer_sha256=hashlib.sha256(text.tokenizer_json().encode()).hexdigest(),
        chat_template_sha256=hashlib.sha256((text.chat_template or "").encode()).hexdigest(),
    )
    return Target(path, checkpoint, text, record)


def read_ends(checkpoint: Checkpoint) -> Ends:
    """Embedding, final norm and head of a checkpoint; a tied head is the embedding itself."""
    description = checkpoint.description
    shape = (description.vocab_size, description.hidden_size)
    names = [EMBEDDING] if description.tie_embeddings else [EMBEDDING, HEAD]
    wanted = [Wanted.whole(name, shape) for name in names]
    wanted.append(Wanted.whole(NORM, (description.hidden_size,)))
    found: dict[str, torch.Tensor] = {}

    def take(wanted: Wanted, weight: Weight) -> None:
        found[wanted.name] = dequantize(weight).float()

    # Only these: the reader would ask for the rest of the model.
    part = {name: facts for name, facts in checkpoint.tensors.items() if name in {w.name for w in wanted}}
    read_tensors(replace(checkpoint, tensors=part), wanted, take)
    return Ends(found[EMBEDDING], found[NORM], found.get(HEAD, found[EMBEDDING]))
