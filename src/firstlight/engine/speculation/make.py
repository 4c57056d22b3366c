"""The drafting that the settings ask for.

Invariant: what cannot be had is an error at the start, never a server that silently does not draft.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

from firstlight.base.config import EngineSection
from firstlight.base.draft_profile import parse_profile
from firstlight.base.draft_tree import NGRAM, check_drafter, refuse_trees
from firstlight.base.errors import ModelFileError
from firstlight.engine.sampling.rejection_rule import RejectionRule
from firstlight.engine.sampling.rule import Rule
from firstlight.engine.speculation.draft_model_load import DraftModelDrafting
from firstlight.engine.speculation.drafter import Drafter
from firstlight.engine.speculation.eagle3_load import Eagle3Drafting
from firstlight.engine.speculation.host import Extra, Host
from firstlight.engine.speculation.ngram import NgramDrafter
from firstlight.engine.speculation.policy import Policy
from firstlight.engine.speculation.shape import Shape, shape_of
from firstlight.engine.speculation.speculation import Speculation
from firstlight.engine.speculation.synthetic import Synthetic
from firstlight.facts.checkpoint.checkpoint import Checkpoint
from firstlight.facts.checkpoint.drafter_config import is_drafter
from firstlight.facts.checkpoint.fields import read_json_object
from firstlight.models.eagle3_file import CONFIG
from firstlight.ops.contract import Backend


class Drafting(Protocol):
    """A drafter that was read, before the target is loaded; `make` is called after."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of the target whose states it needs."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be said of it in the start-up report, once it is made."""
        ...

    @property
    def words(self) -> str:
        """A few, for the log of the start."""
        ...

    def check(self, shape: Shape) -> None:
        """Raises a `UsageError` for drafts that it cannot make."""
        ...

    def extra(self, ops: Backend) -> Extra:
        """The memory that it takes."""
        ...

    def make(self, host: Host) -> Drafter:
        """The drafter of an engine."""
        ...


class NgramDrafting:
    """Prompt lookup: it needs nothing."""

    layers = ()
    notes = ()
    words = "prompt lookup"

    def check(self, shape: Shape) -> None:
        """See `Drafting`."""
        refuse_trees(shape.top_k, "prompt lookup")

    def extra(self, ops: Backend) -> Extra:
        """Nothing."""
        return Extra()

    def make(self, host: Host) -> Drafter:
        """See `Drafting`."""
        return NgramDrafter()


def read_drafting(section: EngineSection, target: Checkpoint) -> Drafting | None:
    """Reads what `--drafter` names; None where it asks for none.

    Raises a `UsageError` for what is no drafter or cannot make such drafts, and the reader's errors for one
    that does not fit.
    """
    if section.drafter is None or not section.drafts:
        return None
    drafting = _read(section.drafter, target)
    drafting.check(shape_of(section))
    return drafting


def _read(wanted: str, target: Checkpoint) -> Drafting:
    if wanted == NGRAM:
        return NgramDrafting()
    check_drafter(wanted)
    path = Path(os.path.expanduser(wanted))
    config = path / CONFIG
    if path.is_dir() and not config.exists():
        raise ModelFileError(
            f"{path} has no {CONFIG}, so it is no drafter.", "Give the folder that holds the drafter's files."
        )
    if path.is_dir() and is_drafter(read_json_object(config)):
        return Eagle3Drafting.read(path, target.description)
    return DraftModelDrafting.read(path, target)


def make_speculation(section: EngineSection, drafter: Drafter | None) -> Speculation | None:
    """Drafting with a drafter; None without one."""
    if drafter is None:
        return None
    shape = shape_of(section)
    policy = Policy(shape.depth, tree=shape if shape.is_tree else None, adapts=section.draft_adapt)
    return Speculation(drafter, policy, _rule(section))


def describe(section: EngineSection, drafting: Drafting | None, drafter: Drafter | None) -> dict[str, Any]:
    """The lines of the start-up report."""
    if drafting is None or drafter is None:
        return {"drafter": "none"}
    how = "as many as pay, at most" if section.draft_adapt else "always"
    words = (
        f"{drafter.name}: {how} {shape_of(section).words} drafts, {section.draft_verification} verification"
    )
    if section.draft_acceptance is not None:
        words += f"; accepted by the profile {section.draft_acceptance}: answers are not the model's"
    return {"drafter": words, "drafter_notes": list(drafting.notes)}


def _rule(section: EngineSection) -> Rule | None:
    if section.draft_acceptance is not None:
        return Synthetic(parse_profile(section.draft_acceptance))
    return RejectionRule() if section.draft_verification == "rejection" else None
