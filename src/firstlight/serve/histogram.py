"""A histogram cheap enough to be fed once a token: a bisection and two additions.

Used by `serve.metrics`; the class of prometheus-client takes a lock and several calls an observation.
Invariant: only the event loop's thread observes, and a scrape in that thread sees whole observations.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.core import HistogramMetricFamily


class Histogram:
    """Counts of observations by upper bound. `name` is the full metric name."""

    def __init__(self, name: str, description: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._description = description
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Counts one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self) -> HistogramMetricFamily:
        """The histogram in Prometheus' form: cumulative counts."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip([*map(repr, map(float, self._bounds)), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return HistogramMetricFamily(self._name, self._description, buckets=buckets, sum_value=self._sum)
