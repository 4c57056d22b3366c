"""The figures of /metrics, in Prometheus' text form.

Names begin with `firstlight:`. Invariant: feeding costs about a microsecond, as it happens once a token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from time import monotonic

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from firstlight.engine.messages import EngineStats, SequenceOutput
from firstlight.serve.http.draft_metrics import families

_LATENCY_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
_COUNT_BOUNDS = tuple(float(2**power) for power in range(15))
_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("requests_running", "Sequences in the current step.", lambda s: s.num_running),
    ("requests_waiting", "Sequences that wait for their first step.", lambda s: s.num_waiting),
    ("kv_pages_total", "Pages of the KV cache.", lambda s: s.pages_total),
    ("kv_pages_used", "Pages held by running sequences.", lambda s: s.pages_used),
    ("kv_pages_cached", "Pages held only by the prefix cache; evictable.", lambda s: s.pages_cached),
    (
        "kv_usage_ratio",
        "Share of the pages held by running sequences.",
        lambda s: s.pages_used / s.pages_total if s.pages_total else 0.0,
    ),
)
_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    (
        "prefix_cache_query_tokens",
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.cache_query_tokens,
    ),
    ("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache.", lambda s: s.cache_hit_tokens),
    ("preemptions", "Sequences set back because pages ran out.", lambda s: s.num_preemptions),
    ("engine_steps", "Steps of the engine.", lambda s: s.num_steps),
)


class Metrics(Collector):
    """All figures of one api process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._stats = EngineStats()
        self._is_ready = False
        self._tokens: Counter[str] = Counter()
        self._ends: Counter[str] = Counter()
        self._answers: Counter[tuple[str, int]] = Counter()
        self._num_disconnects = 0
        self._first = _latency("time_to_first_token", "From the request's arrival to its first token.")
        self._between = _latency("inter_token_latency", "Between two outputs of a sequence.")
        self._whole = _latency("request_latency", "From the request's arrival to a sequence's end.")
        self._step = _latency("step", "One step of the engine.")
        self._step_tokens = Histogram("firstlight:step_tokens", "Tokens in a step.", _COUNT_BOUNDS)
        self._step_sequences = Histogram("firstlight:step_sequences", "Sequences in a step.", _COUNT_BOUNDS)

    def on_step(self, stats: EngineStats) -> None:
        """A step ended, or sequences ended outside of one."""
        if stats.num_steps != self._stats.num_steps:
            self._step.observe(stats.step_s)
            self._step_tokens.observe(stats.step_tokens)
            self._step_sequences.observe(stats.step_sequences)
        self._stats = stats

    def set_ready(self, is_ready: bool) -> None:
        """Whether the engine serves."""
        self._is_ready = is_ready

    def timer(self, arrived_s: float) -> Callable[[SequenceOutput], None]:
        """A listener for the outputs of one request that measures when its tokens come."""
        last_s: dict[str, float] = {}

        def on_output(output: SequenceOutput) -> None:
            if not output.token_ids:
                return
            self._tokens["generation"] += len(output.token_ids)
            now_s = monotonic()
            before_s = last_s.get(output.request_id)
            if before_s is None:
                self._first.observe(now_s - arrived_s)
            else:
                self._between.observe(now_s - before_s)
            last_s[output.request_id] = now_s

        return on_output

    def record_prompt(self, num_tokens: int) -> None:
        """A prompt was taken by the engine."""
        self._tokens["prompt"] += num_tokens

    def record_end(self, finish_reason: str, arrived_s: float) -> None:
        """A sequence ended."""
        self._ends[finish_reason] += 1
        self._whole.observe(monotonic() - arrived_s)

    def record_answer(self, path: str, status: int) -> None:
        """An HTTP request was answered."""
        self._answers[path, status] += 1

    def record_refusal(self, status: int) -> None:
        """A connection was refused before what it sent was a request."""
        self._answers["none", status] += 1

    def record_disconnect(self) -> None:
        """A client went away before its answer was complete."""
        self._num_disconnects += 1

    def scrape(self) -> bytes:
        """Everything as text."""
        text: bytes = generate_latest(self._registry)
        return text

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at a scrape."""
        yield GaugeMetricFamily("firstlight:ready", "1 while the engine serves.", float(self._is_ready))
        for name, description, read in _GAUGES:
            yield GaugeMetricFamily(f"firstlight:{name}", description, read(self._stats))
        for name, description, read in _COUNTERS:
            yield CounterMetricFamily(f"firstlight:{name}", description, read(self._stats))
        for kind in ("prompt", "generation"):
            yield CounterMetricFamily(
                f"firstlight:{kind}_tokens", f"Tokens taken or made: {kind}.", self._tokens[kind]
            )
        yield CounterMetricFamily(
            "firstlight:disconnects",
            "Clients that left before their answer was complete.",
            self._num_disconnects,
        )
        ends = CounterMetricFamily(
            "firstlight:sequences", "Sequences by their end.", labels=["finish_reason"]
        )
        for reason, count in sorted(self._ends.items()):
            ends.add_metric([reason], count)
        yield ends
        answers = CounterMetricFamily("firstlight:http_answers", "HTTP answers.", labels=["path", "status"])
        for (path, status), count in sorted(self._answers.items()):
            answers.add_metric([path, str(status)], count)
        yield answers
        for histogram in (self._first, self._between, self._whole, self._step):
            yield histogram.family()
        yield self._step_tokens.family()
        yield self._step_sequences.family()
        yield from families(self._stats.drafts)


def _latency(name: str, description: str) -> Histogram:
    return Histogram(f"firstlight:{name}_seconds", description, _LATENCY_BOUNDS)


# A histogram cheap enough to be fed once a token: a bisection and two additions. Only the event loop's
# thread observes, and a scrape in that thread sees whole observations.


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
