"""The events that our processes write into rings, and what their values mean.

Named by the writers, looked up by whoever shows a ring to people. Invariant: the values of an event stand in
the order of its fields, and a field is named with its unit.
"""

from __future__ import annotations

from collections.abc import Sequence

STEP = "step"  # of the engine, when it ended
_FIELDS: dict[str, tuple[str, ...]] = {STEP: ("number", "sequences", "tokens", "took_us")}


def named_values(event: str, values: Sequence[int]) -> dict[str, int]:
    """The values of an event by field; those of an unknown one as "a", "b", … up to the last that is set."""
    fields = _FIELDS.get(event)
    if fields is None:
        num_set = max((place + 1 for place, value in enumerate(values) if value), default=0)
        fields = tuple("abcde"[:num_set])
    return dict(zip(fields, values, strict=False))
