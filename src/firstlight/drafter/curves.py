"""The curves of a training: loss, accuracy of each draft and acceptance length, as JSON and as a picture.

Invariant: the JSON has every point; without matplotlib (the extra `plots`) only the picture is missing.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from firstlight.base.errors import UsageError
from firstlight.base.files import replacing
from firstlight.drafter.checkpoints import Point, Progress

CURVES, PICTURE = "curves.json", "curves.png"


def write_curves(folder: Path, progress: Progress, *, picture: bool = True) -> None:
    """Writes both files anew, or the JSON alone: a picture takes a second."""
    curves = {"training": progress.training, "validation": progress.validation}
    with replacing(folder / CURVES) as file:
        file.write(msgspec.json.format(msgspec.json.encode(curves), indent=1))
    if picture and progress.training and why_no_picture() is None:
        _draw(folder / PICTURE, progress)


def why_no_picture() -> str | None:
    """What is missing for it, and how to get it; None if nothing is."""
    if find_spec("matplotlib") is not None:
        return None
    return f"{PICTURE} is not drawn: matplotlib is missing. pip install 'firstlight[plots]' brings it."


class Board:
    """The same points as TensorBoard's files. Raises `UsageError` where its package is missing."""

    def __init__(self, folder: Path) -> None:
        if find_spec("tensorboard") is None:
            raise UsageError(
                "--tensorboard needs the package tensorboard, which is not installed.",
                "Run pip install 'firstlight[tensorboard]', or leave it out: there are curves anyway.",
            )
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def add(self, curve: str, point: Point) -> None:
        """Adds a point to the curves of `curve`, by its step."""
        values = {"loss": point.loss, "acceptance length": point.acceptance_length}
        values |= {f"accuracy of draft {i}": value for i, value in enumerate(point.accuracy, 1)}
        for name, value in values.items():
            self._writer.add_scalar(f"{name}/{curve}", value, point.step)
        self._writer.flush()


def _draw(path: Path, progress: Progress) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.8), layout="constrained")
    loss, accuracy, length = figure.subplots(1, 3)
    for name, points, style in (
        ("training", progress.training, "-"),
        ("held out", progress.validation, "o--"),
    ):
        if not points:
            continue
        steps = [point.step for point in points]
        loss.plot(steps, [point.loss for point in points], style, label=name)
        length.plot(steps, [point.acceptance_length for point in points], style, label=name)
        _draw_accuracy(accuracy, name, points, style)
    titles = (
        (loss, "loss of the first draft"),
        (accuracy, "accuracy, all tokens of the target"),
        (length, f"acceptance length (k = {len(progress.training[0].accuracy)})"),
    )
    for axis, title in titles:
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("optimiser step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=120)


def _draw_accuracy(axis: Any, name: str, points: list[Point], style: str) -> None:
    steps = [point.step for point in points]
    for place in range(len(points[0].accuracy)):
        values = [point.accuracy[place] for point in points]
        axis.plot(steps, values, style, label=f"draft {place + 1}, {name}")
