"""A new drafter for a target: its sizes, its draft vocabulary, and weights that start near the target's own.

The head begins as the target's rows, the last state passes through, and the layer's own outputs begin at
zero. Invariant: only settings and data decide what is made, not the run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace

from firstlight.base.errors import UsageError
from firstlight.drafter.first_weights import fit_first_weights
from firstlight.drafter.prompts import TRAIN
from firstlight.drafter.shards import read_contract, read_shard, read_wanted
from firstlight.drafter.target import Ends, Target
from firstlight.drafter.train_settings import HEADS, LATENT
from firstlight.facts.hf.hf_rope import yarn_scale
from firstlight.models.eagle3 import DrafterConfig, Eagle3Drafter
from firstlight.models.eagle3_file import load_eagle3
from firstlight.models.eagle3_latent import make_drafter

if TYPE_CHECKING:
    from firstlight.drafter.train_settings import TrainSettings
from collections.abc import Iterable

INITIAL_SCALE = 0.02
MIN_POSITIONS = 2048
HEADS_OF_A_KEY = 8  # in drafters of targets with latent attention
MAX_CONTROL_TOKENS = 64


@dataclass(frozen=True)
class Made:
    """A drafter that has not learned yet, and what is to be said of its vocabulary."""

    drafter: Eagle3Drafter
    numbers: dict[str, Any]


def first_drafter(target: Target, ends: Ends, shards: list[Path], settings: TrainSettings) -> Made:
    """The drafter that training starts with: a new one, or that of the folder `init_from`."""
    if not settings.init_from:
        return new_drafter(target, ends, shards, settings)
    loaded = load_eagle3(Path(settings.init_from), target.checkpoint.description, ends.embedding)
    drafter = loaded.drafter.float()
    layers = read_contract(shards[0]).layers
    if drafter.config.state_layers != layers:
        raise UsageError(
            f"{settings.init_from} takes the states {list(drafter.config.state_layers)}, and captured are "
            f"{list(layers)}.",
            "Capture its layers (--layer), or start from another drafter.",
        )
    counts, held_out = _count(shards, len(ends.embedding))
    num_new = renew_vocabulary(drafter, ends, counts, tokens_to_keep(target))
    return Made(drafter, _numbers(drafter, counts, held_out) | {"new_in_vocabulary": num_new})


def renew_vocabulary(
    drafter: Eagle3Drafter,
    ends: Ends,
    counts_V: torch.Tensor,
    always: set[int],
) -> int:
    """Puts tokens that the data has in the place of those that it lacks; returns how many.

    The vocabulary keeps its size. A token that stays keeps its row of the head. A new one gets the target's
    row, turned as training has turned the head's rows (least squares over all that were held).
    """
    held, order = drafter.target_ids_R.sort()
    # Half an occurrence: a held token gives way to one that was seen, and never to another unseen one.
    half = torch.full((len(held),), 0.5, dtype=torch.float64)
    ids = build_vocabulary(counts_V.double().index_add(0, held, half), len(held), always)
    stays = torch.isin(ids, held)
    num_new = int((~stays).sum())
    if num_new:
        trained_RH = drafter.lm_head.weight.detach()[order]
        rows_RH = ends.head[held]
        square = (rows_RH.t() @ rows_RH).double()
        square += torch.diag(1e-6 * square.diagonal())
        turn_HH = torch.linalg.solve(square, (rows_RH.t() @ trained_RH).double()).float()
        with torch.no_grad():
            drafter.lm_head.weight.copy_(ends.head[ids] @ turn_HH)
            drafter.lm_head.weight[stays] = trained_RH[torch.searchsorted(held, ids[stays])]
            drafter.target_ids_R.copy_(ids)
    return num_new


def new_drafter(target: Target, ends: Ends, shards: list[Path], settings: TrainSettings) -> Made:
    """Makes the drafter from what the first shards hold. Raises `UsageError` where nothing is supervised."""
    first = read_shard(shards[0])
    counts, held_out = _count(shards, len(ends.embedding))
    if not int(counts.sum()):
        raise UsageError(
            "No token of the captured answers is supervised, so there is nothing to learn.",
            "Check that generate made answers, and that its chat template is the target's.",
        )
    ids = build_vocabulary(counts, min(settings.draft_vocab_size, len(counts)), tokens_to_keep(target))
    config = drafter_config(target, first.contract.layers, len(ids), settings.attention)
    drafter = make_drafter(config, ends.embedding)
    drafter.target_ids_R.copy_(ids)
    initialise(drafter, ends)
    if drafter.config.hidden_size == drafter.config.target_hidden_size:
        fit_first_weights(drafter, ends, shards, target.checkpoint.description.norm_eps)
    return Made(drafter, _numbers(drafter, counts, held_out))


def _numbers(drafter: Eagle3Drafter, counts: torch.Tensor, held_out: torch.Tensor) -> dict[str, Any]:
    ids = drafter.target_ids_R
    return {
        "size": len(ids),
        "distinct_tokens_seen": int((counts > 0).sum()),
        "supervised_tokens": int(counts.sum()),
        "coverage_train": round(coverage(counts, ids), 6),
        "coverage_held_out": round(coverage(held_out, ids), 6),
        "parameters": sum(parameter.numel() for parameter in drafter.parameters()),
    }


def initialise(drafter: Eagle3Drafter, ends: Ends) -> None:
    """Weights from which training starts well: the head is the target's, fc hands on the last state."""
    config = drafter.config
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=INITIAL_SCALE)
            elif not name.startswith("norm."):
                parameter.fill_(1.0)
        drafter.o_proj.weight.zero_()
        drafter.down_proj.weight.zero_()
        if config.hidden_size == config.target_hidden_size:
            drafter.fc.weight.zero_()
            drafter.fc.weight[:, -config.hidden_size :] = torch.eye(config.hidden_size)
            drafter.lm_head.weight.copy_(ends.head[drafter.target_ids_R])
            drafter.norm.weight.copy_(ends.norm)


