"""What planning knows of a model: its description, its tensors in groups, and where both come from.

It comes from headers where there are files, from the configuration by rules where there are none, and from
descriptions that come with firstlight. No weight is read. Invariant: a tensor that is no part of the language
model is in no group, and `notes` say so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from firstlight.base.errors import ModelFileError, UsageError
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.facts.checkpoint.fields import read_json_object
from firstlight.facts.checkpoint.names import is_behind_last_layer, is_ignorable, text_name
from firstlight.facts.checkpoint.safetensors_header import read_safetensors_header
from firstlight.facts.checkpoint.weight_schemes import read_scheme
from firstlight.facts.description import ModelDescription
from firstlight.facts.hf.hf_checkpoint import find_shards
from firstlight.facts.hf.hf_config import WRAPPERS, describe_hf
from firstlight.facts.planning.declared import declared_rows, further_bytes
from firstlight.facts.planning.memory_budget import format_bytes
from firstlight.facts.planning.tensor_groups import (
    HeaderRow,
    NamedTensor,
    TensorGroup,
    group_rows,
    group_tensors,
)

_FOLDER = "built_in"
HEAD = "lm_head.weight"
_OF_FURTHER = "of layers that predict further tokens (MTP, num_nextn_predict_layers) are left out: not loaded"


@dataclass(frozen=True)
class Outline:
    """A model for planning. `num_files` is 0 where no file was read."""

    name: str
    description: ModelDescription
    groups: tuple[TensorGroup, ...]
    num_files: int
    notes: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """Of all tensors of the language model."""
        return sum(group.total_bytes for group in self.groups)

    @property
    def num_tensors(self) -> int:
        """Of the language model."""
        return sum(group.num for group in self.groups)


class BuiltIn(msgspec.Struct, frozen=True):
    """A description that comes with firstlight: config.json, and what the headers of its files say."""

    title: str
    num_files: int
    config: dict[str, Any]
    headers: tuple[HeaderRow, ...]


def built_in_names() -> list[str]:
    """The models that can be planned by name."""
    folder = resources.files("firstlight.facts") / _FOLDER
    return sorted(
        entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json")
    )


def read_built_in(name: str) -> BuiltIn:
    """One of `built_in_names`."""
    file = resources.files("firstlight.facts") / _FOLDER / f"{name}.json"
    return msgspec.json.decode(file.read_bytes(), type=BuiltIn)


def open_outline(model: str) -> Outline:
    """The outline of a built-in model, a folder, or a GGUF file.

    A folder needs a config.json; of its safetensors files only headers are read, and where they are not there
    sizes follow from the configuration. Raises `FirstlightError`s that say what to do.
    """
    path = Path(os.path.expanduser(model))
    if model in built_in_names() and not path.exists():
        return _built_in(model)
    if not path.exists():
        raise UsageError(
            f"{model!r} is neither a file, nor a folder, nor a model that firstlight knows by name.",
            f"Known by name: {', '.join(built_in_names())}. For a model of the hub, config.json is enough: "
            "hf download ORG/NAME config.json --local-dir FOLDER",
        )
    if path.is_dir() and (path / "config.json").is_file():
        return _folder(path)
    checkpoint = open_checkpoint(path)  # a GGUF file, or the error for what is neither
    tied = checkpoint.description.tie_embeddings
    tensors = [
        NamedTensor(facts.name, facts.format, facts.shape, facts.nbytes)
        for facts in checkpoint.tensors.values()
        if not is_ignorable(facts.name, tied)
    ]
    files = {facts.path for facts in checkpoint.tensors.values()}
    return Outline(
        str(path), checkpoint.description, tuple(group_tensors(tensors)), len(files), checkpoint.notes
    )


def _built_in(name: str) -> Outline:
    found = read_built_in(name)
    description = describe(found.config, name)
    rows, skipped = [], []
    for row in found.headers:
        named = text_name(row.name)
        if named is None:
            skipped.append(row)
        else:
            rows.append(HeaderRow(named, row.dtype, row.shape))
    notes = [f"{found.title}: from a description of its headers that comes with firstlight"]
    if skipped:
        notes.append(_skipped(sum(row.num for row in skipped), sum(row.num * row.nbytes for row in skipped)))
    return Outline(name, description, tuple(group_rows(rows)), found.num_files, tuple(notes))


def _folder(path: Path) -> Outline:
    where = str(path / "config.json")
    config = read_json_object(path / "config.json")
    description = describe(config, where)
    if not _has_weights(path):
        rows = declared_rows(description, read_scheme(config, where))
        note = "no safetensors files here: names and sizes of tensors follow from config.json"
        told: tuple[str, ...] = (note,)
        if num_further := _num_further(config):
            nbytes = further_bytes(description, read_scheme(config, where), num_further)
            told += (f"about {format_bytes(nbytes)} {_OF_FURTHER}",)
        return Outline(str(path), description, tuple(group_rows(rows)), 0, told)
    is_wrapped = config.get("model_type") in WRAPPERS
    shards = find_shards(path)
    skipped = _Skipped()
    entries = _entries(shards, description, skipped, is_wrapped=is_wrapped)
    groups = tuple(group_tensors(entries))
    notes: tuple[str, ...] = skipped.notes()
    if description.tie_embeddings and any(HEAD in read_safetensors_header(shard) for shard in shards):
        notes += (f"{HEAD} is there beside tie_word_embeddings: true; it is loaded too if it differs",)
    if not groups:
        raise ModelFileError(f"{path}: its safetensors files hold no tensor.", "Download the model again.")
    return Outline(str(path), description, groups, len(shards), notes)


@dataclass
class _Skipped:
    """Bytes of the tensors that are not loaded, by what they are."""

    others: list[int] = field(default_factory=list)
    further: list[int] = field(default_factory=list)  # of layers behind the last one

    def notes(self) -> tuple[str, ...]:
        notes = [_skipped(len(self.others), sum(self.others))] if self.others else []
        if self.further:
            notes.append(f"{len(self.further)} tensors ({format_bytes(sum(self.further))}) {_OF_FURTHER}")
        return tuple(notes)


def _num_further(config: Mapping[str, Any]) -> int:
    """Layers behind the last one that config.json speaks of; none where the field is no number."""
    text = config.get("text_config")
    found = (text if isinstance(text, Mapping) else config).get("num_nextn_predict_layers")
    return found if isinstance(found, int) and not isinstance(found, bool) else 0


def _entries(
    shards: Iterable[Path], description: ModelDescription, skipped: _Skipped, *, is_wrapped: bool
) -> Iterator[NamedTensor]:
    """Tensors of the language model; bytes of all others go to `skipped`."""
    for shard in shards:
        for entry in read_safetensors_header(shard).values():
            name = text_name(entry.name) if is_wrapped else entry.name
            if name is None:
                skipped.others.append(entry.nbytes)
            elif is_behind_last_layer(name, description.num_layers):
                skipped.further.append(entry.nbytes)
            elif not is_ignorable(name, description.tie_embeddings):
                yield NamedTensor(name, entry.dtype, entry.shape, entry.nbytes)


def describe(config: Mapping[str, Any], where: str) -> ModelDescription:
    """How weights are packed is in the headers, and changes nothing of the description."""
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    text = plain.get("text_config")
    if isinstance(text, Mapping):
        plain["text_config"] = {name: value for name, value in text.items() if name != "quantization_config"}
    return describe_hf(plain, {}, where)


def _has_weights(path: Path) -> bool:
    """Whether there are shards; an index alone has no shapes."""
    return any(path.glob("*.safetensors"))


def _skipped(num: int, nbytes: int) -> str:
    return f"{num} tensors ({format_bytes(nbytes)}) are no part of the language model and are not loaded"
