"""Is the server up, and is anything asked of it? Without that, a flat line means nothing.

Pure. Invariant: `is_idle` is said only of a server that answers, or whose ranks say that they serve, and of
which no request is known that should move.
"""

from __future__ import annotations

import msgspec

from firstlight.base.phases import READY, SERVING
from firstlight.doctor.case.evidence import Case
from firstlight.doctor.case.target import RUN
from firstlight.doctor.case.values_host import Generation, HttpProbe, RequestLoad
from firstlight.doctor.case.values_process import BlackBoxSeen

_UP = (READY, SERVING)
_ANSWERS_ALWAYS = ("/startup", "/health/live")  # of ours, also while there is no engine


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """`num_requests` None: nobody says how many run or wait. `is_generating` None: it was not tried."""

    is_up: bool
    num_requests: int | None
    is_generating: bool | None
    evidence: tuple[str, ...] = ()

    @property
    def is_idle(self) -> bool:
        """Up, and nothing that should move."""
        return self.is_up and not self.num_requests and self.is_generating is not False


def serving_of(case: Case) -> Serving:
    """From black boxes where there are some, else from what the port answers."""
    ids: list[str] = []
    boxes = case.all(BlackBoxSeen, look=case.last_look)
    boxes = [seen for seen in boxes if seen.value.box.rank is not None]
    requests: int | None = None
    if boxes:
        phases = [seen.value.box.phase for seen in boxes]
        is_up = all(phase is not None and phase.name in _UP for phase in phases)
        is_up = is_up and any(seen.value.is_alive for seen in boxes)
        requests = _requests(case)
        ids += [seen.id for seen in boxes]
    else:
        probes = [seen for seen in case.all(HttpProbe, subject=RUN) if seen.value.status == 200]
        probes = [seen for seen in probes if not seen.value.url.endswith(_ANSWERS_ALWAYS)]
        is_up = bool(probes)
        ids += [seen.id for seen in probes[-1:]]
    loads = case.all(RequestLoad, subject=RUN)
    if loads and requests is None:
        # Those that were there in every look: what runs once and is gone then was served.
        requests = min(seen.value.running + seen.value.waiting for seen in loads)
        ids += [seen.id for seen in loads]
    tried = case.all(Generation, subject=RUN)
    ids += [seen.id for seen in tried]
    return Serving(
        is_up=is_up,
        num_requests=requests,
        is_generating=any(seen.value.has_token for seen in tried) if tried else None,
        evidence=tuple(ids),
    )


def _requests(case: Case) -> int:
    """Requests that were there in every look: the api process knows some that no rank has taken yet."""
    most: dict[int, int] = {}
    for seen in case.all(BlackBoxSeen):
        look, box = seen.evidence.look, seen.value.box
        most[look] = max(most.get(look, 0), box.running + box.waiting)
    return min(most.values(), default=0)
