"""Continuous batching: which tokens of which sequences run in the next step. Pure bookkeeping, no torch.

`EngineCore` calls `submit`/`abort`, then `plan()`, runs the step, then `apply()`. One step holds up to
`max_batched_tokens` tokens: one for each decoding sequence, with those of its drafts that push nobody out,
then chunks of prompts, so that none stalls a running answer. Invariant: after `plan()` every planned token
has a page; a sequence waits, runs or is gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from firstlight.base.config import EngineSection
from firstlight.engine.messages import (
    FINISH_ABORT,
    FINISH_REJECTED,
    EngineStats,
    SequenceOutput,
    Submit,
    TokenLogprobs,
)
from firstlight.engine.scheduler.kv_cache_manager import SequenceMemory
from firstlight.engine.scheduler.plan import Entries, StepPlan, build_plan
from firstlight.engine.scheduler.prefix_cache import PrefixCache
from firstlight.engine.scheduler.sequence import NO_SLOT, Sequence, extend
from firstlight.engine.scheduler.waiting_queue import WaitingQueue
from firstlight.engine.speculation.tree import num_within, path_of

# How many waiting sequences one step may pass over because another is just computing their prefix.
MAX_HELD = 32
# Rows of logits that drafts may bring a step to, however few sequences may run at once.
MAX_DRAFT_ROWS = 64
# A prompt chunk smaller than this is not worth its step, unless it ends the prompt.
MIN_CHUNK_TOKENS = 32


class Scheduler:
    """See the module. `section` must be resolved: no zero sizes. `end_ids` are the model's end tokens."""

    def __init__(self, section: EngineSection, num_pages: int, end_ids: Iterable[int]) -> None:
        if section.max_batched_tokens < section.max_num_seqs:
            raise ValueError("max_batched_tokens is below max_num_seqs: a decoding sequence needs one each")
        if (num_pages - 1) * section.page_size_tokens < section.max_model_len:
            raise ValueError("a pool smaller than max_model_len: its longest sequence would wait for ever")
        self._section = section
        self._end_ids = frozenset(end_ids)
        self._memory = SequenceMemory(num_pages, section.page_size_tokens, prefix_cache=section.prefix_cache)
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []
        self._by_id: dict[str, Sequence] = {}
        self._free_slots = list(range(section.max_num_seqs - 1, -1, -1))
        self._arrivals = count()
        self._max_logit_rows = min(section.max_batched_tokens, max(section.max_num_seqs, MAX_DRAFT_ROWS))
        self._planned: list[Sequence] = []
        self._sampled: list[Sequence] = []
        self._preempted_now = False
        self._finished: list[SequenceOutput] = []  # ended outside a step; handed out with the next outputs
        self._stats = EngineStats(pages_total=num_pages - 1)

    # --- intake ---

    def submit(self, submit: Submit) -> None:
        """Queues a request, or rejects it: the reason is in the outputs of the next `take_finished`."""
        if submit.request_id in self._by_id:
            reason: str | None = f"request id {submit.request_id!r} is already in use"
        else:
            reason = _rejection(submit, self._section, len(self._waiting))
        if reason is not None:
            self.finish_unrun(submit.request_id, FINISH_REJECTED, reason)
            return
        sequence = Sequence(submit, next(self._arrivals), self._end_ids, self._section.max_model_len)
        self._by_id[sequence.request_id] = sequence
        self._waiting.push(sequence)

    def abort(self, request_id: str) -> None:
        """Ends a request and frees its pages at once. Unknown ids are those that just finished: no error."""
        sequence = self._by_id.pop(request_id, None)
        if sequence is None:
            return
        if sequence.slot == NO_SLOT:
            self._waiting.remove(request_id)
        else:
            self._running.remove(sequence)
            self._give_up(sequence)
        self.finish_unrun(request_id, FINISH_ABORT, None)

    def abort_all(self) -> None:
        for request_id in list(self._by_id):
            self.abort(request_id)

    def take_finished(self) -> list[SequenceOutput]:
        """Outputs of requests that ended outside a step: rejected or aborted."""
        finished, self._finished = self._finished, []
        return finished

    @property
    def has_work(self) -> bool:
        return bool(self._by_id)

    @property
    def prefix(self) -> PrefixCache:
        return self._memory.prefix

    # --- one step ---

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run. `apply` must come before the next `plan`."""
        entries: Entries = []
        self._preempted_now = False
        budget = self._plan_decodes(entries, self._section.max_batched_tokens)
        budget = self._plan_prefills(entries, budget)
        self._admit(entries, budget)
        if not entries:
            return None
        self._planned = [sequence for sequence, _ in entries]
        plan, self._sampled = build_plan(self._stats.num_steps, entries, self._memory.take_changes())
        return plan

    def apply(
        self, plan: StepPlan, runs: list[list[int]], logprobs: dict[int, list[TokenLogprobs]] | None = None
    ) -> list[SequenceOutput]:
        """Records a step: `runs[i]` are the tokens of the i-th of the `planned_sequences`, one or more.

        A run of several begins with drafts. `logprobs`, where asked for, has an entry for each of its tokens.
        """
        page_size = self._memory.page_size_tokens
        for sequence, num in zip(self._planned, plan.counts, strict=True):
            computed = sequence.num_computed + num - len(sequence.drafts)
            sequence.num_computed = computed
            if computed // page_size > sequence.num_registered:
                self._memory.register(sequence)
        outputs: list[SequenceOutput] = []
        ended = False
        for index, (sequence, run) in enumerate(zip(self._sampled, runs, strict=True)):
            output = extend(sequence, run)
            outputs.append(output)
            if sequence.drafts:
                _settle_drafts(sequence, output, self._memory)
            if logprobs is not None and index in logprobs:
                output.logprobs = logprobs[index][: len(output.token_ids)] or None
            ended = ended or output.finish_reason is not None
        if ended:
            self._stats.num_not_numbers += sum(output.error is not None for output in outputs)
            self._retire(s for s, o in zip(self._sampled, outputs, strict=True) if o.finish_reason)
        self._stats.num_steps += 1
        self._stats.step_tokens = plan.num_tokens
        self._stats.step_sequences = len(plan.slots)
        return outputs

    def moves(self) -> tuple[list[int], list[int]]:
        """Slots whose content the next step moves, because drafts of a tree were accepted, and where to."""
        return self._memory.moves

    def stats(self) -> EngineStats:
        """The current state; the object is reused from call to call."""
        stats = self._stats
        stats.num_running = len(self._running)
        stats.num_waiting = len(self._waiting)
        stats.pages_used = self._memory.prefix.num_used
        stats.pages_cached = self._memory.prefix.num_idle
        return stats

    def most_running(self, num_tokens: int) -> int:
        """How many sequences of so many tokens run at once in an empty engine."""
        num_pages = self._memory.prefix.num_available // self._memory.pages_for(num_tokens)
        return min(self._section.max_num_seqs, num_pages)

    def forget(self) -> None:
        """What was run so far was no user's: its cached pages and its counts go."""
        self._memory.prefix.clear()
        self._stats.cache_query_tokens = self._stats.cache_hit_tokens = self._stats.num_preemptions = 0

    def planned_sequences(self) -> list[Sequence]:
        """The sequences whose tokens the sampler must choose, in order.

        Each has one row of `plan.samples`, and one more for each of its `drafts`.
        """
        return self._sampled

    def running_sequences(self) -> list[Sequence]:
        """Those of the plan, in its order."""
        return self._planned

    def decoding_sequences(self) -> list[Sequence]:
        """Those whose next step makes a token: now is the time to draft for them."""
        return [s for s in self._running if len(s.tokens) - s.num_computed == 1]

    # --- planning ---

    def _plan_decodes(self, entries: Entries, budget: int) -> int:
        # The hot loop: 256 sequences a step. Only what grows into a new page leaves the fast path.
        page_size = self._memory.page_size_tokens
        spare = min(budget, self._max_logit_rows) - len(self._running)
        for sequence in self._running:
            computed = sequence.num_computed
            if len(sequence.tokens) - computed != 1 or sequence.slot == NO_SLOT:
                continue
            num = 1
            if sequence.drafts:
                _cut_drafts(sequence, spare, self._memory, len(self._running))
                num += len(sequence.drafts)
                spare -= len(sequence.drafts)
            if computed + num > len(sequence.pages) * page_size and not self._grow(sequence, num):
                continue
            entries.append((sequence, num))
        self._drop_preempted(entries)
        return budget - sum(num for _, num in entries)

    def _plan_prefills(self, entries: Entries, budget: int) -> int:
        prefilling = self._prefilling()
        for position, sequence in enumerate(prefilling):
            if budget <= 0:
                break
            if sequence.slot == NO_SLOT:
                continue
            others_wait = position + 1 < len(prefilling) or len(self._waiting) > 0
            num = _chunk_of(sequence, budget, others_wait=others_wait)
            if self._grow(sequence, num):
                entries.append((sequence, num))
                budget -= num
        self._drop_preempted(entries)
        return budget

    def _admit(self, entries: Entries, budget: int) -> None:
        if self._preempted_now:
            return  # memory is short: what was just preempted must not come back in the same step
        held: list[Sequence] = []
        prefilling = self._prefilling()
        while budget > 0 and self._free_slots and len(held) < MAX_HELD and len(self._waiting):
            sequence = self._waiting.pop(self._memory.num_cached)
            path = self._memory.cached_path(sequence)
            if any(self._memory.is_computing(other, sequence, path) for other in prefilling):
                held.append(sequence)  # its prefix will be in the cache in a step or two
                continue
            # Admitting what cannot hold its whole prompt would preempt at once and waste the prefill.
            reserved = sum(self._memory.num_missing(other) for other in prefilling)
            if not self._memory.fits_whole(sequence, path, reserved):
                held.append(sequence)
                break
            sequence.slot = self._free_slots.pop()
            self._memory.start(sequence, path)
            self._count_cache_hit(sequence)
            self._running.append(sequence)
            prefilling.append(sequence)
            num = _chunk_of(sequence, budget, others_wait=len(self._waiting) > 0)
            grown = self._memory.grow(sequence, num)
            assert grown, "an admitted sequence has its pages"
            entries.append((sequence, num))
            budget -= num
        for sequence in held:
            self._waiting.push(sequence)

    def _prefilling(self) -> list[Sequence]:
        return [s for s in self._running if len(s.tokens) - s.num_computed > 1]

    def _count_cache_hit(self, sequence: Sequence) -> None:
        if sequence.admitted:
            return  # after a preemption it meets its own pages: no hit that a user would count
        sequence.admitted = True
        sequence.num_cached = sequence.num_computed
        self._stats.cache_query_tokens += sequence.num_prompt
        self._stats.cache_hit_tokens += sequence.num_cached

    def _grow(self, sequence: Sequence, num: int) -> bool:
        """Pages for `num` more tokens, preempting the last in order if none is left; False: itself."""
        while not self._memory.grow(sequence, num):
            victim = max((s for s in self._running if s.slot != NO_SLOT), key=lambda s: s.order)
            self._give_up(victim)
            self._waiting.push(victim)
            self._stats.num_preemptions += 1
            self._preempted_now = True
            if victim is sequence:
                return False
        return True

    def _drop_preempted(self, entries: Entries) -> None:
        if self._preempted_now:
            self._running = [s for s in self._running if s.slot != NO_SLOT]
            entries[:] = [entry for entry in entries if entry[0].slot != NO_SLOT]

    def _retire(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self._give_up(sequence)
            del self._by_id[sequence.request_id]
        self._running = [s for s in self._running if s.slot != NO_SLOT]

    def _give_up(self, sequence: Sequence) -> None:
        sequence.forget_drafts()
        self._memory.release(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = NO_SLOT

    def finish_unrun(self, request_id: str, reason: str, error: str | None) -> None:
        self._finished.append(SequenceOutput(request_id, [], finish_reason=reason, error=error))


def _rejection(submit: Submit, section: EngineSection, num_waiting: int) -> str | None:
    """Why a request cannot run here, ever or for the moment, with both numbers; None if it may queue.

    What passes can be scheduled with the whole pool to itself, so it will end.
    """
    if not submit.prompt_token_ids:
        return "the prompt is empty"
    limit = section.max_model_len
    if len(submit.prompt_token_ids) >= limit:
        return (
            f"the prompt has {len(submit.prompt_token_ids)} tokens, but this server takes at most "
            f"{limit - 1} (max_model_len {limit}, one of them for the answer)"
        )
    if num_waiting >= section.max_queue:
        return f"queue full: {num_waiting} requests wait, the limit is {section.max_queue}"
    return None


def _chunk_of(sequence: Sequence, budget: int, *, others_wait: bool) -> int:
    """Tokens of a prompt for this step: all that fits, or half the budget when others wait for theirs; so
    every prompt advances."""
    left = len(sequence.tokens) - sequence.num_computed
    if others_wait and left > budget:
        budget = max(min(budget, MIN_CHUNK_TOKENS), budget // 2)
    return min(left, budget)


def _cut_drafts(sequence: Sequence, spare: int, memory: SequenceMemory, num_running: int) -> None:
    """Keeps as many drafts as fit into `spare` rows, the sequence's length, and pages nobody will miss."""
    in_a_row = sequence.max_len - len(sequence.tokens) - 1
    if sequence.parents:
        num = num_within(sequence.parents, max(0, spare), in_a_row)
    else:
        num = max(0, min(len(sequence.drafts), spare, in_a_row))
    if not memory.has_spare_pages(sequence, num, reserved=num_running):
        num = 0
    del sequence.drafts[num:], sequence.parents[num:]


def _settle_drafts(sequence: Sequence, output: SequenceOutput, memory: SequenceMemory) -> None:
    """Drafts after their step: `output` counts them, and what was not accepted leaves no page."""
    output.num_drafted = len(sequence.drafts)
    if sequence.parents:
        accepted = output.token_ids[: output.num_accepted]
        memory.gather(sequence, path_of(sequence.drafts, sequence.parents, accepted))
    sequence.forget_drafts()
    memory.settle(sequence, output.num_accepted)
