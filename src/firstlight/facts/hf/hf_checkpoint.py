"""A Hugging Face folder (config.json and safetensors) as a `Checkpoint`.

Pickle files are never opened. Invariant: every tensor that the index names was found in its shard, with a
supported type.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from firstlight.base.errors import ModelFileError, UnsupportedError
from firstlight.facts.checkpoint.fields import read_json_object
from firstlight.facts.checkpoint.formats import SUPPORTED
from firstlight.facts.checkpoint.names import is_behind_last_layer, is_ignorable, text_name
from firstlight.facts.checkpoint.packings import PACKINGS, Module, StoredTensor
from firstlight.facts.checkpoint.quantization import Quantization, read_quantization
from firstlight.facts.checkpoint.remedies import DOWNLOAD_AGAIN, GIVE_MODEL
from firstlight.facts.checkpoint.safetensors_header import SafetensorsEntry, read_safetensors_header
from firstlight.facts.checkpoint.tensor_facts import Checkpoint, TensorFacts
from firstlight.facts.description import ModelDescription
from firstlight.facts.hf.hf_config import WRAPPERS, describe_hf
from firstlight.facts.hf.hf_ends import with_tokenizers_ends
from firstlight.facts.planning.memory_budget import format_bytes

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
PICKLE_INDEX = ".bin.index.json"
_NO_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "scaler.pt")
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MODELOPT_FILE = "hf_quant_config.json"
# A module with one of these, or with a `weight` of one of these types, is quantised.
_CODES = ("weight_packed", "qweight")
_CODE_TYPES = ("F8_E4M3", "I8", "U8")
# What such a module may have beside its codes.
_COMPANIONS = (
    *("weight", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale"),
    *("weight_zero_point", "weight_shape", "weight_g_idx", "scales", "qzeros", "g_idx"),
    *("input_scale", "input_global_scale", "input_zero_point"),
)
# Scales of a quantised KV cache: keys and values are held as `--kv-dtype` says.
_OF_KV = ("k_scale", "v_scale", "q_scale")


def pickle_refused(path: Path) -> ModelFileError:
    """The error for a pickle checkpoint, with the reason."""
    return ModelFileError(
        f"{path} is a pickle checkpoint. Loading a pickle runs whatever code its author put into it, so it "
        "is refused.",
        "Use the safetensors files of the model, or convert it once in a place you trust: load it with "
        "transformers and save_pretrained it.",
    )


def open_hf(folder: Path) -> Checkpoint:
    """Opens a folder with config.json and safetensors; nothing but headers is read."""
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise _not_a_model(folder)
    _refuse_pickles(folder)
    config = read_json_object(config_path)
    generation_path = folder / "generation_config.json"
    generation: dict[str, Any] = read_json_object(generation_path) if generation_path.is_file() else {}
    description = with_tokenizers_ends(describe_hf(config, generation, str(config_path)), folder)
    stored: dict[str, StoredTensor] = {}
    skipped = _Skipped(config, description)
    for path, expected in find_shards(folder).items():
        entries = read_safetensors_header(path)
        missing = expected - entries.keys()
        if missing:
            raise ModelFileError(
                f"{path}: the tensor {min(missing)} is missing, though {INDEX_FILE} says it is here "
                f"({len(missing)} missing in all).",
                "Download the shard and the index again.",
            )
        for entry in entries.values():
            name = skipped.name_of(entry)
            if name is not None:
                _add(stored, StoredTensor(name, str(path), entry))
    tensors = _tensors(stored, _quantization(config, folder), description.tie_embeddings)
    return Checkpoint(str(folder), "safetensors", description, tensors, generation, skipped.notes())


_FURTHER = "the prediction of further tokens (MTP)"


class _Skipped:
    """Tensors that are no part of the language model, counted by the part that they belong to."""

    def __init__(self, config: dict[str, Any], description: ModelDescription) -> None:
        self._is_wrapped = config.get("model_type") in WRAPPERS
        self._num_layers = description.num_layers
        text = config["text_config"] if self._is_wrapped else config
        self._predicts_further = bool(text.get("num_nextn_predict_layers"))
        self._parts: dict[str, tuple[int, int]] = {}  # number of tensors, bytes

    def name_of(self, entry: SafetensorsEntry) -> str | None:
        """The tensor's name in the language model; None for one that is skipped."""
        name = text_name(entry.name) if self._is_wrapped else entry.name
        part = "images"
        if name is not None and self._predicts_further and is_behind_last_layer(name, self._num_layers):
            name, part = None, _FURTHER
        if name is None:
            num, nbytes = self._parts.get(part, (0, 0))
            self._parts[part] = (num + 1, nbytes + entry.nbytes)
        return name

    def notes(self) -> tuple[str, ...]:
        return tuple(
            f"skipped {num} tensors ({format_bytes(nbytes)}) for {part}: "
            + ("drafts come from a --drafter" if part == _FURTHER else "only text is served")
            for part, (num, nbytes) in self._parts.items()
        )


def _refuse_pickles(folder: Path) -> None:
    """Said first: whoever has only pickles cannot be helped by a remark about a field of config.json."""
    if any(folder.glob("*.safetensors")) or (folder / INDEX_FILE).exists():
        return
    if pickles := _pickles(folder):
        raise pickle_refused(pickles[0])


def _pickles(folder: Path) -> list[Path]:
    """Pickled weights, or the index of some; not what a training leaves beside them."""
    return sorted(
        path
        for path in folder.iterdir()
        if (path.suffix in PICKLE_SUFFIXES or path.name.endswith(PICKLE_INDEX))
        and path.name not in _NO_WEIGHTS
    )


