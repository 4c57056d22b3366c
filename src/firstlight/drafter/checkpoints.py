"""Where training stands: weights, optimiser and data position in one file that appears whole or not at all.

Invariant: training that goes on from a checkpoint sees the rows that it has not seen, in the order that it
would have seen them.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from firstlight.base.errors import ModelFileError
from firstlight.loading.tensor_file import read_metadata, read_tensor_file, write_tensor_file
from firstlight.models.eagle3 import DrafterConfig, Eagle3Drafter
from firstlight.models.eagle3_latent import make_drafter

STATE = "state"
_FIRST, _SECOND = "exp_avg", "exp_avg_sq"


class Point(msgspec.Struct, kw_only=True):
    """One point of the curves."""

    step: int
    epoch: float
    loss: float
    accuracy: list[float]  # of each draft, over the full vocabulary
    acceptance_length: float
    learning_rate: float = 0.0
    tokens: int = 0  # supervised, since the last point


class Progress(msgspec.Struct, kw_only=True):
    """Where training stands: `row` of the `num_rows` rows of shard number `shard` of this epoch are done."""

    step: int = 0
    epoch: int = 0
    shard: int = 0
    row: int = 0
    num_rows: int = 0
    shards: list[str] = []  # of this epoch, in its order
    tokens: int = 0  # supervised tokens so far
    seconds: float = 0.0
    training: list[Point] = []
    validation: list[Point] = []


class _State(msgspec.Struct, kw_only=True):
    config: DrafterConfig
    progress: Progress


def save_checkpoint(
    path: Path, drafter: Eagle3Drafter, optimizer: torch.optim.AdamW, progress: Progress
) -> None:
    """Writes everything that training needs to go on, and that evaluation and export need of the drafter."""
    tensors = {f"model.{name}": values for name, values in drafter.state_dict().items()}
    tensors["target_ids"] = drafter.target_ids_R
    for name, parameter in drafter.named_parameters():
        moments = optimizer.state.get(parameter, {})
        for kind in (_FIRST, _SECOND):
            if kind in moments:
                tensors[f"{kind}.{name}"] = moments[kind]
    tensors = {name: values.cpu() for name, values in tensors.items()}
    state = _State(config=drafter.config, progress=progress)
    write_tensor_file(path, tensors, {STATE: msgspec.json.encode(state).decode()})


def load_drafter(path: Path, embedding_VH: torch.Tensor) -> tuple[Eagle3Drafter, Progress]:
    """The drafter of a checkpoint, and how far it was trained."""
    tensors = read_tensor_file(path)
    try:
        state = msgspec.json.decode(read_metadata(path).get(STATE, ""), type=_State)
        drafter = make_drafter(state.config, embedding_VH)
        drafter.load_state_dict(
            {
                name.removeprefix("model."): value
                for name, value in tensors.items()
                if name.startswith("model.")
            }
        )
    except (msgspec.DecodeError, RuntimeError) as error:
        raise ModelFileError(
            f"{path} is not a checkpoint of this training: {error}", "Remove it to train from the start."
        ) from error
    drafter.target_ids_R.copy_(tensors["target_ids"])
    return drafter, state.progress


def load_optimizer(path: Path, drafter: Eagle3Drafter, optimizer: torch.optim.AdamW, step: int) -> None:
    """Gives the optimiser the moments of a checkpoint."""
    tensors = read_tensor_file(path)
    for name, parameter in drafter.named_parameters():
        if f"{_FIRST}.{name}" in tensors:
            optimizer.state[parameter] = {
                "step": torch.tensor(float(step), device=parameter.device),
                _FIRST: tensors[f"{_FIRST}.{name}"].to(parameter.device, copy=True),
                _SECOND: tensors[f"{_SECOND}.{name}"].to(parameter.device, copy=True),
            }
