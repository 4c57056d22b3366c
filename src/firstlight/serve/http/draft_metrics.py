"""What /metrics says of drafts: how many were made, accepted, and in which place. Nothing without a drafter.

Every figure carries the drafter, k (the most drafts of a step one behind the other), and for trees top-k and
the most nodes (of a chain 1 and k), as labels. Invariant: all but those of `now` are totals, so that a rate
or a share of any span can be made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from firstlight.engine.speculation.metrics import HIT_NAMES, LENGTH_NAMES, DraftCounts, Share

_LABELS = ["drafter", "k", "top_k", "nodes"]
Read = Callable[[DraftCounts], float]
ReadAll = Callable[[DraftCounts], list[int]]
_TOTALS: tuple[tuple[str, str, Read], ...] = (
    ("draft_verified_steps", "Steps of a sequence with drafts.", lambda c: c.num_verified),
    ("draft_plain_steps", "Steps of a sequence without drafts.", lambda c: c.num_plain),
    ("draft_tokens", "Drafts verified.", lambda c: c.num_drafted),
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
    labels = [counts.drafter, *map(str, (counts.most, counts.top_k, counts.most_nodes or counts.most))]
    for name, description, value in (
        ("draft_tokens_now", "Drafts of a step one behind the other, as chosen last.", counts.now),
        ("draft_nodes_now", "Drafts of a step altogether, as chosen last.", counts.nodes_now),
    ):
        now = GaugeMetricFamily(f"firstlight:{name}", description, labels=_LABELS)
        now.add_metric(labels, value)
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
        ("length", "length", "the length of the sequence in tokens", LENGTH_NAMES, counts.by_length),
        ("prefix_hit", "hit", "whether its prompt began in the prefix cache", HIT_NAMES, counts.by_hit),
    )
    for kind, label, words, names, shares in kinds:
        for name, description, read_share in _BY_KIND:
            family = CounterMetricFamily(
                f"firstlight:draft_{name}_by_{kind}",
                f"{description}, by {words}.",
                labels=[*_LABELS, label],
            )
            for which, share in zip(names, shares, strict=True):
                family.add_metric([*labels, which], read_share(share))
            yield family
