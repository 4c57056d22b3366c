"""What the tests of drafts ask of a tiny engine, and how they see that drafts changed nothing.

Used by the tests of chains and of trees. The baseline is each request alone without drafts. Invariant: the
same engine gives the same baseline.
"""

from __future__ import annotations

from support.checkpoints import tiny_description
from support.engines import Harness, Result, submit
from support.knowing import Knowing
from support.workloads import requests

VOCABULARY = 1200
LENGTH = 256
# With a window; the real model, see test_invariants_real, is one without.
MODEL = tiny_description("mistral", sliding_window=40, vocab_size=VOCABULARY, max_position=LENGTH)
STOPS = tuple(range(2, VOCABULARY, 19))
STOPPING = {"stop_token_ids": STOPS, "logit_bias": dict.fromkeys(STOPS, 1.0), "temperature": 1.0}
WORKLOAD = [
    *requests(20, VOCABULARY, max_tokens=24),
    *(submit(f"end{n}", range(9 + n, 40), **STOPPING, max_tokens=40, seed=n) for n in range(6)),
    submit("later", range(3, 30), **STOPPING, min_tokens=9, max_tokens=40, logprobs=2),
    submit("whole", range(3, 30), max_tokens=None, ignore_eos=True),
]
SIZES = {"max_num_seqs": 16, "max_batched_tokens": 256}
Baseline = dict[str, Result]


def each_alone(engine: Harness) -> Baseline:
    """The baseline."""
    results: Baseline = {}
    for item in WORKLOAD:
        engine.fresh()
        results |= engine.run([item])
    assert {result.finish_reason for result in results.values()} == {"stop", "length"}
    assert len(results["whole"].tokens) == LENGTH - 27
    return results


def knowing(baseline: Baseline, wrong: float = 0.2) -> Knowing:
    return Knowing({name: result.tokens for name, result in baseline.items()}, VOCABULARY, wrong)


def assert_same(results: dict[str, Result], baseline: Baseline) -> None:
    assert [name for name in baseline if not results[name].same_bits(baseline[name])] == []


def num_accepted(results: dict[str, Result]) -> int:
    return sum(result.num_accepted for result in results.values())
