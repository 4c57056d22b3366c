"""config.json of an EAGLE-3 drafter, in any of its three dialects, to what its files mean.

The dialects: raw (SafeAILab, SpecForge, AQ-MedAI), speculators, and Model-Optimizer. They differ in where
sizes stand, in what an absent norm flag means, and in how layers are counted. Torch-free. Invariant: layers
leave here as the contract counts them (blocks that have run), with a note on what the file said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from firstlight.base.errors import ModelFileError, UnsupportedError
from firstlight.facts.checkpoint.fields import Fields
from firstlight.facts.checkpoint.remedies import OTHER_DRAFTER
from firstlight.facts.description import ModelDescription
from firstlight.facts.hf.hf_config import describe_hf

RAW, SPECULATORS, MODEL_OPTIMIZER = "raw", "speculators", "Model-Optimizer"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_EAGLE3 = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3DraftModel",
    "Eagle3Speculator",
    "Eagle3Qwen3ForCausalLM",
    "Qwen3Eagle3Model",
)
_LATENT_EAGLE3 = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Switches of Model-Optimizer's eagle_config, and the only value at which its layer is the one that is served.
_MODEL_OPTIMIZER_SWITCHES = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "has_lm_head": True,
    "use_mtp_layernorm": False,
}


class DrafterFile(msgspec.Struct, frozen=True, kw_only=True):
    """What config.json says. `layer`: sizes of the drafter's layer, `vocab_size` that of the target.

    `layers`: blocks that have run; empty where it is silent. `layers_note` says how they were understood.
    """

    dialect: str
    layer: ModelDescription
    draft_vocab_size: int
    layers: tuple[int, ...]
    layers_note: str
    flags: dict[str, bool]


def is_drafter(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a drafter over another model's states, of whatever kind."""
    names = [str(name).lower() for name in config.get("architectures") or []]
    keys = {
        "speculators_model_type",
        "transformer_layer_config",
        "eagle_config",
        "draft_vocab_size",
        LAYER_IDS,
    }
    return bool(keys & config.keys()) or any("eagle" in name or "speculator" in name for name in names)


def describe_drafter(config: Mapping[str, Any], where: str, target: ModelDescription) -> DrafterFile:
    """Reads the config.json of a drafter for a target. Raises errors that name field and cause."""
    fields = Fields(config, where, OTHER_DRAFTER)
    dialect = _dialect(config)
    _require_eagle3(fields, config)
    inner = fields.mapping("transformer_layer_config") if dialect == SPECULATORS else config
    flat = {**inner, "model_type": "llama"}
    if any(name in _LATENT_EAGLE3 for name in config.get("architectures") or []):
        # Its layer is a dense one, whatever the target's configuration that it was copied from says.
        flat |= {"model_type": "deepseek_v3", "n_routed_experts": None}
    flat.setdefault("max_position_embeddings", target.max_position)
    # Code of the publisher, which is not run; and windows, that often are the target's and its layers'.
    for name in ("auto_map", "layer_types", "sliding_window"):
        flat.pop(name, None)
    layer = describe_hf(flat, {}, where)
    if layer.num_layers != 1:
        raise UnsupportedError(
            f"{where}: the drafter has {layer.num_layers} layers.", "Use one with num_hidden_layers 1."
        )
    if layer.vocab_size != target.vocab_size:
        raise ModelFileError(
            f"{where}: vocab_size is {layer.vocab_size}, and the target has {target.vocab_size} tokens: it "
            "was trained for another model.",
            "Use a drafter of this very target.",
        )
    layers, note = _layers(config, dialect, target.num_layers, where)
    return DrafterFile(
        dialect=dialect,
        layer=layer,
        draft_vocab_size=fields.integer("draft_vocab_size", layer.vocab_size, maximum=layer.vocab_size),
        layers=layers,
        layers_note=note,
        flags=_flags(config, dialect, fields),
    )


def _dialect(config: Mapping[str, Any]) -> str:
    if "speculators_model_type" in config or "transformer_layer_config" in config:
        return SPECULATORS
    switches = config.get("eagle_config")
    if isinstance(switches, Mapping) and any(str(name).startswith(("use_", "has_")) for name in switches):
        return MODEL_OPTIMIZER if len(switches.keys() & _MODEL_OPTIMIZER_SWITCHES.keys()) > 1 else RAW
    return RAW


def _require_eagle3(fields: Fields, config: Mapping[str, Any]) -> None:
    names = config.get("architectures") or []
    kind = config.get("speculators_model_type", "eagle3")
    if kind == "eagle3" and (not names or any(name in _EAGLE3 + _LATENT_EAGLE3 for name in names)):
        return
    shown = ", ".join(map(str, names)) or str(kind)
    raise UnsupportedError(
        f"{fields.where}: {shown} is no EAGLE-3 drafter: it needs another algorithm, and ours "
        "would accept nothing.",
        f"Give a drafter whose architectures are one of {', '.join(_EAGLE3 + _LATENT_EAGLE3)}.",
    )


def _layers(
    config: Mapping[str, Any], dialect: str, num_layers: int, where: str
) -> tuple[tuple[int, ...], str]:
    default = (2, num_layers // 2, num_layers - 3)
    inside = config.get("eagle_config")
    nested = inside.get(LAYER_IDS) if isinstance(inside, Mapping) else None
    top = config.get(LAYER_IDS)
    ids = top if top is not None else nested
    if ids is None:
        return default, f"the file names no layers: {list(default)}, as blocks that have run, are assumed"
    is_list = isinstance(ids, list) and all(type(item) is int for item in ids)
    if not is_list or not ids:
        raise ModelFileError(f"{where}: {LAYER_IDS} must be a list of numbers, not {ids!r}.", OTHER_DRAFTER)
    if top is not None and nested is not None and nested not in (ids, [layer - 1 for layer in ids]):
        raise ModelFileError(
            f"{where}: {LAYER_IDS} are {ids} at the top level and {nested} in eagle_config.",
            "Keep the ids that it was trained with; in eagle_config they may also be each one lower.",
        )
    if top is not None:
        layers, said = tuple(ids), f"{ids} at the top level count blocks that have run"
    elif tuple(ids) == default:
        layers, said = tuple(ids), f"{ids} in eagle_config are the default of blocks that have run"
    else:
        layers = tuple(layer + 1 for layer in ids)
        said = f"{ids} in eagle_config name outputs of blocks, so {list(layers)} have run"
    if not all(0 <= layer <= num_layers for layer in layers):
        raise ModelFileError(
            f"{where}: {LAYER_IDS} {ids} do not fit a target with {num_layers} blocks: it was trained for "
            "another model.",
            "Use a drafter of this very target.",
        )
    return layers, said


def _flags(config: Mapping[str, Any], dialect: str, fields: Fields) -> dict[str, bool]:
    found = {name: fields.boolean(name, False) for name in _FLAGS}
    if dialect == SPECULATORS:
        found["norm_before_residual"] = fields.boolean("norm_before_residual", True)
    if dialect == MODEL_OPTIMIZER:
        switches = fields.mapping("eagle_config")
        for name, needed in _MODEL_OPTIMIZER_SWITCHES.items():
            if name in switches and switches[name] is not needed:
                raise UnsupportedError(
                    f"{fields.where}: eagle_config.{name} is {switches[name]}, and only {needed} is served.",
                    "Train or export the drafter with the usual EAGLE-3 layer.",
                )
    return found
