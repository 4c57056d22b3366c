"""Engines in process over models on disk, and what came of a run: tokens, log-probabilities, logits as bits.

Used by the tests of parity and of the invariants. The engine is built by `engine.worker.startup`, like the
real one; only its `execute` is wrapped, so that the logits of every token can be kept. Invariant: `run`
returns only when every submitted request has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from firstlight.base.config import EngineSection
from firstlight.engine.core import EngineCore
from firstlight.engine.messages import SequenceOutput, Submit, TokenLogprobs
from firstlight.engine.params import SamplingParams
from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.speculation.drafter import Drafter
from firstlight.engine.speculation.policy import Policy
from firstlight.engine.speculation.shape import Shape
from firstlight.engine.speculation.speculation import Speculation
from firstlight.engine.worker.startup import Started, start
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.ops.collectives import Group

MAX_STEPS = 20_000
# A pool of this many tokens at most, unless a test says otherwise: tests run beside each other.
KV_BYTES = 32 * 2**20


@dataclass
class Result:
    """What one request gave. `logits[i]` are those from which `tokens[i]` was chosen, as int32 bits."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list, repr=False)
    finish_reason: str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    num_accepted: int = 0
    ended_in_run: bool = False  # its last token had been drafted

    def same_bits(self, other: Result) -> bool:
        """Whether tokens, log-probabilities and logits are equal, bit for bit."""
        return (
            self.tokens == other.tokens
            and self.logprobs == other.logprobs
            and self.finish_reason == other.finish_reason
            and len(self.logits) == len(other.logits)
            and all(torch.equal(a, b) for a, b in zip(self.logits, other.logits, strict=True))
        )


class Harness:
    """An engine in this process. `section` entries override small sizes that suit tests."""

    def __init__(
        self, path: str | Path, *, dtype: str = "float32", capture: tuple[int, ...] = (), **section: Any
    ) -> None:
        sizes = {"threads": 1, "kv_memory_bytes": KV_BYTES, **section}
        self.started: Started = start(
            open_checkpoint(path),
            dtype,
            EngineSection(**sizes),
            Group(),
            lambda *_, **__: None,
            capture,
        )
        # By request, tokens before the step, and those that were drafted since.
        self._kept: dict[tuple[str, int, tuple[int, ...]], torch.Tensor] = {}
        self.keeps_logits = True  # of every token: for long runs there is no room
        self.fresh()

    def fresh(
        self,
        drafter: Drafter | None = None,
        num: int = 0,
        tree: Shape | None = None,
        *,
        num_pages: int | None = None,
        **section: Any,
    ) -> None:
        """A new scheduler with an empty cache over the same model and pool: as after a restart.

        A `drafter` drafts `num` tokens at every step, or a `tree`; without one, what the section says. With
        fewer pages and smaller sizes than those of the start, if they are given.
        """
        started = replace(
            self.started,
            section=msgspec.structs.replace(self.started.section, **section),
            num_pages=num_pages or self.started.num_pages,
        )
        self.core: EngineCore = started.core(self._execute)
        self.core.begin({})
        if drafter is not None:
            self.draft_with(drafter, num, tree)

    def draft_with(self, drafter: Drafter, num: int, tree: Shape | None = None) -> None:
        """From now on, with what is in the cache."""
        self.core.speculation = Speculation(drafter, Policy(num, tree=tree, adapts=False))
        self.core.begin({})

    def run(
        self,
        submits: Iterable[Submit],
        *,
        arrive: Mapping[int, list[Submit]] | None = None,
        before_step: Callable[[int], None] | None = None,
    ) -> dict[str, Result]:
        """Runs until all have ended. `arrive` submits more before the step of that number."""
        self._kept.clear()
        later = dict(arrive or {})
        results: dict[str, Result] = {}
        for submit in submits:
            self.core.handle(submit)
        for step in range(MAX_STEPS):
            for submit in later.pop(step, []):
                self.core.handle(submit)
            if before_step is not None:
                before_step(step)
            outputs = self.core.step()
            for output in outputs.outputs if outputs is not None else []:
                self._record(results.setdefault(output.request_id, Result()), output)
            if not self.core.has_work and not later:
                self._check_clean()
                return results
        raise AssertionError(f"the engine did not finish in {MAX_STEPS} steps")

    def logits_of(self, tokens: list[int]) -> torch.Tensor:
        """Logits at every position [T, V], by a plan made by hand; leaves the cache's pages overwritten."""
        # One entry a token, all in the same slot: the logits of each entry's last token are every row's.
        num = len(tokens)
        entries = list(range(num))
        plan = StepPlan(0, [0] * num, entries, [1] * num, tokens, entries, [self._first_pages(num)])
        return self.started.runner.run(plan).clone()

    def last_logits_of(self, tokens: list[int]) -> torch.Tensor:
        """Logits [V] after the last token, with all tokens in one chunk, as a prompt runs."""
        num = len(tokens)
        plan = StepPlan(0, [0], [0], [num], tokens, [num - 1], [self._first_pages(num)])
        return self.started.runner.run(plan)[0].clone()

    def _first_pages(self, num_tokens: int) -> tuple[int, int, list[int]]:
        size = self.started.section.page_size_tokens
        return 0, 0, list(range(1, -(-num_tokens // size) + 1))

    def _execute(self, plan: StepPlan) -> torch.Tensor:
        logits = self.started.runner.run(plan)
        if not self.keeps_logits:
            return logits
        row = 0
        for sequence in self.core.scheduler.planned_sequences():
            for drafted in drafted_before(sequence.drafts, sequence.parents):
                key = (sequence.request_id, sequence.num_output, drafted)
                self._kept[key] = logits[row].clone().view(torch.int32)
                row += 1
        return logits

    def _record(self, result: Result, output: SequenceOutput) -> None:
        assert result.finish_reason is None, f"{output.request_id} went on after its end"
        before = len(result.tokens)
        for place, token in enumerate(output.token_ids):
            if self.keeps_logits:
                key = (output.request_id, before, tuple(output.token_ids[:place]))
                result.logits.append(self._kept[key])
            result.tokens.append(token)
        result.logprobs.extend(output.logprobs or [])
        result.num_cached_tokens = output.num_cached_tokens
        result.num_accepted += output.num_accepted
        result.ended_in_run = len(output.token_ids) == output.num_accepted > 0
        result.finish_reason, result.error = output.finish_reason, output.error

    def _check_clean(self) -> None:
        self.core.scheduler.prefix.check()
        stats = self.core.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.pages_used) == (0, 0, 0), stats


def drafted_before(drafts: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    """For the last token and each draft: the drafts on the way to it, itself included."""
    ways: list[tuple[int, ...]] = [()]
    for place, token in enumerate(drafts):
        ways.append((*ways[parents[place] + 1 if parents else place], token))
    return ways


def submit(request_id: str, prompt: Iterable[int], priority: int = 0, **params: Any) -> Submit:
    """A request; greedy with 8 tokens and seed 0, unless `params` say otherwise."""
    values = {"temperature": 0.0, "max_tokens": 8, "seed": 0, **params}
    return Submit(request_id, list(prompt), SamplingParams(**values), priority)
