"""Drafter checkpoints: a folder with config.json and safetensors, read strictly; and written, as our own.

Invariant: every tensor of the file is used, every parameter of the drafter comes from the file, and each has
the shape that the configuration demands; or an error names file, tensor and likely cause. Nothing is skipped
and nothing is left as it was initialised.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from firstlight.base.errors import ModelFileError
from firstlight.base.files import replacing
from firstlight.facts.checkpoint.drafter_config import DrafterFile, describe_drafter
from firstlight.facts.checkpoint.fields import read_json_object
from firstlight.facts.description import ModelDescription
from firstlight.loading.tensor_file import read_tensor_file, write_tensor_file
from firstlight.models.eagle3 import Eagle3Drafter
from firstlight.models.eagle3_config import drafter_config, file_name, raw_config
from firstlight.models.eagle3_latent import make_drafter

CONFIG, WEIGHTS = "config.json", "model.safetensors"
D2T, T2D, EMBEDDING = "d2t", "t2d", "embed_tokens.weight"
_PREFIX = re.compile(r"^(model\.)?(midlayer\.|layers\.0\.)?(self_attn\.|mlp\.)?")
_OTHER_TARGET = "Use a drafter that was trained for this very target."
_EXPORT_AGAIN = "Export the drafter again, or download its files again."


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter that is ready, and what is to be said of its file at the start."""

    drafter: Eagle3Drafter
    dialect: str
    notes: tuple[str, ...]


def load_eagle3(
    folder: Path,
    target: ModelDescription,
    embedding_VH: torch.Tensor,
) -> LoadedDrafter:
    """Reads a drafter for a target; `embedding_VH` is the target's, used where the file has none of its own.

    Raises `ModelFileError` or `UnsupportedError`.
    """
    config_path = folder / CONFIG
    described = describe_drafter(read_json_object(config_path), str(config_path), target)
    path = _weights_file(folder)
    tensors = _by_parameter(path, read_tensor_file(path))
    _require_finite(path, tensors)
    ids = _draft_ids(path, tensors, described)
    own = tensors.pop(EMBEDDING, None)
    if own is not None:
        _require_shape(path, EMBEDDING, own, (target.vocab_size, described.layer.hidden_size))
        embedding_VH = own.to(embedding_VH.dtype)
    elif described.layer.hidden_size != target.hidden_size:
        raise ModelFileError(
            f"{path}: the drafter is {described.layer.hidden_size} wide and the target "
            f"{target.hidden_size}, so it needs {EMBEDDING} of its own, which is missing.",
            _OTHER_TARGET,
        )
    drafter = make_drafter(drafter_config(described, target), embedding_VH, draws_weights=False)
    wanted = dict(drafter.named_parameters())
    _require_same_names(path, tensors, wanted, described)
    with torch.no_grad():
        for name, parameter in wanted.items():
            _require_shape(path, name, tensors[name], tuple(parameter.shape))
            parameter.copy_(tensors[name])
    drafter.target_ids_R.copy_(ids)
    notes = (
        f"dialect: {described.dialect}",
        f"layers: {described.layers_note}",
        f"embedding: {'of the file' if own is not None else 'of the target'}",
        *(f"{name}: {value}" for name, value in described.flags.items() if value),
    )
    return LoadedDrafter(drafter, described.dialect, notes)


