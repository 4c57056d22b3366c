"""The drafter that comes with the package for the embedded model: used where nobody asked for another.

Called by `engine.lead` and `LLM`. It lies in `drafters/` of the repository, and a wheel brings it along in
the package (see setup.py). Invariant: it is used only for the very weights that it was made for, which its
folder names; otherwise it is left out, and the reason is said.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from firstlight.base.config import EngineSection
from firstlight.facts.sources import DEFAULT_BYTES, DEFAULT_SHA256, default_model_path

NAME = "smollm2-135m-instruct-eagle3"
TARGET = "target.json"  # which weights it was made for, written by `firstlight drafter export`


class MadeFor(msgspec.Struct, frozen=True):
    """The part of `TARGET` that decides."""

    weights_sha256: str


def with_shipped_drafter(section: EngineSection, model: str) -> tuple[EngineSection, str | None]:
    """The section with the drafter of the embedded model, and what is to be said; as it was for others."""
    if section.drafter is not None or section.device != "cpu" or not _is_default(Path(model)):
        return section, None
    folder = find()
    if folder is None:
        return section, None
    wrong = _why_not(folder)
    if wrong is not None:
        return section, f"the drafter that comes with the package is not used: {wrong}"
    return msgspec.structs.replace(section, drafter=str(folder)), "the one that comes with the package"


def find() -> Path | None:
    """Where the drafter lies: in the package, or in the checkout that the package is a part of."""
    package = Path(__file__).parents[2]
    places = (package / "drafters" / NAME, package.parents[1] / "drafters" / NAME)
    return next((place for place in places if place.is_dir()), None)


def served_sha256() -> str:
    """Of the embedded model's weights, as `drafter.target` counts: over the digests of all files.

    The file was checked when it was fetched, and so is not read again.
    """
    return hashlib.sha256(DEFAULT_SHA256.encode()).hexdigest()


def _is_default(path: Path) -> bool:
    default = default_model_path()
    return path == default and default.is_file() and default.stat().st_size == DEFAULT_BYTES


def _why_not(folder: Path) -> str | None:
    try:
        made_for = msgspec.json.decode((folder / TARGET).read_bytes(), type=MadeFor)
    except (OSError, msgspec.DecodeError) as error:
        return f"{folder / TARGET} cannot be read ({error})"
    if made_for.weights_sha256 != served_sha256():
        return f"it was made for weights {made_for.weights_sha256[:12]}, not {served_sha256()[:12]}"
    return None
