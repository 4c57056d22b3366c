"""The rope section of a config.json, in its old and its new spelling, to `RopeScaling`.

Invariant: a kind of scaling that this version cannot follow is an error that names it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from firstlight.base.errors import ModelFileError, UnsupportedError
from firstlight.facts.checkpoint.fields import MAX_SIZE, Fields
from firstlight.facts.checkpoint.remedies import CHECK_CONFIG, OTHER_MODEL
from firstlight.facts.description import RopeScaling

_ORIGINAL = "original_max_position_embeddings"


def rope_fields(fields: Fields) -> Fields:
    """The rope section: `rope_parameters` (new), or `rope_scaling` (old); empty when neither is there.

    Of both, transformers takes the old one.
    """
    name = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    section = fields.mapping(name)
    if any(isinstance(value, Mapping) for value in section.values()):
        raise UnsupportedError(
            f"{fields.where}: {name} that differ from layer to layer are not supported.", OTHER_MODEL
        )
    return Fields(section, f"{fields.where}: {name}")


def rope_scaling(rope: Fields, fields: Fields) -> RopeScaling:
    """The scaling that a rope section asks for. `fields`: the whole configuration."""
    kind = rope.string("rope_type", rope.string("type", "default"))
    if kind in ("default", "none"):
        return RopeScaling()
    if kind == "linear":
        original = _original_positions(rope, fields)
        return RopeScaling(kind="linear", factor=rope.number("factor"), original_max_position=original)
    if kind == "llama3":
        return _llama3(rope, fields)
    if kind == "yarn":
        return _yarn(rope, fields)
    raise UnsupportedError(
        f"{rope.where}: rope_type {kind!r} is not supported.", "Supported: default, linear, llama3, yarn."
    )


def longest(scaling: RopeScaling, stated: int) -> int:
    """How many positions a model has whose file states so many: a scaling stretches the original ones.

    Files state either the original number (Qwen's recipe for yarn, linear scaling) or the stretched one
    (DeepSeek, Kimi). Llama 3's files always state the stretched one.
    """
    if scaling.kind not in ("linear", "yarn"):
        return stated
    return max(stated, round(min(scaling.original_max_position * scaling.factor, MAX_SIZE)))


def stated_positions(scaling: RopeScaling, max_position: int) -> int:
    """What a config.json states of so many positions: beside a linear scaling those before it."""
    return round(max_position / scaling.factor) if scaling.kind == "linear" else max_position


def yarn_score_factor(rope: Fields, scaling: RopeScaling) -> float:
    """What latent attention multiplies its scores with, beside head_size ** -0.5 (mscale_all_dim)."""
    all_dim = rope.number("mscale_all_dim", 0.0, above=-1.0)
    return yarn_scale(scaling.factor, all_dim) ** 2 if scaling.kind == "yarn" and all_dim else 1.0


def _llama3(rope: Fields, fields: Fields) -> RopeScaling:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise ModelFileError(
            f"{rope.where}: high_freq_factor ({high}) must be above low ({low}).", CHECK_CONFIG
        )
    return RopeScaling(
        kind="llama3",
        factor=rope.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=_original_positions(rope, fields),
    )


def _yarn(rope: Fields, fields: Fields) -> RopeScaling:
    original = _original_positions(rope, fields)
    factor = rope.number("factor", fields.integer("max_position_embeddings") / original)
    mscale, all_dim = (rope.number(name, 0.0, above=-1.0) for name in ("mscale", "mscale_all_dim"))
    turn_factor = yarn_scale(factor, 1.0)
    if mscale and all_dim:
        turn_factor = yarn_scale(factor, mscale) / yarn_scale(factor, all_dim)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.boolean("truncate", True),
        turn_factor=rope.number("attention_factor", turn_factor),
    )


def _original_positions(rope: Fields, fields: Fields) -> int:
    """Where it stands beside the section, as in Phi-3's files, transformers takes that."""
    stated = fields.integer("max_position_embeddings")
    return fields.integer(_ORIGINAL, rope.integer(_ORIGINAL, stated))


def yarn_scale(factor: float, mscale: float) -> float:
    """The size of yarn's correction: of rotated values where nothing else is said, with an `mscale` of 1."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
