"""A drafter is tried at the start: how long a draft takes, and how often it is right on fixed prompts.

Called by `engine.lead` and `LLM` for drafters that are models, before users come. The prompts are the
target's own words, drawn from its first token with fixed seeds, so that no tokenizer is needed; the answers
are greedy. Invariant: nothing of it stays but what the policy has learnt: no sequence, no page, no count.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from firstlight.engine.core import EngineCore
from firstlight.engine.messages import Abort, Submit
from firstlight.engine.params import SamplingParams
from firstlight.engine.request import Sequence
from firstlight.engine.speculation.counts import figures
from firstlight.engine.speculation.drafter import TreeDrafter
from firstlight.engine.speculation.shape import NOTHING, Shape, chain
from firstlight.engine.speculation.speculation import Speculation

LIMIT_S = 1.0
PROMPT_SHARE = 0.4  # of that time for the prompts, which are as long as they have become by then
NUM_PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 2, 8, 16
_TIMES = 2  # a draft is timed so often
_KEPT = (
    "acceptance_length",
    "accepted_per_drafted",
    "acceptance_by_place",
    "conditional_acceptance_by_place",
)


def try_drafter(core: EngineCore, first_token: int | None) -> dict[str, Any] | None:
    """What is to be said of the drafter in the start-up report; None where there is none to be tried.

    Call after `EngineCore.begin`. It ends after a second at most, with what is known by then.
    """
    speculation = core.speculation
    if speculation is None or not speculation.drafter.is_model:
        return None
    started_s = time.monotonic()
    trial = _Trial(core, speculation, started_s + PROMPT_SHARE * LIMIT_S, started_s + LIMIT_S)
    prompts = trial.prompts(first_token or 0)
    trial.answer(prompts)
    said = figures(speculation.counts)
    report = {
        "draft_tokens": speculation.policy.most,
        "draft_top_k": speculation.policy.largest.top_k,
        "draft_nodes": speculation.policy.largest.nodes,
        "num_prompts": len(prompts),
        "num_tokens": trial.num_tokens,
        **{name: said[name] for name in _KEPT},
        "draft_ms": trial.draft_ms,
        "is_complete": trial.num_tokens == len(prompts) * ANSWER_TOKENS,
    }
    core.scheduler.forget()
    speculation.counts.forget()
    return report


def in_words(report: dict[str, Any]) -> str:
    """One line for the log."""
    length, times_ms = report["acceptance_length"], report["draft_ms"]
    if length is None or not times_ms:
        return "the drafter could not be tried in time"
    words, draft_ms = list(times_ms.items())[-1]
    return f"{length:.2f} tokens a step with {words} drafts, which take {draft_ms:.2f} ms"


@dataclass
class _Trial:
    core: EngineCore
    speculation: Speculation
    prompts_until_s: float
    until_s: float
    num_tokens: int = 0
    draft_ms: dict[str, float] = field(default_factory=dict)  # of all drafts of a step, by their number

    def prompts(self, first_token: int) -> list[list[int]]:
        """Some tokens of the target's own, without drafts."""
        num = min(NUM_PROMPTS, self.core.scheduler.most_running(1 + PROMPT_TOKENS + ANSWER_TOKENS))
        sampled = SamplingParams(temperature=1.0, max_tokens=PROMPT_TOKENS, ignore_eos=True, seed=0)
        params = [msgspec.structs.replace(sampled, seed=seed) for seed in range(num)]
        self.speculation.policy.forced = NOTHING
        said = self._run([[first_token]] * num, params, self.prompts_until_s)
        return [[first_token, *tokens] for tokens in said]

    def answer(self, prompts: list[list[int]]) -> None:
        """Greedy answers with as many drafts as may be; a draft is timed on the way."""
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
            if self.speculation.policy.forced == self.speculation.policy.largest and not self.draft_ms:
                self._time(self.core.scheduler.decoding_sequences())
        self.core.handle(Abort(names))
        while self.core.step() is not None:
            pass
        return list(said.values())

    def _time(self, sequences: list[Sequence]) -> None:
        """Drafts for one and for all of the sequences, thrown away."""
        policy = self.speculation.policy
        shapes = [chain(num) for num in range(1, policy.most + 1)]
        shapes += [policy.largest] if policy.largest.is_tree else []
        for some in ([sequences] if len(sequences) > 1 else []) + [sequences[:1]]:
            for shape in shapes:
                draft_s = min(self._draft_time(some, shape) for _ in range(_TIMES))
                policy.record_draft_time(shape, len(some), draft_s)
                if len(some) == 1:
                    self.draft_ms[shape.words] = round(1e3 * draft_s, 3)

    def _draft_time(self, sequences: list[Sequence], shape: Shape) -> float:
        drafter, started_s = self.speculation.drafter, time.perf_counter()
        if shape.is_tree:
            assert isinstance(drafter, TreeDrafter), "trees of a drafter that makes none"
            drafter.propose_trees(sequences, shape)
        else:
            drafter.propose(sequences, shape.depth)
        return time.perf_counter() - started_s
