"""The drafter that comes with the package for the embedded model: used where nobody asked for another.

It lies in `drafters/` of the repository, and a wheel brings it along in the package (see setup.py).
Invariant: it is used only for the very weights that it was made for, which its folder names; otherwise it is
left out, and the reason is said.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from firstlight.base.config import EngineSection
from firstlight.base.environment import cache_place
from firstlight.base.files import known_sha256
from firstlight.facts.checkpoint.checkpoint import Checkpoint
from firstlight.facts.sources import DEFAULT_BYTES, DEFAULT_FILE, DEFAULT_NAME, DEFAULT_SHA256, DEFAULT_SHAPE

NAME = "smollm2-135m-instruct-eagle3"
DIGESTS = "digests"  # of the cache folder: what files of the embedded model's size are
_OTHER_BYTES = (
    f"this has the shape of {DEFAULT_NAME} and other bytes than {DEFAULT_FILE}, which it was made for"
)
TARGET = "target.json"  # which weights it was made for, written by `firstlight drafter export`


class MadeFor(msgspec.Struct, frozen=True):
    """The part of `TARGET` that decides."""

    weights_sha256: str


def with_shipped_drafter(section: EngineSection, checkpoint: Checkpoint) -> tuple[EngineSection, str | None]:
    """The section with the drafter of the embedded model, and what is to be said; as it was for others.

    The embedded model is known by its bytes, wherever they lie and whatever their file is called.
    """
    if section.drafter is not None or section.device != "cpu":
        return section, None
    folder = find()
    if folder is None:
        return section, None
    other = _why_not_embedded(checkpoint)
    if other is not None:
        looks_alike = bool(other) or _shape(checkpoint) == DEFAULT_SHAPE
        return section, _not_used(other or _OTHER_BYTES, folder) if looks_alike else None
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
    """Of the embedded model's weights, as `drafter.target` counts: over the digests of all files."""
    return hashlib.sha256(DEFAULT_SHA256.encode()).hexdigest()


def _why_not_embedded(checkpoint: Checkpoint) -> str | None:
    """None for the embedded model; empty where nothing suggests that it could be; else the reason."""
    path = Path(checkpoint.path)
    try:
        if not path.is_file() or path.stat().st_size != DEFAULT_BYTES:
            return ""
        digest = known_sha256(path, cache_place(DIGESTS))
    except OSError as error:
        return f"it cannot be told whether this is {DEFAULT_NAME}: {error.strerror or error}"
    return None if digest == DEFAULT_SHA256 else _OTHER_BYTES


def _shape(checkpoint: Checkpoint) -> tuple[int, int, int]:
    d = checkpoint.description
    return d.num_layers, d.hidden_size, d.vocab_size


def _not_used(reason: str, folder: Path) -> str:
    said = f"the drafter that comes with the package is not used: {reason}"
    return f"{said}; --drafter {folder} uses it all the same"


def _why_not(folder: Path) -> str | None:
    try:
        made_for = msgspec.json.decode((folder / TARGET).read_bytes(), type=MadeFor)
    except (OSError, msgspec.DecodeError) as error:
        return f"{folder / TARGET} cannot be read ({error})"
    if made_for.weights_sha256 != served_sha256():
        return f"it was made for weights {made_for.weights_sha256[:12]}, not {served_sha256()[:12]}"
    return None
