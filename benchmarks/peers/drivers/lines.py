"""Orders and answers as JSON lines: what every driver of an engine in process shares.

A driver runs in the peer's own environment, so this file imports nothing but the standard library. Invariant:
an order is answered by exactly one line on the descriptor that was standard output; whatever a library prints
goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

# (time to first token, time to last token, number of tokens) of a request, in seconds from the load's start.
Timed = tuple[float, float, int]
Complete = Callable[[list[list[int]], int, int], tuple[float, list[Timed]]]


def open_answers() -> Any:
    """The place for answers. Call it before anything is loaded that may print."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def serve(answers: Any, complete: Complete, chat: Callable[[str, int], str]) -> None:
    """Says hello (the first token is there) and does what is asked until standard input ends."""
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        try:
            reply = _answer(json.loads(line), complete, chat)
        except Exception:
            reply = {"error": traceback.format_exc(limit=3)[-600:]}
        print(json.dumps(reply), file=answers)


def _answer(order: dict[str, Any], complete: Complete, chat: Callable[[str, int], str]) -> dict[str, Any]:
    if order["do"] == "chat":
        return {"text": chat(order["question"], order["num_new"])}
    duration_s, requests = complete(order["prompts"], order["num_new"], order["concurrency"])
    return {"duration_s": duration_s, "requests": requests}
