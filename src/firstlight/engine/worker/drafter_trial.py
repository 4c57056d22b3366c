"""A drafter is tried at the start: how often its drafts are right on fixed prompts.

The prompts are the target's own words, drawn from its first token with fixed seeds, so that no tokenizer is
needed; the answers are greedy. A trial that was finished is remembered for the next start of the same pair.
Invariant: nothing of it stays but what the policy has learnt: no sequence, no page, no count.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec

from firstlight.engine.core import EngineCore
from firstlight.engine.messages import Abort, Submit
from firstlight.engine.params import SamplingParams
from firstlight.engine.speculation.metrics import DraftCounts, figures
from firstlight.engine.speculation.shape import NOTHING, shape_of
from firstlight.engine.speculation.speculation import Speculation
from firstlight.engine.worker.remembered_trials import TrialMemory, Tried
from firstlight.engine.worker.startup import Started

LIMIT_S = 1.5
PROMPT_SHARE = 0.3  # of that time for the prompts, which are as long as they have become by then
NUM_PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 2, 8, 16
_KEPT = (
    "acceptance_length",
    "accepted_per_drafted",
    "acceptance_by_place",
    "conditional_acceptance_by_place",
)


def try_drafter(
    core: EngineCore, first_token: int | None, memory: TrialMemory | None = None
) -> dict[str, Any] | None:
    """What is to be said of the drafter in the start-up report; None where there is none to be tried.

    Call after `EngineCore.begin`. It ends at once where `memory` has what an earlier start found, otherwise
    after one and a half seconds at most, with what is known by then.
    """
    speculation = core.speculation
    if speculation is None or not speculation.drafter.is_model:
        return None
    draft_ms = _draft_ms(speculation)
    kept = None if memory is None else memory.recall(speculation.policy.most)
    tried = kept.tried if kept is not None else _try(core, speculation, first_token or 0)
    is_complete = tried.num_tokens == tried.num_prompts * ANSWER_TOKENS
    if memory is not None and kept is None and is_complete:
        memory.keep(tried)
    if not speculation.policy.largest.is_tree:  # what it learnt of trees is not in counts by place
        speculation.policy.acceptance.begin(tried.reached, tried.accepted)
    return {
        **_figures(speculation, tried),
        "draft_ms": draft_ms,
        "is_complete": is_complete,
        "remembered_from": None if kept is None else kept.date,
        "notes": [] if memory is None else memory.notes,
    }


def memory_for(started: Started) -> TrialMemory | None:
    """Where the trial of an engine's drafter is remembered; None where there is none to be tried.

    Trees are tried anew at each start: counts by place say nothing of trees of other sizes.
    """
    is_tried = started.drafter is not None and started.drafter.is_model
    if not is_tried or shape_of(started.section).is_tree:
        return None
    sizes = (NUM_PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS)
    return TrialMemory.of(started.checkpoint, started.section, started.report, sizes)


def in_words(report: dict[str, Any]) -> str:
    """One line for the log."""
    length, times_ms = report["acceptance_length"], report["draft_ms"]
    drafts = report["drafts"]
    if length is None:
        words = "the drafter could not be tried in time"
    else:
        words = f"{length:.2f} tokens a step with {drafts} drafts"
        if drafts in times_ms:
            words += f", which take {times_ms[drafts]:.2f} ms"
        if report["remembered_from"] is not None:
            words += f"; acceptance remembered from {report['remembered_from']}"
    return "; ".join([words, *report["notes"]])


def _try(core: EngineCore, speculation: Speculation, first_token: int) -> Tried:
    started_s = time.monotonic()
    trial = _Trial(core, speculation, started_s + PROMPT_SHARE * LIMIT_S, started_s + LIMIT_S)
    prompts = trial.prompts(first_token)
    trial.answer(prompts)
    counts = speculation.counts
    tried = Tried(
        num_prompts=len(prompts),
        num_tokens=trial.num_tokens,
        num_verified=counts.num_verified,
        drafted=list(counts.drafted),
        reached=list(counts.reached),
        accepted=list(counts.accepted),
        num_drafted=counts.num_drafted,
    )
    core.scheduler.forget()
    counts.forget()
    return tried


def _figures(speculation: Speculation, tried: Tried) -> dict[str, Any]:
    counts = DraftCounts(num_verified=tried.num_verified, num_drafted=tried.num_drafted)
    counts.drafted, counts.reached, counts.accepted = tried.drafted, tried.reached, tried.accepted
    said = figures(counts)
    largest = speculation.policy.largest
    return {
        "drafts": largest.words,
        "draft_tokens": largest.depth,
        "draft_top_k": largest.top_k,
        "draft_nodes": largest.nodes,
        "num_prompts": tried.num_prompts,
        "num_tokens": tried.num_tokens,
        **{name: said[name] for name in _KEPT},
    }


def _draft_ms(speculation: Speculation) -> dict[str, float]:
    """Of all drafts of a step of one sequence, by their number, as they were timed."""
    policy = speculation.policy
    return {shape.words: round(1e3 * policy.draft_time(shape, 1), 3) for shape in policy.timed_drafts}


@dataclass
class _Trial:
    core: EngineCore
    speculation: Speculation
    prompts_until_s: float
    until_s: float
    num_tokens: int = 0

    def prompts(self, first_token: int) -> list[list[int]]:
        """Some tokens of the target's own, without drafts."""
        num = min(NUM_PROMPTS, self.core.scheduler.most_running(1 + PROMPT_TOKENS + ANSWER_TOKENS))
        sampled = SamplingParams(temperature=1.0, max_tokens=PROMPT_TOKENS, ignore_eos=True, seed=0)
        params = [msgspec.structs.replace(sampled, seed=seed) for seed in range(num)]
        self.speculation.policy.forced = NOTHING
        said = self._run([[first_token]] * num, params, self.prompts_until_s)
        return [[first_token, *tokens] for tokens in said]

    def answer(self, prompts: list[list[int]]) -> None:
        """Greedy answers with as many drafts as may be."""
        policy = self.speculation.policy
        policy.forced = policy.largest
        params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, seed=0, ignore_eos=True)
        said = self._run(prompts, [params] * len(prompts), self.until_s)
        policy.forced = None
        self.num_tokens = sum(map(len, said))

    def _run(self, prompts: list[list[int]], params: list[SamplingParams], until_s: float) -> list[list[int]]:
        names = [f"trial-{number}" for number in range(len(prompts))]
        said: dict[str, list[int]] = {name: [] for name in names}
        for name, prompt, one in zip(names, prompts, params, strict=True):
            self.core.handle(Submit(name, prompt, one))
        while self.core.has_work and time.monotonic() < until_s:
            outputs = self.core.step()
            for output in outputs.outputs if outputs is not None else []:
                said[output.request_id] += output.token_ids
        self.core.handle(Abort(names))
        while self.core.step() is not None:
            pass
        return list(said.values())
