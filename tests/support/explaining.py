"""`firstlight drafter explain` as the fault-injection suite asks it: with what a user has, and no more."""

from __future__ import annotations

from typing import Any

from firstlight.drafter.explain.collect import collect
from firstlight.drafter.explain.judge import Verdict, judge
from firstlight.drafter.explain.order import Order
from support.fault_runs import FaultRun

NUM_DOCUMENTS = 3


def explain(run: FaultRun, **more: Any) -> Verdict:
    """The verdict on a run's drafter, its target and its data; the engine runs on PyTorch's operators."""
    options = {"max_documents": NUM_DOCUMENTS, "threads": 1, "cpu_kernels": "stock", "answer_tokens": 12}
    return judge(collect(Order(target=run.target, drafter=run.folder, out=run.out, **(options | more))))


def causes(verdict: Verdict) -> list[str]:
    """Of its findings, the deciding one first."""
    return [finding.cause for finding in verdict.findings]
