"""What /metrics says of drafts: how many were made, accepted, and in which place. Nothing without a drafter.

Called by `serve.metrics` at a scrape. Every figure carries the drafter and k, the most drafts of a step, as
labels. Invariant: all but `draft_tokens_now` are totals, so that a rate or a share of any span can be made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from firstlight.engine.speculation.counts import HIT_NAMES, LENGTH_NAMES, DraftCounts, Share

_LABELS = ["drafter", "k"]
Read = Callable[[DraftCounts], float]
ReadAll = Callable[[DraftCounts], list[int]]
_TOTALS: tuple[tuple[str, str, Read], ...] = (
    ("draft_verified_steps", "Steps of a sequence with drafts.", lambda c: c.num_verified),
    ("draft_plain_steps", "Steps of a sequence without drafts.", lambda c: c.num_plain),
    ("draft_tokens", "Drafts verified.", lambda c: sum(c.drafted)),
    ("draft_accepted_tokens", "Drafts accepted.", lambda c: sum(c.accepted)),
    ("draft_seconds", "Seconds spent in the drafter.", lambda c: c.propose_s),
)
_BY_PLACE: tuple[tuple[str, str, ReadAll], ...] = (
    ("draft_tokens_by_place", "Drafts verified in a place, 1 the first.", lambda c: c.drafted),
    ("draft_reached_by_place", "Of those, with all before them accepted.", lambda c: c.reached),
    ("draft_accepted_by_place", "Drafts accepted in a place, 1 the first.", lambda c: c.accepted),
)


_BY_KIND: tuple[tuple[str, str, Callable[[Share], int]], ...] = (
    ("verified_steps", "Steps of a sequence with drafts", lambda s: s.verified),
    ("tokens", "Drafts verified", lambda s: s.drafted),
    ("accepted_tokens", "Drafts accepted", lambda s: s.accepted),
)


def families(counts: DraftCounts | None) -> Iterator[Metric]:
    """The figures of a scrape. Acceptance length is 1 + accepted / verified steps, over any span."""
    if counts is None:
        return
    labels = [counts.drafter, str(counts.most)]
    now = GaugeMetricFamily(
        "firstlight:draft_tokens_now", "Drafts of a step, as chosen last.", labels=_LABELS
    )
    now.add_metric(labels, counts.now)
    yield now
    for name, description, read in _TOTALS:
        total = CounterMetricFamily(f"firstlight:{name}", description, labels=_LABELS)
        total.add_metric(labels, read(counts))
        yield total
    for name, description, read_all in _BY_PLACE:
        by_place = CounterMetricFamily(f"firstlight:{name}", description, labels=[*_LABELS, "place"])
        for place, value in enumerate(read_all(counts), 1):
            by_place.add_metric([*labels, str(place)], value)
        yield by_place
    kinds = (
        ("length", "length", "length of the sequence in tokens", LENGTH_NAMES, counts.by_length),
        ("prefix_hit", "hit", "whether its prompt began in the prefix cache", HIT_NAMES, counts.by_hit),
    )
    for kind, label, words, names, shares in kinds:
        for name, description, read_share in _BY_KIND:
            family = CounterMetricFamily(
                f"firstlight:draft_{name}_by_{kind}",
                f"{description}, by the {words}.",
                labels=[*_LABELS, label],
            )
            for which, share in zip(names, shares, strict=True):
                family.add_metric([*labels, which], read_share(share))
            yield family
