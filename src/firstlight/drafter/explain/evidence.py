"""What `firstlight drafter explain` measures, as plain numbers: all that its checks may look at.

None or an empty list means that it was not measured. Invariant: nothing here says what is wrong; a check that
reads it does.
"""

from __future__ import annotations

import msgspec


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """First drafts at indices up to `end` of a document, and the share of right ones."""

    end: int
    num: int
    accuracy: float


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Teacher-forced accuracy on reference states, against the target's choice among all its tokens.

    `in_vocabulary`: of the first drafts whose right token the draft vocabulary has, `coverage` of them all.
    `by_offset[i]`: first drafts that predict the answer's token number i + 2; the last one has all later.
    """

    k: int
    num_tokens: int
    accuracy: list[float]
    conditional: list[float]
    predicted_length: float
    in_vocabulary: float = 0.0
    coverage: float = 1.0
    longest: int = 0  # tokens of the longest document that was looked at
    by_offset: list[Bucket] = []
    by_length: list[Bucket] = []


class VariantAccuracy(msgspec.Struct, frozen=True, kw_only=True):
    """The same with one thing changed. `what` says what; `key` names it for the checks."""

    key: str
    what: str
    found: Accuracy


class OwnLoop(msgspec.Struct, frozen=True, kw_only=True):
    """The chain loop without an engine, on reference states, with 95 % of bootstrap resamples."""

    k: int
    acceptance_length: float
    low: float
    high: float


class LayerMatch(msgspec.Struct, frozen=True, kw_only=True):
    """A captured state beside the reference's; `best_layer` is the state that fits it best."""

    layer: int
    cosine: float
    relative_l2: float
    best_layer: int
    best_cosine: float


class StatesMatch(msgspec.Struct, frozen=True, kw_only=True):
    """States of one stage: stored, prefill, decode or verify. `row_offset`: rows that they are late.

    `ranks_gap`: relative distance of the ranks' states from their mean, whose cosine with the reference is
    `ranks_mean_cosine`; with one rank both stay None.
    """

    stage: str
    num_tokens: int
    layers: list[LayerMatch]
    row_offset: int = 0
    row_offset_cosine: float = 0.0
    ranks_gap: float | None = None
    ranks_mean_cosine: float | None = None


class TeacherMatch(msgspec.Struct, frozen=True, kw_only=True):
    """How often the target's norm and head on the last state give what the target chose."""

    stage: str
    num: int
    agreement: float


class DraftMatch(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's drafts beside the reference's in one situation: "first", "later" or "cached".

    `by_position[i]`: equal drafts i, of those whose earlier ones were equal. The variant is the change of the
    reference that gives the engine's drafts most often.
    """

    situation: str
    num: int
    by_position: list[float]
    agreement: float
    best_variant: str = ""
    best_what: str = ""
    best_agreement: float = 0.0


class KeyMatch(msgspec.Struct, frozen=True, kw_only=True):
    """Draft keys in the engine's pages beside those of the reference, by where their tokens came from:
    "prompt", "verified" or "cached"."""

    origin: str
    num: int
    relative_l2: float


class WeightMatch(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor as the engine holds it, whose values are not those of the file."""

    name: str
    relative_difference: float
    is_the_target_s: bool


class DataFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the run folder says. `mask_shifts`: documents by how many indices their mask begins late."""

    num_documents: int = 0
    num_rendered: int = 0
    num_rendered_otherwise: int = 0
    first_difference: str = ""
    supervised_share: float | None = None
    num_without_supervision: int = 0
    mask_shifts: dict[int, int] = {}
    num_other_tokens: int = 0
    changed: list[str] = []  # of the target, since the data were made
    held_out: bool = False
    repeated_share: float = 0.0


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint as our strict reader took it, or `error` and `remedy`."""

    notes: list[str] = []
    layers: list[int] = []
    rope: str = ""
    target_rope: str = ""
    error: str = ""
    remedy: str = ""


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """What the training said of itself."""

    step: int
    accuracy: list[float]
    is_held_out: bool


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What a served engine reached, and where that was read."""

    acceptance_length: float
    k: int
    source: str


class Evidence(msgspec.Struct, kw_only=True):
    """All of it. `notes`: what could not be measured, and why."""

    target: str
    drafter: str
    loaded: Loaded
    data: DataFacts | None = None
    states: list[StatesMatch] = []
    teachers: list[TeacherMatch] = []
    greedy_agreement: float | None = None  # of the engine's plain decode with the reference
    accuracy: Accuracy | None = None
    variants: list[VariantAccuracy] = []
    own_loop: OwnLoop | None = None
    leak: float | None = None  # largest change of a draft's logits by what stands after it
    weights: list[WeightMatch] | None = None
    drafts: list[DraftMatch] = []
    draft_keys: list[KeyMatch] = []
    engine: Served | None = None  # measured in process
    engine_loop: OwnLoop | None = None  # on the text that it made
    trained: Trained | None = None
    served: Served | None = None
    notes: list[str] = []
