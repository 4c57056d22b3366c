"""The tables of `firstlight plan`.

Invariant: every number is the plan's; here they only get units.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from firstlight.facts.planning.memory_budget import format_bytes

if TYPE_CHECKING:
    from firstlight.facts.planning.deployment import Plan
    from firstlight.facts.planning.rank_memory import Device, Load
    from firstlight.facts.planning.rank_weights import LoadWork
    from firstlight.facts.planning.speculation_gain import BreakEven

_WIDTH = 120  # where the output is no terminal


def show_plan(plan: Plan, load: Load, device: Device) -> None:
    """Prints everything; without the blanks that a table pads its lines with."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=_WIDTH, highlight=False)
    with console.capture() as shown:
        _show(console, plan, load, device)
    print("\n".join(line.rstrip() for line in shown.get().splitlines()))


def _show(console: Console, plan: Plan, load: Load, device: Device) -> None:
    ranks = f"{plan.num_ranks} ranks" if plan.num_ranks > 1 else "1 rank"
    parallel = ", whole experts on each" if plan.expert_parallel else ""
    files = f"{plan.num_files} file{'s' if plan.num_files > 1 else ''}, " if plan.num_files else ""
    console.print(
        f"[bold]{escape(plan.model)}[/] ({plan.architecture}) on {ranks}{parallel}: {files}"
        f"{plan.num_tensors:,} tensors, {format_bytes(plan.total_bytes)} "
        f"({plan.total_bytes / 2**30:,.1f} GiB)"
    )
    for note in plan.notes:
        console.print(Padding(escape(note), (0, 0, 0, 2)))
    for table in (
        _weights(plan),
        _memory(plan, load),
        _loading(plan, device),
        _decode(plan, load),
        _drafts(plan, load),
    ):
        console.print()
        console.print(table)
    console.print()
    for line in _words(plan):
        console.print(Padding(line, (0, 0, 0, 2)))


def _table(title: str, *columns: str, left: int = 1) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, title_style="bold")
    for place, name in enumerate(columns):
        table.add_column(name, justify="left" if place < left else "right", overflow="fold")
    return table


def _weights(plan: Plan) -> Table:
    table = _table(
        "weights",
        "",
        "tensors",
        "in the files",
        "a token reads",
        "on a rank",
        "of tensors",
        "byte ranges",
        "shortest part",
    )
    for kind in plan.weights:
        table.add_row(
            kind.kind,
            f"{kind.num_tensors:,}",
            format_bytes(kind.total_bytes),
            format_bytes(plan.token_bytes_by_kind[kind.kind]),
            format_bytes(kind.rank_bytes),
            f"{kind.rank_tensors:,}",
            f"{kind.rank_pieces:,}",
            format_bytes(kind.smallest_piece_bytes) if kind.smallest_piece_bytes else "whole",
        )
    table.add_row(
        "all",
        f"{plan.num_tensors:,}",
        format_bytes(plan.total_bytes),
        format_bytes(plan.token_bytes),
        format_bytes(plan.rank_bytes),
        f"{sum(kind.rank_tensors for kind in plan.weights):,}",
        f"{sum(kind.rank_pieces for kind in plan.weights):,}",
        "",
    )
    return table


def _memory(plan: Plan, load: Load) -> Table:
    table = _table("memory of a rank", "", "bytes", "")
    table.columns[2].justify = "left"
    for line in plan.memory:
        table.add_row(line.name, format_bytes(line.nbytes), line.reason)
    per_token = f"{plan.kv_token_bytes:,} bytes a token on each rank, as {load.kv_dtype}"
    if plan.missing_bytes:
        table.add_row(
            "it does not fit", format_bytes(plan.missing_bytes), f"are missing; KV takes {per_token}"
        )
        return table
    fits = (
        f"{plan.sequences_at_context} sequences of {load.context:,}" if plan.sequences_at_context else "none"
    )
    table.add_row(
        "what fits",
        f"{plan.kv_tokens:,}",
        f"tokens in all, {fits}; one of up to {plan.max_model_len:,}; {per_token}",
    )
    return table