def save_eagle3(folder: Path, drafter: Eagle3Drafter, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes a folder in the raw dialect, with layer ids at the top level (blocks that have run)."""
    ids = drafter.target_ids_R
    tensors = {file_name(name): p.detach().to(dtype) for name, p in drafter.named_parameters()}
    tensors[D2T] = ids - torch.arange(len(ids))
    t2d = torch.zeros(drafter.config.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    tensors[T2D] = t2d
    write_tensor_file(folder / WEIGHTS, tensors, {})
    with replacing(folder / CONFIG) as file:
        file.write(json.dumps(raw_config(drafter.config, dtype), indent=2).encode() + b"\n")


def _weights_file(folder: Path) -> Path:
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(path.name for path in found[:3])
        raise ModelFileError(f"{folder} holds several weight files ({names}).", "Keep one of them.")
    pickles = [path.name for path in folder.glob("*.bin")] + [path.name for path in folder.glob("*.pt")]
    only = f", only {pickles[0]}, which is a pickle" if pickles else ""
    remedy = "Convert it to safetensors." if pickles else "Download the drafter again, or give its folder."
    raise ModelFileError(f"The drafter {folder} holds no safetensors file{only}.", remedy)


def _by_parameter(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors by the names of our parameters; two that mean the same are an error."""
    named: dict[str, torch.Tensor] = {}
    for name, values in tensors.items():
        short = _PREFIX.sub("", name)
        if short in named:
            raise ModelFileError(f"{path}: {name} is there twice, under two names.", _EXPORT_AGAIN)
        named[short] = values
    return named


def _require_finite(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    for name, values in tensors.items():
        if values.is_floating_point() and not bool(torch.isfinite(values).all()):
            raise ModelFileError(
                f"{path}: {name} has values that are not finite: it is damaged, or its training failed.",
                _EXPORT_AGAIN,
            )


def _draft_ids(path: Path, tensors: dict[str, torch.Tensor], described: DrafterFile) -> torch.Tensor:
    """The target's id of each draft id, from the offsets in d2t; checked against t2d where that is there."""
    num, vocab_size = described.draft_vocab_size, described.layer.vocab_size
    offsets, t2d = tensors.pop(D2T, None), tensors.pop(T2D, None)
    if offsets is None:
        if num == vocab_size:
            return torch.arange(num)
        raise ModelFileError(
            f"{path}: {D2T} is missing, and without it the {num} draft tokens mean nothing.", _EXPORT_AGAIN
        )
    _require_shape(path, D2T, offsets, (num,))
    ids = offsets.long() + torch.arange(num)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        wrong = int(((ids < 0) | (ids >= vocab_size)).nonzero()[0])
        raise ModelFileError(
            f"{path}: {D2T}[{wrong}] leads to the token {int(ids[wrong])}, outside of the {vocab_size}; "
            "it may hold absolute ids where offsets are expected.",
            _EXPORT_AGAIN,
        )
    if len(ids.unique()) != num:
        raise ModelFileError(f"{path}: {D2T} maps two draft tokens to the same token.", _EXPORT_AGAIN)
    marks = None if t2d is None else t2d.bool()
    if marks is not None and (len(marks) != vocab_size or int(marks.sum()) != num or not marks[ids].all()):
        raise ModelFileError(f"{path}: {T2D} does not mark the tokens that {D2T} names.", _EXPORT_AGAIN)
    return ids


def _require_same_names(
    path: Path, tensors: dict[str, torch.Tensor], wanted: dict[str, Any], described: DrafterFile
) -> None:
    missing, unknown = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing:
        other = "this is an EAGLE drafter of another generation"
        cause = other if "fc.weight" in missing else "the file is incomplete"
        raise ModelFileError(
            f"{path}: the tensor {missing[0]} is missing ({len(missing)} in all); {cause}, or a norm flag in "
            f"{CONFIG} is set that was not trained.",
            _EXPORT_AGAIN,
        )
    if unknown:
        raise ModelFileError(
            f"{path}: the tensor {unknown[0]} has no place here ({len(unknown)} in all); a norm flag "
            f"may be missing in {CONFIG} (found: {described.flags}), or it is another architecture.",
            f"Correct {CONFIG}, or export the drafter again.",
        )


def _require_shape(path: Path, name: str, values: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(values.shape) == shape:
        return
    cause = "it was trained for a target of another hidden size, or with another number of states"
    if name.startswith(("lm_head", D2T)):
        cause = "draft_vocab_size in config.json does not belong to these weights"
    elif name != "fc.weight":
        cause = "the sizes in config.json do not belong to these weights"
    raise ModelFileError(
        f"{path}: the tensor {name} is {list(values.shape)}, expected {list(shape)}: {cause}.", _OTHER_TARGET
    )
