"""What one step runs: with orders to record its times, all that crosses from the scheduler to the ranks.

Prefill, chunk, decode and the verification of drafts are one thing here: `counts[i]` tokens of a sequence
from position `starts[i]` on. Rank 0 makes the plan and sends it to the other ranks, so ranks cannot diverge.
Torch-free. Invariant: `sum(counts) == len(tokens)`, and every page that a token needs was announced in
`pages` of this plan or an earlier one.
"""

from __future__ import annotations

import msgspec

from firstlight.engine.scheduler.kv_cache_manager import Changes
from firstlight.engine.scheduler.sequence import Sequence

Entries = list[tuple[Sequence, int]]  # who runs, and how many of its tokens and drafts


class StepPlan(msgspec.Struct, array_like=True, tag=0):
    """Parallel lists, one entry a sequence; `tokens` is flat, in the order of the entries."""

    step: int
    slots: list[int]  # row in the runner's state tables
    starts: list[int]  # position of the first token
    counts: list[int]  # how many tokens
    tokens: list[int]
    samples: list[int]  # rows (places in `tokens`) whose logits are wanted, ascending
    # (slot, index of the first page in the sequence, page ids): changes of the page tables, applied first.
    pages: list[tuple[int, int, list[int]]]
    # Sequences whose drafts are a tree: place in `slots`, and the drafts' parents; see
    # `engine.speculation.tree`.
    trees: list[tuple[int, list[int]]] = msgspec.field(default_factory=list)
    # Slots of the pool whose keys and values are copied, before anything else, and where to.
    moves: tuple[list[int], list[int]] = msgspec.field(default_factory=lambda: ([], []))

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


class Recording(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """From rank 0 to the others, between two plans: record steps' times, or hand in what was recorded."""

    is_on: bool


encode_plan = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(StepPlan | Recording)


def decode_plan(frame: bytes) -> StepPlan | Recording:
    return _decoder.decode(frame)


def build_plan(step: int, entries: Entries, changes: Changes) -> tuple[StepPlan, list[Sequence]]:
    """The plan, and the sequences that get tokens by it, in the order of its samples.

    A sequence gets a row of logits for its last token, and for each of its drafts.
    """
    slots: list[int] = []
    starts: list[int] = []
    counts: list[int] = []
    tokens: list[int] = []
    samples: list[int] = []
    sampled: list[Sequence] = []
    trees: list[tuple[int, list[int]]] = []
    for sequence, num in entries:
        start = sequence.num_computed
        slots.append(sequence.slot)
        starts.append(start)
        counts.append(num)
        if num == 1:
            tokens.append(sequence.tokens[start])
        else:
            tokens.extend(sequence.tokens[start : start + num])
        if sequence.drafts:
            if sequence.parents:
                trees.append((len(slots) - 1, sequence.parents))
            first = len(tokens) - 1
            tokens.extend(sequence.drafts)
            samples.extend(range(first, len(tokens)))
            sampled.append(sequence)
        elif start + num == len(sequence.tokens):
            samples.append(len(tokens) - 1)
            sampled.append(sequence)
    plan = StepPlan(step, slots, starts, counts, tokens, samples, changes.pages, trees, changes.moves)
    return plan, sampled
