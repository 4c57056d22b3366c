"""The engine as a drafter meets it: the target that it drafts for, where that lies, and how large it is.

Invariant: nothing of the target is changed through it.
"""

from __future__ import annotations

from dataclasses import dataclass

from firstlight.base.config import EngineSection
from firstlight.engine.speculation.shape import Shape, shape_of
from firstlight.engine.worker.model_runner import ModelRunner
from firstlight.models.decoder import Decoder
from firstlight.ops.contract import Backend


@dataclass(frozen=True)
class Host:
    """`section` is resolved; `num_pages` counts the null page."""

    decoder: Decoder
    runner: ModelRunner
    ops: Backend
    section: EngineSection
    num_pages: int

    @property
    def num_slots(self) -> int:
        """Places of tokens in the pages."""
        return self.num_pages * self.section.page_size_tokens

    @property
    def num_scratch(self) -> int:
        """Places behind them for drafts, which are nobody's tokens yet."""
        return self.section.max_num_seqs * self.shape.num_expanded

    @property
    def shape(self) -> Shape:
        """The most drafts of a sequence."""
        return shape_of(self.section)

    @property
    def max_positions(self) -> int:
        """Of a sequence with its drafts."""
        return self.section.max_model_len + self.section.draft_tokens


@dataclass(frozen=True)
class Extra:
    """Memory that a drafter takes on rank 0, beside the target."""

    token_bytes: int = 0  # of each token in the pages
    weight_bytes: int = 0
