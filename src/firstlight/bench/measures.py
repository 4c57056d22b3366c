"""What is measured of a request, and the arithmetic over many of them: percentiles and goodput. Pure.

The terms are those of the usual load generators: TTFT is the time to the first chunk with text, TPOT = (E2E -
TTFT) / (tokens - 1), ITL is the gap between two chunks with text, E2E ends with the chunk that carries the
finish reason. Invariant: a request with an error is counted, and takes part in no latency.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from firstlight.base.errors import UsageError

PERCENTS = (50, 90, 95, 99)
LIMIT_NAMES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True)
class RequestRecord:
    """One request, on the clock of `time.perf_counter`.

    `started_s` is when it was due: under an open loop a client that is late counts against the server, as it
    would for a user. `text_times_s` are the arrivals of chunks with text.
    """

    started_s: float
    ended_s: float
    text_times_s: tuple[float, ...] = ()
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    has_usage: bool = True
    error: str | None = None
    late_s: float = 0.0  # how much later than `started_s` it was sent

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.started_s

    @property
    def ttft_s(self) -> float:
        """Where nothing but invisible tokens came, the end is the first that was seen."""
        first_s = self.text_times_s[0] if self.text_times_s else self.ended_s
        return first_s - self.started_s

    @property
    def tpot_s(self) -> float | None:
        """None for an answer of one token."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.text_times_s)]


@dataclass(frozen=True)
class Summary:
    """A distribution in a few numbers; `percentiles` by percent. All in the unit of the values."""

    count: int
    mean: float
    percentiles: dict[int, float]
    largest: float


def summarize(values: Iterable[float]) -> Summary | None:
    """None where there are no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Summary(
        count=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        percentiles={percent: percentile(ordered, percent) for percent in PERCENTS},
        largest=ordered[-1],
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of ascending values, with linear interpolation between neighbours; at least one value."""
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median(values: Iterable[float]) -> float:
    """Of at least one value."""
    return percentile(sorted(values), 50)


def peak_growth(points: Sequence[tuple[float, float]]) -> float:
    """By how much the highest y of the last third of the time exceeds that of the first third.

    For memory: an allocator gives back and takes again what it holds, so a line through all points rises
    and falls with the moment; what leaks lifts the peaks.
    """
    if not points:
        return 0.0
    third = (points[-1][0] - points[0][0]) / 3
    first = max(y for x, y in points if x <= points[0][0] + third)
    last = max(y for x, y in points if x >= points[-1][0] - third)
    return last - first


def parse_limits(texts: Iterable[str]) -> dict[str, float]:
    """Limits in milliseconds by name from words like "ttft:500"; several may stand in one text."""
    limits: dict[str, float] = {}
    for word in (word for text in texts for word in text.replace(",", " ").split()):
        name, _, number = word.partition(":")
        name = "e2e" if name == "e2el" else name
        try:
            limit = float(number)
        except ValueError:
            limit = math.nan
        if name not in LIMIT_NAMES or not 0 < limit < math.inf:
            raise UsageError(
                f"--goodput {word} is not a limit.",
                f"Write NAME:MILLISECONDS with a name of {', '.join(LIMIT_NAMES)}, as in ttft:500.",
            )
        limits[name] = limit
    return limits


def meets(record: RequestRecord, limits: Mapping[str, float]) -> bool:
    """Whether a request succeeded within all `limits` (milliseconds). An answer of one token has no TPOT."""
    if record.error is not None:
        return False
    measured = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2e": record.e2e_s}
    return all(measured[name] * 1e3 <= limit for name, limit in limits.items())
