"""A sequence while it is in the engine: its tokens, its pages, how far it is computed.

Made from a `Submit`, owned and mutated by the scheduler alone; the sampler reads it. Invariant:
`num_computed <= len(tokens)`, and the pages hold the KV of the first `num_computed` tokens. Drafts are no
tokens of it until they are accepted.
"""

from __future__ import annotations

from collections import Counter

from firstlight.engine.messages import (
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    NOT_NUMBERS,
    SequenceOutput,
    Submit,
)
from firstlight.engine.params import SamplingParams
from firstlight.engine.scheduler.prefix_cache import Node

NO_SLOT = -1
NO_TOKEN = -1  # from the sampler: this row's logits are not numbers


class Sequence:
    """`tokens` is the prompt followed by the output. `slot` is its row in the runner's state tables."""

    __slots__ = (
        "admitted",
        "arrival",
        "draft_memory",
        "drafts",
        "end_ids",
        "max_len",
        "node",
        "num_cached",
        "num_computed",
        "num_passed_over",
        "num_prompt",
        "num_registered",
        "output_counts",
        "pages",
        "params",
        "parents",
        "priority",
        "request_id",
        "slot",
        "tokens",
    )

    def __init__(self, submit: Submit, arrival: int, end_ids: frozenset[int], model_len: int) -> None:
        params = submit.params
        self.request_id = submit.request_id
        self.params: SamplingParams = params
        self.priority = submit.priority
        self.arrival = arrival
        self.tokens = list(submit.prompt_token_ids)
        self.num_prompt = len(self.tokens)
        # Tokens that end it: the model's end tokens unless ignored, and the request's own.
        self.end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else end_ids)
        wanted = model_len if params.max_tokens is None else self.num_prompt + params.max_tokens
        self.max_len = min(model_len, wanted)
        self.slot = NO_SLOT
        self.pages: list[int] = []
        self.num_computed = 0
        self.admitted = False  # has run before
        self.num_cached = 0  # prompt tokens that came from the prefix cache, at first admission
        self.num_passed_over = 0  # times that a later one went first, whose prompt was cached
        self.num_registered = 0  # pages that the prefix cache has seen
        self.node: Node | None = None  # the cache's node of the last registered page
        self.drafts: list[int] = []  # guesses of its next tokens, which the next step verifies
        self.parents: list[
            int
        ] = []  # where they are a tree, what each follows: see `engine.speculation.tree`
        self.draft_memory: object = None  # what the drafter keeps of it
        penalised = params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0
        self.output_counts: Counter[int] | None = Counter() if penalised else None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    def forget_drafts(self) -> None:
        self.drafts, self.parents = [], []

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: lower priority value, then earlier arrival."""
        return (self.priority, self.arrival)


def extend(sequence: Sequence, run: list[int]) -> SequenceOutput:
    """Appends a run up to the sequence's end: an end token, its length, or `NO_TOKEN`.

    All but the last token of `run` were drafts.
    """
    tokens = sequence.tokens
    output = SequenceOutput(sequence.request_id, run, num_cached_tokens=sequence.num_cached)
    for place, token in enumerate(run):
        if token == NO_TOKEN:
            output.token_ids = run[:place]
            output.finish_reason, output.error = FINISH_ERROR, NOT_NUMBERS
            break
        tokens.append(token)
        if sequence.output_counts is not None:
            sequence.output_counts[token] += 1
        if token in sequence.end_ids:
            output.finish_reason, output.stop_token_id = FINISH_STOP, token
        elif len(tokens) >= sequence.max_len:
            output.finish_reason = FINISH_LENGTH
        if output.finish_reason is not None:
            output.token_ids = run[: place + 1]
            break
    output.num_accepted = min(len(output.token_ids), len(run) - 1)
    return output