def _add(stored: dict[str, StoredTensor], tensor: StoredTensor) -> None:
    if tensor.name in stored:
        raise ModelFileError(
            f"{tensor.path}: the tensor {tensor.entry.name} is also in {stored[tensor.name].path}.",
            DOWNLOAD_AGAIN,
        )
    stored[tensor.name] = tensor


def _quantization(config: dict[str, Any], folder: Path) -> Quantization | None:
    """Where it stands in one of three places: config.json, its part about text, modelopt's own file."""
    text = config.get("text_config")
    for values in (config, text if isinstance(text, dict) else {}):
        found = values.get("quantization_config")
        if isinstance(found, dict) and found:
            return read_quantization(found, str(folder / "config.json"))
    path = folder / MODELOPT_FILE
    return read_quantization(read_json_object(path), str(path)) if path.is_file() else None


def _tensors(
    stored: dict[str, StoredTensor], quantization: Quantization | None, tied: bool
) -> dict[str, TensorFacts]:
    """The model's tensors: those of one piece, and those that are stored in several."""
    joined, used = join_parts(stored, quantization)
    if quantization is not None and not joined:
        quantization.require_readable()
    tensors = {facts.name: facts for facts in joined}
    for name, tensor in stored.items():
        entry = tensor.entry
        if name in used or (entry.dtype not in SUPPORTED and is_ignorable(name, tied)):
            continue
        if entry.dtype not in SUPPORTED:
            raise UnsupportedError(
                f"{tensor.path}: the tensor {entry.name} has the type {entry.dtype}, which is not supported.",
                "Use safetensors in bf16, fp16 or fp32, or a GGUF file of the same model.",
            )
        tensors[name] = TensorFacts(name, entry.dtype, entry.shape, tensor.path, entry.offset, entry.nbytes)
    return tensors


def find_shards(folder: Path) -> dict[Path, set[str]]:
    """The safetensors files of the model, each with the tensors that must be in it."""
    if (folder / SINGLE_FILE).is_file():
        return {folder / SINGLE_FILE: set()}
    if (folder / INDEX_FILE).is_file():
        return _indexed_shards(folder)
    found = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if len(found) == 1 and "-of-" not in found[0].name:
        return {found[0]: set()}
    if found:
        raise ModelFileError(
            f"{folder} has {len(found)} safetensors files ({found[0].name}, ...) but no {INDEX_FILE}.",
            f"Download {INDEX_FILE} and all shards it names.",
        )
    raise ModelFileError(
        f"{folder} has a config.json but no safetensors files.", "Download the weights of the model too."
    )


def _indexed_shards(folder: Path) -> dict[Path, set[str]]:
    index_path = folder / INDEX_FILE
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{index_path}: the field weight_map is missing or empty.", DOWNLOAD_AGAIN)
    shards: dict[Path, set[str]] = {}
    for name, shard in weight_map.items():
        is_plain = isinstance(shard, str) and Path(shard).name == shard and shard.endswith(".safetensors")
        if not is_plain:
            raise ModelFileError(
                f"{index_path}: {str(shard)[:200]!r} is not the name of a shard in this folder.",
                DOWNLOAD_AGAIN,
            )
        shards.setdefault(folder / shard, set()).add(name)
    missing = sorted(path.name for path in shards if not path.is_file())
    if missing:
        raise ModelFileError(
            f"{folder}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing[:5])}"
            f"{', ...' if len(missing) > 5 else ''}.",
            "Download the missing files.",
        )
    return dict(sorted(shards.items()))


def _not_a_model(folder: Path) -> ModelFileError:
    names = sorted(path.name for path in folder.iterdir())
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs:
        return ModelFileError(
            f"{folder} has no config.json, but it holds GGUF files.", f"Give the file: {folder / ggufs[0]}"
        )
    if pickles := _pickles(folder):
        return pickle_refused(pickles[0])
    return ModelFileError(
        f"{folder} is not a model: it has no config.json.",
        GIVE_MODEL,
    )


# Finds the quantised modules of a checkpoint among its stored tensors, and joins each to one matrix. A
# tensor belongs to a joined matrix, or stays what it is; none is lost without a word.


def join_parts(
    stored: Mapping[str, StoredTensor], quantization: Quantization | None
) -> tuple[list[TensorFacts], set[str]]:
    """The matrices that are stored in several tensors, and the names of the tensors that are used up so.

    Raises `UnsupportedError` with module and scheme for one that cannot be read.
    """
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        module, _, word = name.rpartition(".")
        if word in _CODES or (word == "weight" and tensor.entry.dtype in _CODE_TYPES):
            modules[module] = {}
    used = {name for name in stored if name.rpartition(".")[2] in _OF_KV}
    for name, tensor in stored.items():
        module, _, word = name.rpartition(".")
        if module in modules and word in (*_CODES, *_COMPANIONS):
            modules[module][word] = tensor
            used.add(name)
    return [_joined(name, tensors, quantization) for name, tensors in modules.items()], used


def _joined(name: str, tensors: Mapping[str, StoredTensor], quantization: Quantization | None) -> TensorFacts:
    first = next(tensors[word] for word in (*_CODES, "weight") if word in tensors)
    if quantization is None:
        raise UnsupportedError(
            f"{first.path}: the tensor {first.entry.name} has the type {first.entry.dtype}, and config.json "
            "has no quantization_config that says what it means.",
            "Download config.json again, or use safetensors in bf16, fp16 or fp32, or a GGUF file.",
        )
    stored_name = first.entry.name.rpartition(".")[0]
    module = Module(name, stored_name, quantization.scheme_of(name, stored_name), tensors)
    shape, parts = PACKINGS[module.scheme.packing](module)
    return TensorFacts(
        f"{name}.weight",
        module.scheme.format,
        shape,
        parts[0].path,
        parts[0].offset,
        sum(part.nbytes for part in parts),
        parts=parts,
        scheme=module.scheme,
    )
