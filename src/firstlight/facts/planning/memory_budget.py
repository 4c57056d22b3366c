"""Where the memory goes, computed before anything is allocated: a budget that explains itself.

Pure arithmetic. Invariant: the lines of a budget add up to no more than what may be planned for, so that our
own sizing never meets the out-of-memory killer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from firstlight.base.config import MIN_MODEL_LEN
from firstlight.base.errors import ResourceError
from firstlight.facts.description import ModelDescription

INT8_TAIL_BYTES = 8  # behind the codes of a row: a float32 scale, an int16 and an uint16, see `ops.kv_rows`
KV_VALUE_BYTES = {"float16": 2, "bfloat16": 2, "int8": 1}  # by what --kv-dtype names


@dataclass(frozen=True)
class BudgetLine:
    """One use of memory, and why it has this size."""

    name: str
    nbytes: int
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {format_bytes(self.nbytes)} ({self.reason})"


@dataclass(frozen=True, kw_only=True)
class BudgetRequest:
    """What goes into a budget of one rank. All sizes are for this rank alone.

    `available_bytes` is free on the device that holds weights and pages, shared by `num_ranks` ranks.
    `min_tokens` must fit (the longest sequence); pages for more than `max_tokens` would never be used.
    `kv_memory_bytes` fixes the size of the KV cache; 0 takes what is left. `loading_bytes` are needed for one
    matrix while it is laid out, before there are steps and pages.
    """

    available_bytes: int
    fraction: float
    weight_bytes: int
    workspace_bytes: int
    page_bytes: int
    page_size_tokens: int
    min_tokens: int
    max_tokens: int
    kv_memory_bytes: int = 0
    loading_bytes: int = 0
    remedies: tuple[str, ...] = ()  # what else would make it smaller, in the imperative
    num_ranks: int = 1


@dataclass(frozen=True)
class MemoryBudget:
    """The outcome: how many KV pages, and every use of memory in order."""

    num_pages: int
    page_size_tokens: int
    lines: tuple[BudgetLine, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that all pages hold together."""
        return self.num_pages * self.page_size_tokens

    def explain(self) -> list[str]:
        """One line for each use of memory."""
        return [str(line) for line in self.lines]


def kv_bytes_per_token(
    description: ModelDescription, row_bytes: tuple[int, ...], num_kv_heads: int | None = None
) -> int:
    """One token in all layers; `row_bytes` are those of one head's key and of its value.

    `num_kv_heads` is a rank's share. A latent is one row, of one head, on every rank.
    """
    heads = description.num_kv_heads if num_kv_heads is None else num_kv_heads
    return description.num_layers * heads * sum(row_bytes)


def kv_row_bytes(description: ModelDescription, kv_dtype: str) -> tuple[int, ...]:
    """What a token takes in one layer for each head: its key and its value, or its latent."""
    tail_bytes = INT8_TAIL_BYTES if kv_dtype == "int8" else 0
    latent = description.latent
    if latent is not None:
        return ((latent.latent_size + latent.rope_size) * KV_VALUE_BYTES[kv_dtype] + tail_bytes,)
    return (description.head_size * KV_VALUE_BYTES[kv_dtype] + tail_bytes,) * 2


def step_bytes(description: ModelDescription, num_tokens: int, num_logit_rows: int, num_heads: int) -> int:
    """Activations of a step of so many tokens, and logits with their copies, in float32.

    `num_heads` are a rank's.
    """
    width = 8 * description.hidden_size + 3 * description.intermediate_size
    latent, experts = description.latent, description.experts
    if latent is not None:  # queries in the space of latents, and what they attend to
        width += 3 * num_heads * (latent.latent_size + latent.rope_size)
    if experts is not None:  # rows of the products, and what comes of them
        width += experts.num_chosen * (2 * description.hidden_size + 3 * experts.inner_size)
    return num_tokens * width * 4 + 4 * num_logit_rows * description.vocab_size * 4


