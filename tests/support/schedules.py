"""A scheduler driven by hand, with a sampler that is a function: histories as short scripts.

Used by the tests of the scheduler. Every step of `Driver` checks what must hold for any plan, so that each
named history checks it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from firstlight.base.config import EngineSection
from firstlight.engine.messages import SequenceOutput, Submit
from firstlight.engine.params import SamplingParams
from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.scheduler.scheduler import Scheduler
from firstlight.engine.scheduler.sequence import NO_SLOT, Sequence

END = 99  # the model's end token
PLAIN = 7  # what is sampled, unless a test says otherwise
PAGE = 4

Choose = Callable[[Sequence], int]


def request(name: str, prompt: int | Iterable[int], priority: int = 0, **params: Any) -> Submit:
    """A prompt of that many tokens that nobody shares, or of those tokens."""
    if isinstance(prompt, int):
        base = 1000 + 1000 * (sum(map(ord, name)) % 5000)
        prompt = range(base, base + prompt)
    return Submit(name, list(prompt), SamplingParams(**{"seed": 0, **params}), priority)


class Driver:
    """`choose` gives the token for a sequence; outputs are kept in `outputs` and `ended`."""

    def __init__(self, *, pages: int = 64, choose: Choose = lambda _: PLAIN, **section: Any) -> None:
        sizes = {
            "max_num_seqs": 8, "max_batched_tokens": 32, "max_model_len": 128, "page_size_tokens": PAGE,
        } | section  # fmt: skip
        self.section = EngineSection(**sizes)
        self.scheduler = Scheduler(self.section, pages + 1, [END])
        self.choose = choose
        self.outputs: dict[str, list[SequenceOutput]] = {}
        self.ended: dict[str, SequenceOutput] = {}
        self._slots: dict[int, list[int]] = {}  # page tables as a rank would keep them

    def submit(self, *submits: Submit) -> None:
        for item in submits:
            self.scheduler.submit(item)
        self._take(self.scheduler.take_finished())

    def abort(self, name: str) -> None:
        self.scheduler.abort(name)
        self._take(self.scheduler.take_finished())

    def step(self) -> dict[str, int]:
        """One step; how many tokens of whom it ran. Empty when nothing could run."""
        plan = self.scheduler.plan()
        if plan is None:
            return {}
        sequences = list(self.scheduler._planned)
        ran = {sequence.request_id: num for sequence, num in zip(sequences, plan.counts, strict=True)}
        self._check(plan, sequences)
        runs = [[self.choose(sequence)] for sequence in self.scheduler.planned_sequences()]
        self._take(self.scheduler.apply(plan, runs))
        self.scheduler.prefix.check()
        return ran

    def run(self, max_steps: int = 2000) -> list[dict[str, int]]:
        """Steps until nothing is left."""
        history = []
        while self.scheduler.has_work:
            assert len(history) < max_steps, "the scheduler does not come to an end"
            history.append(self.step())
        self.check_empty()
        return history

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs[name] for token in output.token_ids]

    def running(self) -> list[str]:
        return [sequence.request_id for sequence in self.scheduler._running]

    def check_empty(self) -> None:
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.pages_used) == (0, 0, 0)
        self.scheduler.prefix.check()
        self.scheduler.prefix.clear()
        assert self.scheduler.prefix.num_available == stats.pages_total
        assert self.scheduler.prefix.num_idle == 0

    def _take(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            name = output.request_id
            assert name not in self.ended, f"{name} went on after its end"
            self.outputs.setdefault(name, []).append(output)
            if output.finish_reason:
                self.ended[name] = output

    def _check(self, plan: StepPlan, sequences: list[Sequence]) -> None:
        """What must hold for any plan."""
        assert sum(plan.counts) == len(plan.tokens) == plan.num_tokens <= self.section.max_batched_tokens
        assert len(set(plan.slots)) == len(plan.slots) <= self.section.max_num_seqs
        assert plan.samples == sorted(set(plan.samples))
        for slot, first, pages in plan.pages:
            table = self._slots.setdefault(slot, [])
            assert first <= len(table), "a page table with a hole"
            table[first : first + len(pages)] = pages
        offset = 0
        for index, (sequence, start, num) in enumerate(zip(sequences, plan.starts, plan.counts, strict=True)):
            assert num > 0
            assert sequence.slot == plan.slots[index] != NO_SLOT
            assert start == sequence.num_computed
            assert plan.tokens[offset : offset + num] == sequence.tokens[start : start + num]
            assert (offset + num - 1 in plan.samples) == (start + num == len(sequence.tokens))
            assert len(sequence.pages) * PAGE >= start + num, "a planned token without a page"
            assert self._slots[sequence.slot][: len(sequence.pages)] == sequence.pages, (
                "ranks see other pages"
            )
            offset += num
