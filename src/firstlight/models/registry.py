"""Which architectures exist: adding one is one file and one line here."""

from __future__ import annotations

from firstlight.base.errors import UnsupportedError
from firstlight.models import deepseek, llama, minimax_m2, mistral, mixtral, qwen2, qwen3, qwen3_moe
from firstlight.models.decoder import Architecture

ARCHITECTURES: dict[str, Architecture] = {
    "deepseek_v2": deepseek.build,
    "deepseek_v3": deepseek.build,
    "kimi_k2": deepseek.build,
    "llama": llama.build,
    "minimax_m2": minimax_m2.build,
    "mistral": mistral.build,
    "mixtral": mixtral.build,
    "qwen2": qwen2.build,
    "qwen3": qwen3.build,
    "qwen3_moe": qwen3_moe.build,
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
