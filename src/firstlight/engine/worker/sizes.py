"""Sizes of the engine from the memory there is: the model's length, KV pages, and whether two layouts fit.

Invariant: what is planned here is what is allocated later, so that our own sizing never meets the
out-of-memory killer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from firstlight.base.config import STEP_SIZES, EngineSection
from firstlight.base.errors import ResourceError
from firstlight.engine.scheduler.scheduler import MAX_DRAFT_ROWS
from firstlight.engine.speculation.host import Extra
from firstlight.engine.worker.kv_pool import token_row_bytes
from firstlight.facts.description import ModelDescription
from firstlight.facts.planning.memory_budget import (
    BudgetRequest,
    MemoryBudget,
    compute_budget,
    format_bytes,
    kv_bytes_per_token,
    step_bytes,
)
from firstlight.loading.reader import AHEAD_BYTES
from firstlight.models.declare import Declaration
from firstlight.ops.contract import AttentionShape, MatrixKind

# Without --kv-memory: this much KV, or one sequence of the full length, whichever is more. A model server on
# a laptop should not fill its memory with old prefixes.
DEFAULT_KV_BYTES = 288 * 2**20
SMALLEST_MODEL_LEN = 512
# A second layout of the weights is allowed if they take no more than this share of what may be planned for.
SECOND_LAYOUT_SHARE = 0.3
# Sampling among the whole vocabulary (top-p of a flat distribution) beside `step_bytes`: for each logit an
# 8-byte id, and shares, their sums and noise in float32.
SAMPLING_BYTES = 24
# What Python, PyTorch and the C library's heap grow by in the first steps: measured, whatever the model.
RUNTIME_BYTES = 24 * 2**20
LAST_FRACTION = 0.97  # of the available memory, before a start is refused
# Steps are made smaller where memory is short, down to these, before the model's length is.
SMALLEST_STEP = {"max_batched_tokens": 64, "max_num_seqs": 8}


@dataclass(frozen=True)
class Needs:
    """What a model asks of memory on this rank: layers as declared, matrices, heads, and a drafter."""

    description: ModelDescription
    declare: Declaration
    kinds: Sequence[MatrixKind]
    shape: AttentionShape
    extra: Extra = Extra()  # of the drafter


@dataclass(frozen=True)
class Sizes:
    """The resolved section, the number of pages with the null page, and the lines of the report."""

    section: EngineSection
    num_pages: int
    notes: tuple[str, ...]


def allows_two_layouts(kinds: Sequence[MatrixKind], available_bytes: int, section: EngineSection) -> bool:
    """Whether memory is plentiful enough for one layout for few rows and another for many."""
    one_layout_bytes = sum(kind.shape[0] * kind.shape[1] * 2 for kind in kinds)
    return one_layout_bytes <= SECOND_LAYOUT_SHARE * section.memory_fraction * available_bytes


def resolve_sizes(section: EngineSection, needs: Needs, available_bytes: int) -> Sizes:
    """Fills in the zeros of the section. Raises a `ResourceError` with the remedy."""
    model_len = section.max_model_len or needs.description.max_position
    asked = section
    section, budget, fitting_len = _fit_step(asked, needs, available_bytes, model_len)
    notes = budget.explain() + _density_notes(needs) + _draft_notes(needs.extra, section)
    notes[:0] = _step_notes(asked, section)
    if fitting_len < model_len:
        why = "--kv-memory holds no more" if section.kv_memory_bytes else "memory does not suffice"
        notes.insert(0, f"max_model_len {fitting_len} instead of the model's {model_len}: {why}")
    section = structs.replace(section, max_model_len=fitting_len)
    return Sizes(section, budget.num_pages + 1, tuple(notes))


def _fit_step(
    section: EngineSection, needs: Needs, available_bytes: int, model_len: int
) -> tuple[EngineSection, MemoryBudget, int]:
    """The step, its budget and the length. Before a start is refused, nearly all memory is planned for."""
    if "memory_fraction" in section.shrinks:
        with contextlib.suppress(ResourceError):
            return _longest(section, needs, available_bytes, model_len)
        fraction = max(LAST_FRACTION, section.memory_fraction)
        section = structs.replace(section, memory_fraction=fraction)
    return _longest(section, needs, available_bytes, model_len)


def _longest(
    section: EngineSection, needs: Needs, available_bytes: int, model_len: int
) -> tuple[EngineSection, MemoryBudget, int]:
    """The longest sequence that the smallest step leaves room for, and the largest step that does too."""
    *larger, smallest = _smaller_steps(section)
    budget, fitting_len = _fit(_request(smallest, needs, available_bytes), model_len, smallest)
    for step in larger:
        request = _with_length(_request(step, needs, available_bytes), fitting_len)
        with contextlib.suppress(ResourceError):
            return step, compute_budget(request), fitting_len
    return smallest, budget, fitting_len


def _smaller_steps(section: EngineSection) -> Iterator[EngineSection]:
    """The section, and then with half the step, as far as nobody asked for its size."""
    while True:
        yield section
        sizes = {name: _half(section, name) for name in STEP_SIZES if name in section.shrinks}
        smaller = structs.replace(section, **sizes)
        if "max_batched_tokens" in sizes:  # each sequence needs a token in every step
            least = max(smaller.max_batched_tokens, smaller.max_num_seqs)
            smaller = structs.replace(smaller, max_batched_tokens=least)
        if _step(smaller) == _step(section):
            return
        section = smaller


def _half(section: EngineSection, name: str) -> int:
    size = int(getattr(section, name))
    return min(size, max(SMALLEST_STEP[name], size // 2))


def _step(section: EngineSection) -> tuple[int, int]:
    return section.max_batched_tokens, section.max_num_seqs


def _step_notes(asked: EngineSection, section: EngineSection) -> list[str]:
    if _step(asked) == _step(section):
        return []
    (tokens, sequences), before = _step(section), _step(asked)
    return [
        f"max_batched_tokens {tokens} instead of {before[0]}, max_num_seqs {sequences} instead of "
        f"{before[1]}: memory does not suffice for larger steps"
    ]


def _with_length(request: BudgetRequest, model_len: int) -> BudgetRequest:
    default_tokens = DEFAULT_KV_BYTES // request.page_bytes * request.page_size_tokens
    return replace(request, min_tokens=model_len, max_tokens=max(model_len, default_tokens))


def _fit(request: BudgetRequest, wanted: int, section: EngineSection) -> tuple[MemoryBudget, int]:
    """The budget for a length of `wanted`; unless the user set it, for half as long as often as it takes."""
    shortest = wanted if section.max_model_len else min(wanted, SMALLEST_MODEL_LEN)
    model_len = wanted
    while True:
        try:
            return compute_budget(_with_length(request, model_len)), model_len
        except ResourceError:
            model_len //= 2
            if model_len < shortest:
                raise


def _request(section: EngineSection, needs: Needs, available_bytes: int) -> BudgetRequest:
    ops, description = needs.declare.ops, needs.description
    rows = token_row_bytes(needs.shape, ops)
    token_bytes = kv_bytes_per_token(description, rows, needs.shape.num_kv_heads)
    weight_bytes = sum(ops.resident_bytes(kind) for kind in needs.kinds) + _embedding_bytes(needs)
    weight_bytes += needs.extra.weight_bytes
    return BudgetRequest(
        available_bytes=available_bytes,
        fraction=section.memory_fraction,
        weight_bytes=weight_bytes,
        workspace_bytes=_workspace_bytes(section, needs),
        loading_bytes=RUNTIME_BYTES + _loading_bytes(needs),
        page_bytes=(token_bytes + needs.extra.token_bytes) * section.page_size_tokens,
        page_size_tokens=section.page_size_tokens,
        min_tokens=0,
        max_tokens=0,
        kv_memory_bytes=section.kv_memory_bytes,
        num_ranks=needs.declare.group.size if ops.device.type == "cpu" else 1,
        remedies=_remedies(section, needs),
    )


def _remedies(section: EngineSection, needs: Needs) -> tuple[str, ...]:
    """What was asked for and takes memory: it was not made smaller, but could be."""
    found = [
        f"lower --{flag} to {SMALLEST_STEP[name]}"
        for name, flag in STEP_SIZES.items()
        if getattr(section, name) > SMALLEST_STEP[name]
    ]
    if needs.extra != Extra():
        found.append("serve without drafts (--drafter none)")
    return tuple(found)


def _density_notes(needs: Needs) -> list[str]:
    """Bytes a parameter of the resident matrices: of all, and by the file's format."""
    found: dict[str, list[tuple[int, int]]] = {}
    for kind in needs.kinds:
        sizes = (kind.shape[0] * kind.shape[1], needs.declare.ops.resident_bytes(kind))
        found.setdefault(kind.format, []).append(sizes)

    def density(sizes: list[tuple[int, int]]) -> str:
        return f"{sum(nbytes for _, nbytes in sizes) / sum(num for num, _ in sizes):.2f}"

    if not found:
        return []
    each = ", ".join(f"{name} {density(sizes)}" for name, sizes in found.items())
    return [f"bytes a parameter: {density([one for sizes in found.values() for one in sizes])} ({each})"]


