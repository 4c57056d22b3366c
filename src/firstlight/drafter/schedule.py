"""How far training is, the learning rate that follows from it, and the line that tells it.

Called by `train`. Invariant: the learning rate follows from the settings and the checkpoint's progress.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from firstlight.drafter.checkpoints import Point, Progress

if TYPE_CHECKING:
    from firstlight.drafter.train_settings import TrainSettings

LOWEST_SHARE = 0.05  # of the learning rate, at the end


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
