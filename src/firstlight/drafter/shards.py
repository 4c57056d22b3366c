"""The files of captured hidden states, and the one contract that they carry.

Written by `capture`, read by `train`, `evaluate` and the gates. Index j of a document holds the states h_j of
the token x_j (the residual stream after so many blocks, before any norm) and the token x_{j+1}; it predicts
x_{j+2}. `final` is the last state of x_{j+1}: the target's final norm and head make of it what the drafter
should say. Invariant: what is read has the shapes, the finite numbers and the alignment that this module
promises.

Shapes: I indices of all documents of a shard, C captured states, H hidden, D documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from firstlight.base.errors import ModelFileError
from firstlight.drafter.int8_states import from_int8, to_int8
from firstlight.drafter.stages import require_recorded
from firstlight.loading.tensor_file import read_metadata, read_tensor_file, write_tensor_file

CONTRACT = "contract"
ALIGNMENT = "index j: states after k blocks of x_j before any norm, token x_{j+1}, predicts x_{j+2}"
BFLOAT16, INT8 = "bfloat16", "int8"
NO_TOKEN = -1  # predicted by the last index of a document
CAPTURE_AGAIN = "Remove this file and run the stage capture again: it makes only what is missing."


class Document(msgspec.Struct, kw_only=True, frozen=True):
    """One answered prompt of a shard: whose it is, and how many indices it has."""

    id: str
    family: str
    split: str
    num_indices: int


class Contract(msgspec.Struct, kw_only=True, frozen=True):
    """What a shard says of itself. `layers`, `final_layer`: blocks that have run when a state is taken."""

    layers: tuple[int, ...]
    final_layer: int
    hidden_size: int
    weights_sha256: str
    tokenizer_sha256: str
    chat_template_sha256: str
    documents: tuple[Document, ...]
    alignment: str = ALIGNMENT
    storage: str = BFLOAT16  # of `states`; they are bfloat16 when they are read
    convention: str = "k blocks have run; 0 is the embeddings"


@dataclass(frozen=True)
class Shard:
    """A file in memory: `states` bfloat16 [I, C, H], `final` bfloat16 [I, H], the rest [I].

    `wanted` is the token that the target would choose for x_{j+2}; `supervised`: x_{j+1} and x_{j+2} are its
    answer.
    """

    contract: Contract
    states: torch.Tensor
    final: torch.Tensor
    tokens: torch.Tensor
    predicted: torch.Tensor
    wanted: torch.Tensor
    supervised: torch.Tensor

    def spans(self) -> list[tuple[Document, slice]]:
        """The indices of each document."""
        spans, start = [], 0
        for document in self.contract.documents:
            spans.append((document, slice(start, start + document.num_indices)))
            start += document.num_indices
        return spans


_DTYPES = {
    "states": torch.bfloat16,
    "final": torch.bfloat16,
    "tokens": torch.int32,
    "predicted": torch.int32,
    "wanted": torch.int32,
    "supervised": torch.bool,
}


def write_shard(path: Path, shard: Shard) -> None:
    """Writes a file that appears whole or not at all."""
    tensors = {name: getattr(shard, name) for name in _DTYPES}
    if shard.contract.storage == INT8:
        tensors |= to_int8(tensors.pop("states"))
    write_tensor_file(path, tensors, {CONTRACT: msgspec.json.encode(shard.contract).decode()})


def read_shard(path: Path) -> Shard:
    """Reads and checks a file. Raises `ModelFileError` that says what is wrong with it."""
    try:
        tensors = read_tensor_file(path)  # a file that was cut short says so in its own words
    except ModelFileError as error:
        raise ModelFileError(str(error), CAPTURE_AGAIN) from error  # nobody published it
    require_recorded(path)
    contract = read_contract(path)
    if contract.storage == INT8:
        tensors["states"] = from_int8(tensors, path)
    num = sum(document.num_indices for document in contract.documents)
    shapes = {
        "states": (num, len(contract.layers), contract.hidden_size),
        "final": (num, contract.hidden_size),
    }
    for name, dtype in _DTYPES.items():
        found = tensors.get(name)
        shape = shapes.get(name, (num,))
        if found is None or found.dtype != dtype or tuple(found.shape) != shape:
            what = "is missing" if found is None else f"is {found.dtype} {tuple(found.shape)}"
            raise ModelFileError(
                f"{path}: the tensor {name} {what}; the contract says {dtype} {shape}.", CAPTURE_AGAIN
            )
    shard = Shard(contract, **{name: tensors[name] for name in _DTYPES})
    require_finite(shard, path)
    return shard


def read_wanted(path: Path) -> list[tuple[Document, torch.Tensor]]:
    """The supervised tokens of each document, without its states."""
    tensors = read_tensor_file(path, ("wanted", "supervised"))
    found, start = [], 0
    for document in read_contract(path).documents:
        span = slice(start, start + document.num_indices)
        found.append((document, tensors["wanted"][span][tensors["supervised"][span]]))
        start += document.num_indices
    return found


def read_contract(path: Path) -> Contract:
    """What a file says of itself, without its tensors. Raises `ModelFileError`."""
    try:
        return msgspec.json.decode(read_metadata(path).get(CONTRACT, ""), type=Contract)
    except msgspec.DecodeError as error:
        raise ModelFileError(f"{path} does not carry its contract: {error}.", CAPTURE_AGAIN) from error


def require_finite(shard: Shard, path: Path) -> None:
    """Raises `ModelFileError` where a state is not a number, or all are zero."""
    for name in ("states", "final"):
        values = getattr(shard, name)
        if not values.isfinite().all():
            raise ModelFileError(
                f"{path}: {name} holds values that are not finite, so the target's own pass went wrong.",
                "Check the target with firstlight run; if its answers are fine, add --cpu-kernels stock.",
            )
        if values.numel() and not values.any():
            raise ModelFileError(
                f"{path}: {name} is all zeros, so the states were never captured.", CAPTURE_AGAIN
            )
