"""Settings of an evaluation: how much of the held-out answers is measured, and what beside.

Invariant: they are values; the same settings on the same files give the same report.
"""

from __future__ import annotations

import msgspec


class EvaluateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured: at most `max_documents` of each family, `num_drafts` drafts a step (k)."""

    num_drafts: int = 3
    max_documents: int = 24
    seed: int = 0
    beside: tuple[
        str, ...
    ] = ()  # run folders of other trainings on the same states, such as one step (T = 1)
    off_by_one: int = 0  # documents of a family to measure with the states of the next blocks, too
