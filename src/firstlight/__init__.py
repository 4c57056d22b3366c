"""firstlight: a large language model from loaded to serving, and what it is doing at every second."""

from __future__ import annotations

TYPE_CHECKING = False  # not from `typing`, whose import takes half of the time to our first own line

if TYPE_CHECKING:
    from typing import Any

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
