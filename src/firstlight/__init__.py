"""firstlight: a large language model from loaded to serving, and what it is doing at every second."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firstlight.engine.params import SamplingParams
    from firstlight.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # Handed on lazily: `import firstlight` must not load torch.
    if name == "LLM":
        from firstlight.llm import LLM

        return LLM
    if name == "SamplingParams":
        from firstlight.engine.params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'firstlight' has no attribute {name!r}")
