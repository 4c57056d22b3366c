"""The acceptance length that a running server reports.

Read from /metrics in the words of firstlight, vLLM or SGLang. Invariant: a server that says nothing of drafts
is an error, never a length of 1.
"""

from __future__ import annotations

import re

import httpx

from firstlight.base.errors import EngineError, UsageError
from firstlight.drafter.explain.evidence import Served
from firstlight.serve.http.outgoing import open_client

DEADLINE_S = 10.0
_LINE = re.compile(r"^([a-zA-Z_:]+)(\{[^}]*\})? +([0-9.eE+-]+)", re.MULTILINE)
_K = re.compile(r'k="(\d+)"')
# Verified steps and accepted drafts, by engine.
_TOTALS = (
    ("firstlight:draft_verified_steps_total", "firstlight:draft_accepted_tokens_total"),
    ("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"),
)
_SGLANG = "sglang:spec_accept_length"


def ask_server(url: str, k: int) -> Served:
    """What the server has reached so far; `k` where it does not say its own. Raises `FirstlightError`s."""
    with open_client(url, timeout=DEADLINE_S) as http:
        address = f"{str(http.base_url).rstrip('/')}/metrics"
        try:
            reply = http.get("/metrics").raise_for_status()
        except httpx.HTTPError as error:
            raise EngineError(
                f"{address} does not answer: {error}.", "Check --url, or give --served-acceptance."
            ) from error
    return read_metrics(reply.text, address, k)


def read_metrics(text: str, source: str, k: int) -> Served:
    """The acceptance length, the bonus token included."""
    totals: dict[str, float] = {}
    for name, labels, value in _LINE.findall(text):
        totals[name] = totals.get(name, 0.0) + float(value)
        said = _K.search(labels or "")
        if said and name in _TOTALS[0]:
            k = int(said[1])
    for steps, accepted in _TOTALS:
        if totals.get(steps):
            length = 1.0 + totals.get(accepted, 0.0) / totals[steps]
            return Served(acceptance_length=length, k=k, source=source)
    if totals.get(_SGLANG):
        return Served(acceptance_length=totals[_SGLANG], k=k, source=source)
    raise UsageError(
        f"{source} says nothing of verified drafts.",
        "Send the server some requests first, or give --served-acceptance with --drafts.",
    )
