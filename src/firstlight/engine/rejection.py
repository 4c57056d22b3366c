"""Why a request cannot run here, ever or for the moment: asked by the scheduler before it queues anything.

Invariants: what can never run is not told to come back; what passes can be scheduled with the whole pool to
itself, so it will end.
"""

from __future__ import annotations

from firstlight.base.config import EngineSection
from firstlight.engine.messages import Submit


def rejection(submit: Submit, section: EngineSection, num_waiting: int) -> str | None:
    """The reason, in a sentence that names both numbers; None if the request may queue."""
    if not submit.prompt_token_ids:
        return "the prompt is empty"
    limit = section.max_model_len
    if len(submit.prompt_token_ids) >= limit:
        return (
            f"the prompt has {len(submit.prompt_token_ids)} tokens, but this server takes at most "
            f"{limit - 1} (max_model_len {limit}, one of them for the answer)"
        )
    if num_waiting >= section.max_queue:
        return f"queue full: {num_waiting} requests wait, the limit is {section.max_queue}"
    return None
