"""What decides a training, and what only limits a run of it.

Invariant: two runs with equal settings and data give the same drafter, whatever their limits (with
`max_minutes`: on equally quick machines).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from firstlight.base.errors import UsageError
from firstlight.drafter.checkpoints import Point, Progress
from firstlight.drafter.draft_loss import CROSS_ENTROPY, require_loss

Say = Callable[[str], None]
LOWEST_SHARE = 0.05  # of the learning rate, at the end
FLOAT32, BFLOAT16 = "float32", "bfloat16"
HEADS, LATENT = "heads", "latent"


class TrainSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How it is trained. `num_steps` drafts are unrolled; `rows_per_step` rows make an optimiser step.

    `max_minutes` of training end it early, with a learning rate that falls in time; 0 is no such end.
    `init_from`: folder of a drafter to start from. `dtype`: of the products; weights stay float32.
    `attention`: of the drafter's layer, in heads or over latents like its target's.
    """

    draft_vocab_size: int = 8192
    num_steps: int = 3
    step_decay: float = 0.8
    loss: str = CROSS_ENTROPY
    epochs: int = 4
    row_tokens: int = 512
    rows_per_step: int = 2
    learning_rate: float = 1e-3
    warmup_share: float = 0.04
    max_minutes: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.5
    init_from: str = ""
    dtype: str = FLOAT32
    attention: str = HEADS
    seed: int = 0


def require_known(settings: TrainSettings) -> None:
    """Raises `UsageError` for a loss, a type or an attention that is not there."""
    if settings.attention not in (HEADS, LATENT):
        raise UsageError(
            f"There are no drafters with {settings.attention!r} for attention.",
            f"Give --attention {HEADS} or {LATENT}.",
        )
    require_loss(settings.loss)
    if settings.dtype not in (FLOAT32, BFLOAT16):
        raise UsageError(
            f"Training computes in {FLOAT32} or {BFLOAT16}, not in {settings.dtype!r}.",
            f"Give --dtype {FLOAT32}.",
        )


def require_device(device: str) -> None:
    """Raises `UsageError` for a device that is not known, or not here."""
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"Nothing trains on a device {device!r}.", "Give --device cpu or cuda.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            f"--device {device}: PyTorch finds no GPU.",
            "Give --device cpu, or install a CUDA build of PyTorch where nvidia-smi lists one.",
        )


def silent(text: str) -> None:
    """Says nothing: for ranks after the first, and for tests."""


@dataclass
class Limits:
    """What may end a run early, where it runs, and how often it writes; none of it changes the result."""

    max_optimizer_steps: int | None = None
    checkpoint_every_s: float = 300.0
    report_every_steps: int = 10
    validate_every_rows: int = 256
    max_validation_rows: int = 24
    device: str = "cpu"
    num_ranks: int = 1
    tensorboard: bool = False
    say: Say = silent


def epochs_done(progress: Progress) -> float:
    """Epochs, with the share of the one that runs."""
    rows = progress.row / progress.num_rows if progress.num_rows else 0.0
    return progress.epoch + (progress.shard + rows) / max(len(progress.shards), 1)


def share_done(settings: TrainSettings, progress: Progress) -> float:
    """How much of training is behind, 0 to 1: of its epochs or of its minutes, whichever end first."""
    by_time = progress.seconds / (60 * settings.max_minutes) if settings.max_minutes else 0.0
    return min(1.0, max(epochs_done(progress) / settings.epochs, by_time))


def learning_rate(settings: TrainSettings, progress: Progress) -> float:
    """Warm-up, then a cosine down to a twentieth."""
    done = share_done(settings, progress)
    warm = min(1.0, done / settings.warmup_share) if settings.warmup_share else 1.0
    cosine = LOWEST_SHARE + (1 - LOWEST_SHARE) * 0.5 * (1 + math.cos(math.pi * done))
    return settings.learning_rate * warm * cosine


def describe(point: Point, progress: Progress, settings: TrainSettings) -> str:
    """A point in one line."""
    accuracy = " ".join(f"{100 * value:.1f}" for value in point.accuracy)
    rate = progress.tokens / max(progress.seconds, 1e-9)
    share = share_done(settings, progress)
    left_s = progress.seconds / max(share, 1e-9) * (1 - share)
    return (
        f"step {point.step}, epoch {point.epoch:.2f} of {settings.epochs}: loss {point.loss:.3f}, accuracy "
        f"{accuracy} %, acceptance length {point.acceptance_length:.2f} (k = {settings.num_steps}), "
        f"{rate:.0f} supervised tokens a second, {left_s / 60:.0f} min left"
    )
