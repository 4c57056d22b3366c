"""The whole start as values: what /startup shows, what an error message says, what `firstlight ps` lists.

Pure. Invariant: the run is as far as its slowest process, and a number that is not known is absent, never
guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from firstlight.base.failure import Failure
from firstlight.base.phases import READY
from firstlight.launch.processes.commands import title
from firstlight.launch.public.startup_responder import Picture
from firstlight.launch.terminal.amounts import amount
from firstlight.launch.timeline.progress import PhaseTrack

_LONGEST_RETRY_S = 60


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """What a picture is made of.

    `status` as in `Picture`; `verdict`: why it does not go on; `places`: the order of this engine's phases.
    """

    status: str
    model: str
    places: Mapping[str, int]
    tracks: Mapping[str, PhaseTrack] = {}
    pids: Mapping[str, int] = {}
    verdict: Failure | None = None


def picture(situation: Situation) -> Picture:
    """The picture of a moment."""
    slowest = _slowest(situation)
    startup: dict[str, Any] = {
        "status": situation.status,
        "model": situation.model,
    }
    if slowest is not None:
        startup |= _values(slowest)
    startup["processes"] = [
        {"name": name, "pid": situation.pids.get(name), "rank": track.last.rank, **_values(track)}
        for name, track in situation.tracks.items()
    ]
    if situation.verdict is not None:
        startup["verdict"] = verdict_values(situation.verdict)
    retry_after_s = _retry_after_s(situation, slowest)
    return Picture(situation.status, _message(situation, slowest), retry_after_s, startup)


def verdict_values(failure: Failure) -> dict[str, Any]:
    """A verdict as it stands in /startup."""
    return {"message": failure.message, "what_to_do": failure.hint}


def described(track: PhaseTrack) -> str:
    """A phase in a sentence: "rank 0 is in phase weights, 1.2 of 5.4 GB (22 %), about 12 s left"."""
    last, remaining_s = track.last, track.pace.remaining_s
    text = f"{title(last.name)} is in phase {last.phase}"
    if last.total:
        share = 100 * last.done // last.total
        text += f", {amount(last.done, last.unit, short=True)} of {amount(last.total, last.unit)} ({share} %)"
    elif last.detail and not last.unit:
        text += f" ({last.detail})"
    if remaining_s is not None and last.done < last.total:
        text += f", about {max(1, math.ceil(remaining_s))} s left"
    return text


def _message(situation: Situation, slowest: PhaseTrack | None) -> str:
    if situation.verdict is not None:
        hint = f" {situation.verdict.hint}" if situation.verdict.hint else ""
        return f"{situation.verdict.message}{hint}"
    if situation.status == "stopping":
        return "The server is stopping; ask another one."
    if slowest is None:
        return "The model is not ready yet: its processes are being started."
    return f"The model is not ready yet: {described(slowest)}."


def _slowest(situation: Situation) -> PhaseTrack | None:
    """The rank that is least far, one in an unknown phase before all; others count while there is none."""

    def how_far(track: PhaseTrack) -> tuple[int, float]:
        last = track.last
        return situation.places.get(last.phase, -1), last.done / last.total if last.total else 0.0

    tracks = list(situation.tracks.values())
    ranks = [track for track in tracks if track.last.rank is not None]
    return min(ranks or tracks, key=how_far, default=None)


def _values(track: PhaseTrack) -> dict[str, Any]:
    last, pace = track.last, track.pace
    values: dict[str, Any] = {"phase": last.phase, "phase_s": round(track.elapsed_s, 3)}
    if last.unit:
        values |= {"done": last.done, "unit": last.unit}
    if last.total:
        values |= {"total": last.total, "percent": round(100 * last.done / last.total, 1)}
    if pace.per_s is not None:
        values["per_s"] = round(pace.per_s, 3)
    if pace.remaining_s is not None:
        values["eta_s"] = round(pace.remaining_s, 1)
    if track.budget_s is not None:
        values["budget_s"] = round(track.budget_s, 1)
    if last.detail:
        values["detail"] = last.detail
    return values


def _retry_after_s(situation: Situation, slowest: PhaseTrack | None) -> int:
    if situation.verdict is not None:
        return 10
    remaining_s = slowest.pace.remaining_s if slowest is not None and slowest.last.phase != READY else None
    return min(_LONGEST_RETRY_S, max(1, math.ceil(remaining_s or 1)))