def _loading(plan: Plan, device: Device) -> Table:
    rate = f"{device.storage_bytes_per_s / 1e9:g} GB/s"
    table = _table("loading, all ranks of one host", "", "bytes", "amplification", "of experts", f"at {rate}")
    for way in plan.loaders:
        experts = "" if way.experts_amplification is None else f"{way.experts_amplification:.1f}x"
        table.add_row(
            way.name, format_bytes(way.nbytes), f"{way.amplification:.1f}x", experts, f"{way.read_s:,.0f} s"
        )
    return table


def _decode(plan: Plan, load: Load) -> Table:
    table = _table(
        f"a decode step, sequences of {load.context:,} tokens",
        "sequences", "weights read", "weights", "KV", "all-reduce", "other", "step, least", "all-reduce",
        "tokens/s, most",
    )  # fmt: skip
    for step in plan.steps:
        parts = (step.weights_s, step.kv_s, step.all_reduce_s, step.other_s, step.total_s)
        table.add_row(
            str(step.num_sequences),
            format_bytes(step.weight_bytes),
            *(f"{1e3 * part:.2f} ms" for part in parts),
            f"{step.all_reduce_share:.1%}",
            f"{step.most_tokens_per_s:,.0f}",
        )
    return table


def _drafts(plan: Plan, load: Load) -> Table:
    what = "1 sequence" if load.num_sequences == 1 else f"{load.num_sequences} sequences"
    table = _table(
        f"drafts for {what}: from which acceptance on they pay",
        "drafts", "cost in steps", "accepted over drafted", "chance of each", f"gain at {load.chance:g} each",
    )  # fmt: skip
    rows = [(str(row.num_drafts), row) for row in plan.drafts]
    if plan.observed is not None:
        rows.append((f"{plan.observed.num_drafts}, as observed", plan.observed))
    for name, row in rows:
        table.add_row(
            name,
            f"{row.round_cost:.2f}",
            "never" if row.acceptance is None else f"{row.acceptance:.0%}",
            "never" if row.chance is None else f"{row.chance:.2f}",
            f"{row.gain:.2f}x",
        )
    return table


def _words(plan: Plan) -> list[str]:
    work = plan.load_work
    lines = ["What a token reads is counted once where several ranks hold it."]
    if plan.growth[-1] > 1.0:
        growth = ", ".join(f"{value:.2f}" for value in plan.growth)
        lines[0] += (
            f" 1, 2, … tokens of a step read {growth} times as much, if they choose experts independently."
        )
    if plan.num_all_reduces:
        lines.append(
            f"A step has {plan.num_all_reduces} all-reduces, of {plan.message_bytes:,} bytes for each token; "
            f"{plan.all_reduce_words}."
        )
    explained = next((row for row in plan.drafts if _is_observed(plan, row)), None)
    if plan.observed is not None and explained is not None:
        lines.append(
            f"As observed, a step with {explained.num_drafts} drafts takes {plan.observed.round_cost:.2f} of "
            f"one without; bytes and latencies explain {explained.round_cost:.2f}."
        )
    if work.transposes_s:
        lines.append(_tensor_by_tensor(work))
    lines.append(
        "Times count bytes and latencies, no arithmetic, so they are bounds: a step takes at least so long, "
        "and tokens/s are at most so many. They are near for some tens of tokens a step."
    )
    return lines


def _is_observed(plan: Plan, row: BreakEven) -> bool:
    return plan.observed is not None and plan.observed.num_drafts == row.num_drafts


def _tensor_by_tensor(work: LoadWork) -> str:
    slow, slower = work.name_search_s
    faults, around = work.minor_faults / 1e6, work.minor_faults_around / 1e6
    return (
        f"A loader that goes tensor by tensor takes {work.views_s:.1f} s for views in Python, {slow:.0f} to "
        f"{slower:.0f} s if it searches names in a list of all experts, {work.transposes_s:.0f} s if it "
        f"transposes packed experts on one core; through a memory map it has {faults:,.0f} million page "
        f"faults ({around:,.1f} million with fault-around)."
    )