def compute_budget(request: BudgetRequest) -> MemoryBudget:
    """Divides the memory. Raises `ResourceError` with the amount needed and what to change."""
    planned_bytes = int(request.available_bytes * request.fraction) // request.num_ranks
    left_bytes = planned_bytes - request.weight_bytes - request.workspace_bytes
    min_pages = _pages(request.min_tokens, request)
    max_pages = max(min_pages, _pages(request.max_tokens, request))
    if request.kv_memory_bytes:
        num_pages, reason = request.kv_memory_bytes // request.page_bytes, "--kv-memory"
    else:
        num_pages = min(max_pages, left_bytes // request.page_bytes)
        reason = "as many as can be used" if num_pages == max_pages else "what is left"
    if num_pages < min_pages and request.kv_memory_bytes:
        raise _small_kv_memory(request, num_pages, min_pages)
    is_loadable = request.weight_bytes + request.loading_bytes <= planned_bytes
    if num_pages < min_pages or num_pages * request.page_bytes > left_bytes or not is_loadable:
        raise _too_little(request, planned_bytes, max(min_pages, num_pages))
    kv_bytes = num_pages * request.page_bytes
    tokens = num_pages * request.page_size_tokens
    shared = f" shared by {request.num_ranks} ranks" if request.num_ranks > 1 else ""
    lines = (
        BudgetLine("weights", request.weight_bytes, "in the layout of this device"),
        BudgetLine("workspace", request.workspace_bytes, "activations of the largest step, and the runtime"),
        BudgetLine(
            "kv cache",
            kv_bytes,
            f"{num_pages} pages of {request.page_size_tokens} tokens, {tokens} tokens in all: {reason}",
        ),
        BudgetLine(
            "free",
            planned_bytes - request.weight_bytes - request.workspace_bytes - kv_bytes,
            f"of {format_bytes(planned_bytes)} that may be planned for: {request.fraction:.0%} of "
            f"{format_bytes(request.available_bytes)} available{shared}",
        ),
    )
    return MemoryBudget(num_pages, request.page_size_tokens, lines)


def _pages(num_tokens: int, request: BudgetRequest) -> int:
    return -(-num_tokens // request.page_size_tokens)


def _too_little(request: BudgetRequest, planned_bytes: int, num_pages: int) -> ResourceError:
    kv_bytes = num_pages * request.page_bytes
    needed_bytes = request.weight_bytes + max(request.workspace_bytes + kv_bytes, request.loading_bytes)
    fitting_pages = (planned_bytes - request.weight_bytes - request.workspace_bytes) // request.page_bytes
    remedies = []
    if request.kv_memory_bytes:
        if fitting_pages >= _pages(request.min_tokens, request):
            most = as_size(fitting_pages * request.page_bytes, round_up=False)
            remedies.append(f"lower --kv-memory to {most}")
    elif fitting_pages * request.page_size_tokens >= MIN_MODEL_LEN:
        remedies.append(f"set --max-model-len to {fitting_pages * request.page_size_tokens} or less")
    needed_fraction = needed_bytes * request.num_ranks / max(1, request.available_bytes)
    if needed_fraction <= 0.95:
        remedies.append(f"raise --memory-fraction to {math.ceil(needed_fraction * 100) / 100:.2f}")
    remedies += request.remedies
    remedies.append("free memory, or use a smaller or more strongly quantised model")
    sentence = ", or ".join(remedies)
    shared = f", shared by {request.num_ranks} ranks" if request.num_ranks > 1 else ""
    return ResourceError(
        f"Not enough memory: a rank needs {format_bytes(needed_bytes)} (weights "
        f"{format_bytes(request.weight_bytes)}, workspace {format_bytes(request.workspace_bytes)}, KV cache "
        f"for {num_pages * request.page_size_tokens} tokens {format_bytes(kv_bytes)}), and "
        f"{format_bytes(planned_bytes)} may be planned for ({request.fraction:.0%} of "
        f"{format_bytes(request.available_bytes)} available{shared}).",
        sentence[0].upper() + sentence[1:] + ".",
    )


def _small_kv_memory(request: BudgetRequest, num_pages: int, min_pages: int) -> ResourceError:
    remedies = [
        f"Raise --kv-memory to {as_size(min_pages * request.page_bytes, round_up=True)} or more",
        "leave it out",
    ]
    if num_pages * request.page_size_tokens >= MIN_MODEL_LEN:
        remedies.append(f"set --max-model-len to {num_pages * request.page_size_tokens} or less")
    return ResourceError(
        f"--kv-memory of {format_bytes(request.kv_memory_bytes)} holds {num_pages} pages; a sequence of "
        f"{request.min_tokens} tokens needs {min_pages} ({format_bytes(min_pages * request.page_bytes)}).",
        ", or ".join(remedies) + ".",
    )


def as_size(nbytes: int, *, round_up: bool) -> str:
    """`nbytes` as a flag takes them, "180M" or "900K": rounded up it is never less, else never more."""
    unit, unit_bytes = "K", 2**10
    for larger, larger_bytes in (("M", 2**20), ("G", 2**30)):
        if nbytes >= 100 * larger_bytes:
            unit, unit_bytes = larger, larger_bytes
    return f"{-(-nbytes // unit_bytes) if round_up else nbytes // unit_bytes}{unit}"


def format_bytes(nbytes: int) -> str:
    """For people: 12.3 MB, 4.56 GB (decimal, as files and products are sold)."""
    value = float(nbytes)
    for unit in ("bytes", "kB", "MB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"