def drafter_config(
    target: Target, layers: tuple[int, ...], draft_vocab_size: int, attention: str = HEADS
) -> DrafterConfig:
    """A drafter with the sizes of one of the target's own layers, and no norm that an engine may lack.

    In heads for a target with latent attention: of the size of its values that do not turn, 8 to a key.
    Raises `UsageError` where latents are asked for and the target has none.
    """
    d = target.checkpoint.description
    num_kv_heads, head_size, rope_scaling = d.num_kv_heads, d.head_size, d.rope_scaling
    of_latents: dict[str, Any] = {}
    if attention == LATENT:
        if d.latent is None:
            raise UsageError(
                f"{target.record.name} has no latent attention whose sizes a drafter could have.",
                f"Train with --attention {HEADS}.",
            )
        of_latents = {"latent": d.latent, "score_scale": d.score_scale}
    elif d.latent is not None:
        head_size = d.latent.nope_size
        num_kv_heads = math.gcd(d.num_heads, max(1, d.num_heads // HEADS_OF_A_KEY))
        if rope_scaling.kind == "yarn":
            # Of attention in heads engines assume this factor, whatever the file says.
            rope_scaling = replace(rope_scaling, turn_factor=yarn_scale(rope_scaling.factor, 1.0))
    return DrafterConfig(
        hidden_size=d.hidden_size,
        target_hidden_size=d.hidden_size,
        num_heads=d.num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        intermediate_size=d.intermediate_size,
        vocab_size=d.vocab_size,
        draft_vocab_size=draft_vocab_size,
        max_position=max(d.max_position, MIN_POSITIONS),
        norm_eps=d.norm_eps,
        rope_theta=d.rope_theta,
        rope_scaling=rope_scaling,
        state_layers=layers,
        **of_latents,
    )


def _count(shards: list[Path], vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How often each token is to be predicted, in documents to train on and in the others."""
    counts = torch.zeros(2, vocab_size, dtype=torch.int64)
    for path in shards:
        for document, wanted in read_wanted(path):
            counts[int(document.split != TRAIN)] += torch.bincount(wanted.long(), minlength=vocab_size)
    return counts[0], counts[1]


# The draft vocabulary: the tokens that the target's answers use most. Ids ascend and none occurs twice; end
# tokens, control tokens and single digits are always among them.


def build_vocabulary(counts_V: torch.Tensor, size: int, always: Iterable[int]) -> torch.Tensor:
    """Target ids int64 [size], ascending: `always`, then the most frequent, then the lowest of the rest."""
    vocab_size = len(counts_V)
    if not 0 < size <= vocab_size:
        raise UsageError(
            f"A draft vocabulary of {size} does not fit a target with {vocab_size} tokens.",
            f"Give a number from 1 to {vocab_size}.",
        )
    ranks = counts_V.double()
    # Of equally frequent tokens the lower id, which a tokenizer that merges pairs learned earlier.
    ranks -= torch.arange(vocab_size) / (2 * vocab_size)
    ranks[torch.tensor(sorted(set(always)), dtype=torch.int64)] = float("inf")
    return ranks.topk(size).indices.sort().values


def tokens_to_keep(target: Target) -> set[int]:
    """End tokens, the first control tokens, and the tokens of single digits."""
    keep = set(target.checkpoint.description.eos_token_ids)
    for digit in "0123456789":
        ids = target.text.encode(digit, add_special_tokens=False)
        if len(ids) == 1:
            keep.add(ids[0])
    rendered = (
        target.text.render_chat([{"role": "user", "content": "1"}]) if target.text.has_chat_template else ""
    )
    keep |= set(target.text.encode(rendered, add_special_tokens=False)[:MAX_CONTROL_TOKENS])
    return keep


def coverage(counts_V: torch.Tensor, ids_R: torch.Tensor) -> float:
    """The share of counted tokens that the draft vocabulary has."""
    total = float(counts_V.sum())
    return float(counts_V[ids_R].sum()) / total if total else 0.0
