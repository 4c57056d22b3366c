"""The sliding window of a config.json, and the layers that have it.

Called by `hf_config`. There are four fields, and each class of transformers reads other ones of them; where a
class reads none, its cache or another engine may. Invariant: a window is honoured in the very layers that it
is asked for, or refused by name.
"""

from __future__ import annotations

from typing import Any

from firstlight.base.errors import ModelFileError, UnsupportedError
from firstlight.facts.fields import Fields
from firstlight.facts.hf_families import EVERY_LAYER, LAYER_TYPES, NO_LAYERS, Family
from firstlight.facts.remedies import CHECK_CONFIG, OTHER_MODEL

_FULL, _SLIDING = "full_attention", "sliding_attention"


def windows(fields: Fields, family: Family, num_layers: int) -> dict[str, Any]:
    """`sliding_window` and `full_layers`, by the names of their fields in the description."""
    window = _window(fields, family)
    kinds = _layer_types(fields, num_layers)
    if family.windows == NO_LAYERS and window is not None:
        raise UnsupportedError(
            f"{fields.where}: sliding_window = {window} is not supported for this model type, whose "
            "layers see everything.",
            "Set sliding_window to null if that is meant.",
        )
    if kinds is None:
        kinds = _default_types(fields, family, window, num_layers)
    full = tuple(layer for layer, kind in enumerate(kinds) if kind == _FULL)
    if window is None and len(full) < num_layers:
        raise ModelFileError(
            f"{fields.where}: layer_types asks for a window in {num_layers - len(full)} of {num_layers} "
            "layers, and there is none (sliding_window, use_sliding_window).",
            CHECK_CONFIG,
        )
    if family.windows == EVERY_LAYER and window is not None and full:
        raise UnsupportedError(
            f"{fields.where}: layer_types with {len(full)} of {num_layers} layers that see everything is not "
            "supported for this model type, whose layers all have the window.",
            OTHER_MODEL,
        )
    if len(full) == num_layers:
        return {"sliding_window": None}
    return {"sliding_window": window, "full_layers": full}


def _window(fields: Fields, family: Family) -> int | None:
    is_on = fields.boolean("use_sliding_window", not family.window_switch)
    if family.windows == LAYER_TYPES and not family.window_switch:
        is_on = True  # Mistral knows no switch
    has_window = is_on and fields.values.get("sliding_window") is not None
    return fields.integer("sliding_window") if has_window else None


def _layer_types(fields: Fields, num_layers: int) -> list[str] | None:
    kinds = fields.values.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.error("layer_types", f"a list of {num_layers} kinds of layers")
    other = next((kind for kind in kinds if kind not in (_FULL, "attention", _SLIDING)), None)
    if other is not None:
        raise UnsupportedError(
            f"{fields.where}: layer_types with {str(other)[:80]!r} is not supported.",
            f"Supported: {_FULL} and {_SLIDING}.",
        )
    return [_FULL if kind == "attention" else kind for kind in kinds]  # the old name


def _default_types(fields: Fields, family: Family, window: int | None, num_layers: int) -> list[str]:
    first = 0 if window is not None else num_layers
    if window is not None and family.windows == LAYER_TYPES and family.window_switch:
        first = min(num_layers, fields.integer("max_window_layers", minimum=0))
    return [_FULL] * first + [_SLIDING] * (num_layers - first)
