"""The report of `firstlight profile`: shares of a decode step by rank, beside what `plan` predicts.

Made of `step_profile.Answer`. Invariant: shares are of the steps' wall-clock time as each rank's clock saw
it, so what is lost between the kinds would be missing in their sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from firstlight.bench.engine.step_prediction import Prediction, is_gpu
from firstlight.bench.plots import Stacks, save_panels
from firstlight.bench.report import facts_table, plain_table
from firstlight.engine.messages import Profile
from firstlight.ops.step_clock import WORDS, Kind

NO_GRAPHS = "recorded steps run without CUDA graphs: the cost of recording is what those save, too"
DOUBTFUL = 0.05  # of a step: what recording may cost before the shares are in doubt
LATE_SHARE = 0.1  # of a step: ranks that differ by more in their collectives are worth a line


@dataclass(frozen=True)
class RankShares:
    """A mean decode step of one rank: seconds, and shares of the wall-clock time by kind."""

    rank: int
    step_s: float
    kinds_s: dict[str, float]
    shares: dict[str, float]

    @property
    def sum_of_shares(self) -> float:
        """1.0, but for what the clock missed."""
        return sum(self.shares.values())


@dataclass(frozen=True)
class StepProfile:
    """What is stored as JSON, too."""

    model: str
    backend: str
    ranks: tuple[RankShares, ...]
    predicted: Prediction | None
    notes: tuple[str, ...]
    profile: Profile


def make_report(
    profile: Profile, info: Mapping[str, Any], predicted: Prediction | None, notes: Sequence[str]
) -> StepProfile:
    """Of a profile with at least one step."""
    ranks = tuple(_shares(profile, rank) for rank in range(profile.num_ranks))
    report = info["startup_report"]
    return StepProfile(
        model=str(info["config"]["model"]["path"]),
        backend=str(report.get("backend", "")),
        ranks=ranks,
        predicted=predicted,
        notes=(
            *_doubts(profile),
            *_findings(ranks, predicted),
            *notes,
            *([NO_GRAPHS] if is_gpu(info) else []),
        ),
        profile=profile,
    )


def _shares(profile: Profile, rank: int) -> RankShares:
    wall_s = sum(group.wall_s[rank] for group in profile.groups)
    sums = {word: sum(group.kinds_s[rank][word] for group in profile.groups) for word in WORDS.values()}
    return RankShares(
        rank,
        wall_s / profile.num_steps,
        {word: seconds / profile.num_steps for word, seconds in sums.items()},
        {word: seconds / wall_s for word, seconds in sums.items()},
    )


def _doubts(profile: Profile) -> list[str]:
    if profile.overhead is None or abs(profile.overhead) <= DOUBTFUL:
        return []
    return [
        f"steps that are recorded differ by {100 * profile.overhead:+.0f} % from those between: the shares "
        "are doubtful; ask again when the machine is less busy, or for more --steps"
    ]


def _findings(ranks: Sequence[RankShares], predicted: Prediction | None) -> list[str]:
    """What stands out."""
    word = WORDS[Kind.COLLECTIVES]
    found = []
    least, most = (pick(ranks, key=lambda rank: rank.kinds_s[word]) for pick in (min, max))
    if most.kinds_s[word] - least.kinds_s[word] > LATE_SHARE * least.step_s:
        found.append(
            f"rank {least.rank} is in collectives for {_ms(least.kinds_s[word])}, rank {most.rank} for "
            f"{_ms(most.kinds_s[word])}: the others wait there for rank {least.rank}"
        )
    if predicted is not None and predicted.kinds_s[word] > 0.0:
        times = least.kinds_s[word] / predicted.kinds_s[word]
        found.append(f"collectives take {times:.1f} times what the plan predicts, where they take least")
    return found


def tables(report: StepProfile) -> list[Table]:
    """What is printed."""
    planned = report.predicted
    columns = ["", *(f"rank {rank.rank}" for rank in report.ranks), *(["plan"] if planned else [])]
    rows = []
    for word in WORDS.values():
        cells = [_cell(rank.kinds_s[word], rank.shares[word]) for rank in report.ranks]
        if planned is not None:
            cells.append(_cell(planned.kinds_s[word], planned.kinds_s[word] / (planned.total_s or 1.0)))
        is_there = any(rank.kinds_s[word] for rank in report.ranks)
        if is_there or (planned is not None and planned.kinds_s[word]):
            rows.append([word, *cells])
    sums = [_cell(sum(rank.kinds_s.values()), rank.sum_of_shares) for rank in report.ranks]
    rows.append(["sum", *sums, *([_cell(planned.total_s, 1.0)] if planned else [])])
    return [
        plain_table("A decode step: milliseconds and share of its wall-clock time", columns, rows),
        facts_table("How it was recorded", _facts(report)),
    ]


def _facts(report: StepProfile) -> list[tuple[str, str]]:
    profile = report.profile
    sizes = ", ".join(
        f"{group.num_steps} of {_number(group.num_sequences, 'sequence')}"
        + (f" with {group.num_rows} rows" if group.num_rows != group.num_sequences else "")
        for group in sorted(profile.groups, key=lambda group: -group.num_steps)
    )
    decode_s = max(0.0, profile.window_s - profile.other_s - profile.idle_s)
    cost = (
        "too few steps to tell" if profile.overhead is None else f"{100 * profile.overhead:+.1f} % (median)"
    )
    facts = [
        ("model", f"{report.model}, {report.backend}"),
        ("recorded decode steps", sizes),
        (
            "the time that was watched",
            f"{profile.window_s:.2f} s: decode steps {decode_s:.2f} s, {profile.num_other_steps} others "
            f"{profile.other_s:.2f} s, idle {profile.idle_s:.2f} s",
        ),
        ("cost of recording", f"{cost}, against {profile.num_plain_steps} steps between with the clock off"),
    ]
    return facts + [("note", note) for note in report.notes]


def plot(report: StepProfile, path: Path) -> None:
    """A bar for each rank, and one for the plan."""
    bars = {f"rank {rank.rank}": _percent(rank.kinds_s, rank.step_s) for rank in report.ranks}
    lengths = {name: rank.step_s for name, rank in zip(bars, report.ranks, strict=True)}
    if report.predicted is not None:
        bars["plan"] = _percent(report.predicted.kinds_s, report.predicted.total_s)
        lengths["plan"] = report.predicted.total_s
    named = {f"{name}, {_ms(lengths[name])}": parts for name, parts in bars.items()}
    title = f"A decode step of {Path(report.model).name}: {report.profile.num_steps} recorded"
    save_panels(path, title, [Stacks("where its time goes", "% of the step", named)])


def _percent(kinds_s: Mapping[str, float], whole_s: float) -> dict[str, float]:
    return {word: 100 * seconds / (whole_s or 1.0) for word, seconds in kinds_s.items()}


def _cell(seconds: float, share: float) -> str:
    return f"{1e3 * seconds:8.3f} {100 * share:5.1f} %"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _number(num: int, word: str) -> str:
    return f"{num} {word}{'' if num == 1 else 's'}"
