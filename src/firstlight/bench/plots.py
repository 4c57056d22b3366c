"""Pictures of benchmarks, drawn with matplotlib (the extra `plots`), which is imported only when used.

Invariant: nothing is shown on a screen; a picture is a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firstlight.base.errors import ResourceError

Series = Sequence[tuple[float, float]]
_LEAST_LABELLED = 4.0  # of a stack: smaller parts have no room for a number


@dataclass(frozen=True)
class Panel:
    """One diagram: lines by name, each a list of points."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Series]
    is_log_x: bool = False


@dataclass(frozen=True)
class Bars:
    """One diagram: lying bars by name, the first on top. `goal` is drawn as a line across."""

    title: str
    x_label: str
    values: dict[str, float]
    goal: float | None = None


@dataclass(frozen=True)
class Stacks:
    """One diagram: lying bars by name, the first on top, each made of parts by name."""

    title: str
    x_label: str
    bars: Mapping[str, Mapping[str, float]]


def save_panels(path: Path, title: str, panels: Sequence[Panel | Bars | Stacks]) -> None:
    """Draws the panels beside and below each other into a PNG file."""
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    is_wide = any(isinstance(panel, Stacks) for panel in panels)
    figure = Figure(figsize=((8.0 if is_wide else 4.6) * columns, 3.4 * rows + 0.5), layout="constrained")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, panel in zip(axes.flat, panels, strict=False):
        axis.set_title(panel.title, fontsize=10)
        axis.set_xlabel(panel.x_label)
        axis.grid(alpha=0.3)
        if isinstance(panel, Bars):
            _draw_bars(axis, panel)
        elif isinstance(panel, Stacks):
            _draw_stacks(axis, panel)
        else:
            _draw_lines(axis, panel)
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise ResourceError(f"{path} cannot be written: {error.strerror}.", "Choose another path.") from error


def _draw_lines(axis: Any, panel: Panel) -> None:
    for name, points in panel.lines.items():
        axis.plot(
            [x for x, _ in points], [y for _, y in points], marker="o", markersize=3, label=name or None
        )
    axis.set_ylabel(panel.y_label)
    axis.set_ylim(bottom=0)
    if panel.is_log_x:
        axis.set_xscale("log", base=2)
    if any(panel.lines):
        axis.legend(fontsize=8)


def _draw_bars(axis: Any, panel: Bars) -> None:
    names = list(panel.values)
    bars = axis.barh(names, list(panel.values.values()))
    axis.bar_label(bars, fmt="%.3g", fontsize=8, padding=2)
    axis.invert_yaxis()
    if panel.goal is not None:
        axis.axvline(panel.goal, linestyle="--", color="black", linewidth=1)


def _draw_stacks(axis: Any, panel: Stacks) -> None:
    """A part has its colour in every bar; one that is nowhere has none."""
    names = list(panel.bars)
    parts = dict.fromkeys(part for bar in panel.bars.values() for part, size in bar.items() if size)
    ends = [0.0] * len(names)
    for part in parts:
        sizes = [panel.bars[name].get(part, 0.0) for name in names]
        drawn = axis.barh(names, sizes, left=ends, label=part)
        labels = [f"{size:.0f}" if size >= _LEAST_LABELLED else "" for size in sizes]
        axis.bar_label(drawn, labels, label_type="center", fontsize=8)
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    axis.invert_yaxis()
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
