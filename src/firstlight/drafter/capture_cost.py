"""What captured states cost: the same steps with and without them, in turns.

Invariant: both engines run the same documents with the same kernels, one after the other, so that a busy
machine slows both.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from firstlight.base.errors import UsageError
from firstlight.drafter.answers import read_answers
from firstlight.drafter.capture import (
    MAX_DOCUMENTS,
    MIN_DOCUMENT_TOKENS,
    STEP_TOKENS,
    Capturer,
    CaptureSettings,
    open_states,
)
from firstlight.drafter.stages import read_manifest
from firstlight.drafter.target import Target

TURNS = 5


def measure_capture(out: Path, target: Target, settings: CaptureSettings, threads: int) -> dict[str, float]:
    """Tokens a second with states and without (medians of turns) and their ratio, kept in the manifest."""
    group = _one_step(out)
    num_tokens = sum(len(tokens) for tokens in group)
    plain = Capturer(target, settings, threads, keeps_states=False)
    capturer = Capturer(target, settings, threads)
    took_s: dict[str, list[float]] = {"with": [], "without": []}
    for turn in range(TURNS + 1):
        for name, run in (("without", plain.run), ("with", capturer.states_of)):
            began_s = time.perf_counter()
            run(group)
            if turn:  # the first one warms up
                took_s[name].append(time.perf_counter() - began_s)
    rates = {name: num_tokens / statistics.median(times) for name, times in took_s.items()}
    found = {
        "capture_tokens_per_s": round(rates["with"], 1),
        "prefill_tokens_per_s": round(rates["without"], 1),
        "share_of_prefill": round(rates["with"] / rates["without"], 4),
    }
    open_states(out, target, settings).note(found)
    return found


def _one_step(out: Path) -> list[list[int]]:
    """Documents that fill a step."""
    group: list[list[int]] = []
    for name in sorted(read_manifest(out / "generate").files):
        for answer in read_answers(out / "generate", name):
            tokens = answer.tokens
            if len(group) == MAX_DOCUMENTS or sum(map(len, group)) + len(tokens) > STEP_TOKENS:
                return group
            if len(tokens) >= MIN_DOCUMENT_TOKENS:
                group.append(tokens)
    if not group:
        raise UsageError("No answer is short enough for one step.", "Lower --max-tokens of generate.")
    return group
