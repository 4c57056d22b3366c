"""Drafters that differ from the given one in a single thing which engines and files are known to get wrong.

A variant that is more accurate than the checkpoint as it is configured shows what its configuration has
wrong, and one that gives the engine's drafts shows what the engine does. Invariant: a variant has the very
weights of the drafter, but for what it is about.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from firstlight.drafter.target import Ends
from firstlight.facts.description import RopeScaling
from firstlight.models.eagle3 import Eagle3Drafter
from firstlight.models.eagle3_latent import make_drafter

IDS_LOWER, IDS_HIGHER = "ids-lower", "ids-higher"
RESIDUAL, FEEDBACK, NORM_BEFORE_FC = "norm-before-residual", "feedback-norm", "norm-before-fc"
ROPE, EMBEDDING, HEAD = "rope", "embedding", "head"
NO_FC, NO_RESIDUAL, NO_NORM = "fc", "residual", "final-norm"


@dataclass(frozen=True)
class Variant:
    """`what` completes "with ...". `is_offline`: whether a file may mean it, so that accuracy is compared."""

    key: str
    what: str
    drafter: Eagle3Drafter
    is_offline: bool = True


def _without_fc(drafter: Eagle3Drafter) -> Eagle3Drafter:
    """Takes the late state as it is."""

    def fuse(states_TCH: torch.Tensor) -> torch.Tensor:
        return states_TCH[:, -1].to(drafter.fc.weight.dtype)

    drafter.fuse = fuse  # type: ignore[method-assign]
    return drafter


def _without_residual(drafter: Eagle3Drafter) -> Eagle3Drafter:
    """Adds nothing of the state to what attention gives."""
    whole = drafter.finish

    def finish(attended_TI: torch.Tensor, residual_TH: torch.Tensor) -> torch.Tensor:
        return whole(attended_TI, torch.zeros_like(residual_TH))

    drafter.finish = finish  # type: ignore[method-assign]
    return drafter


def _without_final_norm(drafter: Eagle3Drafter) -> Eagle3Drafter:
    """Gives the output to the head as it is."""

    def logits(output_TH: torch.Tensor) -> torch.Tensor:
        return drafter.lm_head(output_TH)

    drafter.logits = logits  # type: ignore[method-assign]
    return drafter


def config_variants(
    drafter: Eagle3Drafter, ends: Ends, num_layers: int, rope: RopeScaling
) -> Iterator[Variant]:
    """What a file may have said wrongly. `rope`: the scaling of the target."""
    config = drafter.config
    for key, step, word in ((IDS_LOWER, -1, "lower"), (IDS_HIGHER, 1, "higher")):
        layers = tuple(layer + step for layer in config.state_layers)
        if all(0 <= layer <= num_layers for layer in layers):
            yield Variant(key, f"all layer ids one {word} {list(layers)}", copy(drafter, state_layers=layers))
    flags = (
        (RESIDUAL, "norm_before_residual"),
        (FEEDBACK, "norm_output"),
        (NORM_BEFORE_FC, "norm_before_fc"),
    )
    for key, flag in flags:
        value = not getattr(config, flag)
        yield Variant(key, f"{flag} {str(value).lower()}", copy(drafter, **{flag: value}))
    for scaling, whose in ((rope, "the target's"), (RopeScaling(), "no")):
        if scaling != config.rope_scaling:
            yield Variant(ROPE, f"{whose} rotary scaling", copy(drafter, rope_scaling=scaling))
            break
    if not drafter.embedding_VH.equal(ends.embedding) and drafter.embedding_VH.shape == ends.embedding.shape:
        own = copy(drafter)
        own.embedding_VH = ends.embedding
        yield Variant(EMBEDDING, "the target's embedding in place of the file's", own)
    rows = ends.head[drafter.target_ids_R]
    if rows.shape == drafter.lm_head.weight.shape and not rows.equal(drafter.lm_head.weight):
        other = copy(drafter)
        with torch.no_grad():
            other.lm_head.weight.copy_(rows)
        yield Variant(HEAD, "the target's head in place of the drafter's", other)


def engine_variants(drafter: Eagle3Drafter) -> Iterator[Variant]:
    """What only an engine does."""
    config = drafter.config
    if config.hidden_size == config.target_hidden_size:
        yield Variant(NO_FC, "fc left out", _without_fc(copy(drafter)), is_offline=False)
    bare = _without_residual(copy(drafter))
    yield Variant(NO_RESIDUAL, "no residual around attention", bare, is_offline=False)
    yield Variant(NO_NORM, "no norm before the head", _without_final_norm(copy(drafter)), is_offline=False)


def copy(drafter: Eagle3Drafter, **changes: Any) -> Eagle3Drafter:
    """The same weights in another configuration; a norm that they lack has weights of 1."""
    made = make_drafter(msgspec.structs.replace(drafter.config, **changes), drafter.embedding_VH)
    wanted = made.state_dict()
    made.load_state_dict({**wanted, **{n: v for n, v in drafter.state_dict().items() if n in wanted}})
    made.target_ids_R.copy_(drafter.target_ids_R)
    return made
