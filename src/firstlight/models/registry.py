"""Which architectures exist: adding one is one file and one line here."""

from __future__ import annotations

from firstlight.base.errors import UnsupportedError
from firstlight.models import llama, mistral, qwen2, qwen3
from firstlight.models.decoder import Architecture

ARCHITECTURES: dict[str, Architecture] = {
    "llama": llama.build,
    "mistral": mistral.build,
    "qwen2": qwen2.build,
    "qwen3": qwen3.build,
}


def find(architecture: str) -> Architecture:
    """The builder of an architecture. Raises `UnsupportedError` with the list of those that exist."""
    build = ARCHITECTURES.get(architecture)
    if build is None:
        raise UnsupportedError(
            f"the architecture {architecture!r} is not supported",
            f"Supported: {', '.join(ARCHITECTURES)}. docs/add-a-model.md tells how to add one.",
        )
    return build
