"""The picture of docs/performance.md: a panel a measure, ours beside the peers, the machine's limit as a
line.

Used by `__main__`; needs matplotlib (the extra `plots`). Invariant: colours are told apart by people who
see none of them: ours is the only dark bar, and every value is written out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peers.goals import best, limits, measures_taken, peers_measured
from peers.measures import LAUNCH, Measure
from peers.results import Results
from peers.settings import OURS

_OURS, _THEIRS, _LIMIT = "#0072B2", "#B8BEC4", "#D55E00"
_COLUMNS = 3


def draw(results: Results, path: Path) -> None:
    """Writes a PNG file."""
    from matplotlib.figure import Figure

    measures = measures_taken(results)
    rows = -(-(len(measures) + 1) // _COLUMNS)
    figure = Figure(figsize=(4.3 * _COLUMNS, 2.5 * rows), layout="constrained")
    axes = list(figure.subplots(rows, _COLUMNS, squeeze=False).flat)
    for axis, measure in zip(axes, measures, strict=False):
        _panel(axis, results, measure)
    for axis in axes[len(measures) :]:
        axis.set_axis_off()
    _legend(axes[len(measures)], results)
    figure.savefig(path, dpi=120)


def _panel(axis: Any, results: Results, measure: Measure) -> None:
    found = [(peer, best(results, [peer], measure)) for peer in peers_measured(results)]
    shown = [(peer, one) for peer, one in found if one is not None]
    values = [one.value for _, one in shown]
    spreads = [[o.value - o.least for _, o in shown], [o.most - o.value for _, o in shown]]
    colours = [_OURS if peer == OURS else _THEIRS for peer, _ in shown]
    axis.barh(range(len(shown)), values, color=colours, xerr=spreads, error_kw={"lw": 1, "ecolor": "#333333"})
    axis.set_yticks(range(len(shown)), [one.setting for _, one in shown], fontsize=8)
    axis.invert_yaxis()
    limit = limits(results).get(measure.name)
    edge = max([*(one.most for _, one in shown), limit or 0, 1e-9])
    if limit is not None:
        axis.axvline(limit, color=_LIMIT, linestyle="--", linewidth=1.5)
    if measure.name == LAUNCH:
        axis.set_xscale("log")
        axis.set_xlim(min(values, default=1) / 2, max(edge, 1) * 4)
    else:
        axis.set_xlim(0, edge * 1.22)
    for place, (_, one) in enumerate(shown):
        axis.annotate(
            f"{one.value:,.3g}" if one.value < 100 else f"{one.value:,.0f}",
            (one.most, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    better = "more is better" if measure.is_more_better else "less is better"
    axis.set_title(f"{measure.label}, {measure.unit} ({better})", fontsize=9, loc="left")
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _legend(axis: Any, results: Results) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shown = [
        Patch(color=_OURS, label="firstlight"),
        Patch(color=_THEIRS, label="peers, each in its best setting"),
        Line2D([], [], color=_LIMIT, linestyle="--", label="limit of this machine"),
        Line2D([], [], color="#333333", lw=1, label="least to most of the rounds"),
    ]
    axis.legend(handles=shown, loc="upper left", frameon=False, fontsize=9)
    text = (
        f"{results.provenance.get('processor', '')}\n{results.threads} threads, {results.rounds_run} rounds"
    )
    axis.text(0.02, 0.08, text, fontsize=8, transform=axis.transAxes)
