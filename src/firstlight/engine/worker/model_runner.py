"""Runs a step plan on one rank: page tables, tensors, forward pass.

Owns the page tables, one row for each slot, which change only by what a plan announces; so every rank has the
same. Invariant: between two steps nothing of a step is kept but its captured states and its rows.

Shapes: T tokens in the step, S sequences, P pages of the longest one, L logit rows, V vocabulary, C captured
layers, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.speculation.tree import lay_out
from firstlight.engine.worker.kv_pool import KVPool
from firstlight.engine.worker.replay import RecordedReplay, Replay, full_plan
from firstlight.models.batch import ForwardBatch, OwnRows
from firstlight.models.decoder import Decoder
from firstlight.ops.contract import AttentionShape, Backend, StepRows

MIN_ROWS = 32  # of the longest prompt: with fewer there is nothing to gain


class ModelRunner:
    """See the module. `turn_table` has a row for every position up to the model's length."""

    def __init__(
        self,
        replay: Replay | RecordedReplay,
        ops: Backend,
        pool: KVPool,
        turn_table: torch.Tensor,
        shape: AttentionShape,
        tables: PageTables,
    ) -> None:
        self._replay, self._ops, self._pool = replay, ops, pool
        self._turn_table, self._shape = turn_table, shape
        self._tables = tables
        self._turns = turn_table.cpu().numpy()
        self._states_CH: tuple[int, int] | None = None
        self._states_TCH: torch.Tensor | None = None
        self._rows: StepRows | None = None
        pool.zero_null_page(tables.page_size)

    @property
    def replay(self) -> Replay | RecordedReplay:
        """How forward passes reach the device."""
        return self._replay

    def capture(self, model: Decoder, layers: Sequence[int]) -> None:
        """From now on every step of `model`, which the replay runs, leaves its `states` of these layers."""
        self._states_CH = (len(layers), model.description.hidden_size)
        if isinstance(self._replay, RecordedReplay):
            self._replay.capture(layers)
        else:
            model.capture(layers)

    @property
    def states(self) -> torch.Tensor:
        """The captured states of the last step's rows, float32 [T, C, H]; the next step overwrites them.

        Row t belongs to `plan.tokens[t]`; place c to the c-th of the layers that were asked for.
        """
        assert self._states_TCH is not None, "nothing was captured"
        return self._states_TCH

    @property
    def rows(self) -> StepRows:
        """Where the last step's rows lie."""
        assert self._rows is not None, "no step has run"
        return self._rows

    def run(self, plan: StepPlan) -> torch.Tensor:
        """Logits of the rows in `plan.samples`, float32 [L, V]; on every rank."""
        if plan.moves[0]:
            self._pool.move(*plan.moves)
        rows = self._rows = self._tables.rows(plan)
        logit_rows = np.array(plan.samples, dtype=np.int64)
        if isinstance(self._replay, RecordedReplay):
            logits = self._replay.run(plan, rows, self._turns, logit_rows)
            if self._states_CH is not None:
                self._states_TCH = self._replay.states(len(plan.tokens))
            return logits
        with torch.inference_mode():
            batch = self._build(plan, rows, logit_rows)
            self._states_TCH = batch.states_TCH
            return self._replay.run(batch)

    def _build(self, plan: StepPlan, rows: StepRows, logit_rows: np.ndarray) -> ForwardBatch:
        device = self._ops.device
        positions = torch.from_numpy(rows.positions_T).to(device)
        return ForwardBatch(
            tokens_T=torch.tensor(plan.tokens, dtype=torch.int64, device=device),
            turn_TD=self._turn_table.index_select(0, positions),
            write_slots_T=torch.from_numpy(rows.write_slots_T).to(device),
            logit_rows_L=torch.from_numpy(logit_rows).to(device),
            attention=self._ops.plan_attention(rows, self._shape),
            full_attention=full_plan(rows, self._shape, self._ops),
            keys=self._pool.keys,
            values=self._pool.values,
            states_TCH=self._room(len(plan.tokens)),
            own=_prompt_only_attention(rows, self._shape, self._ops),
        )

    def _room(self, num_rows: int) -> torch.Tensor | None:
        if self._states_CH is None:
            return None
        return torch.empty(num_rows, *self._states_CH, device=self._ops.device)


class PageTables:
    """The pages of the sequence in each slot, and the rows of a plan over them."""

    def __init__(self, num_slots: int, max_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._pages = np.zeros((num_slots, max_pages), dtype=np.int64)
        self._numbers = np.arange(num_slots)

    def rows(self, plan: StepPlan) -> StepRows:
        """Applies the plan's changes and lays out its rows."""
        for slot, first, pages in plan.pages:
            self._pages[slot, first : first + len(pages)] = pages
        starts = np.array(plan.starts, dtype=np.int64)
        counts = np.array(plan.counts, dtype=np.int64)
        if len(plan.tokens) == len(counts) <= len(self._numbers):  # the hot path: a token each
            sequence_T, positions_T = self._numbers[: len(counts)], starts
        else:
            sequence_T = np.repeat(np.arange(len(counts)), counts)
            first_row = counts.cumsum() - counts
            positions_T = np.arange(len(sequence_T)) + (starts - first_row)[sequence_T]
        places_T, branches_TW = positions_T, None
        if plan.trees:
            positions_T = positions_T.copy()
            branches_TW = lay_out(plan.trees, starts, counts.cumsum() - counts, positions_T)
        longest = -(-int((starts + counts).max()) // self.page_size)
        table_SP = self._pages[np.array(plan.slots), :longest]
        pages_T = table_SP[sequence_T, places_T // self.page_size]
        return StepRows(
            positions_T=positions_T,
            sequence_T=sequence_T,
            write_slots_T=pages_T * self.page_size + places_T % self.page_size,
            page_table_SP=table_SP,
            starts=plan.starts,
            counts=plan.counts,
            page_size=self.page_size,
            branches_TW=branches_TW,
        )


def _prompt_only_attention(rows: StepRows, shape: AttentionShape, ops: Backend) -> OwnRows | None:
    """Attention within the step alone, for whole prompts of a model with latent attention; None for others.

    Such a step may make keys and values of its own latents, which is less work than to look at latents with
    every head. Not where a sequence has a history, nor where the operators promise bits.
    """
    if shape.expanded is None or ops.row_invariant or any(rows.starts) or max(rows.counts) < MIN_ROWS:
        return None
    table_SP = np.zeros((len(rows.counts), max(rows.counts)), dtype=np.int64)
    slots_T = np.arange(1, len(rows.positions_T) + 1)
    table_SP[rows.sequence_T, rows.positions_T] = slots_T
    mine = StepRows(
        positions_T=rows.positions_T,
        sequence_T=rows.sequence_T,
        write_slots_T=slots_T,
        page_table_SP=table_SP,
        starts=rows.starts,
        counts=rows.counts,
        page_size=1,
    )
    return OwnRows(ops.plan_attention(mine, shape.expanded))