def _draft_notes(extra: Extra, section: EngineSection) -> list[str]:
    if extra == Extra():
        return []
    page_bytes = format_bytes(extra.token_bytes * section.page_size_tokens)
    return [f"of these the drafter: {format_bytes(extra.weight_bytes)} of weights, {page_bytes} of each page"]


def _embedding_bytes(needs: Needs) -> int:
    description, declare = needs.description, needs.declare
    if description.tie_embeddings and declare.ops.hands_out_rows and declare.group.size == 1:
        return 0
    return description.vocab_size * description.hidden_size * 2


def _workspace_bytes(section: EngineSection, needs: Needs) -> int:
    """The largest step: activations, logits and their copies; and what the process grows by."""
    description, ops = needs.description, needs.declare.ops
    most = section.max_num_seqs
    if section.drafts:
        drafts = section.draft_nodes or section.draft_tokens * section.draft_top_k
        most = max(most, min(MAX_DRAFT_ROWS, most * (1 + drafts)))
    most = min(most, section.max_batched_tokens)
    step = step_bytes(description, section.max_batched_tokens, most, needs.shape.num_heads)
    scores = ops.attention_bytes(needs.shape, section.max_batched_tokens, description.max_position)
    sampling = most * description.vocab_size * SAMPLING_BYTES
    return step + sampling + scores + RUNTIME_BYTES


def _loading_bytes(needs: Needs) -> int:
    """One matrix being laid out, and what was read ahead of it."""
    ops = needs.declare.ops
    ahead = min(AHEAD_BYTES, sum(ops.resident_bytes(kind) for kind in needs.kinds))
    return max(ops.loading_bytes(kind) for kind in needs.kinds) + ahead
