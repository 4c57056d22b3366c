"""Patients whose ranks do not meet: at the rendezvous, in a collective, or in each other's pipes.

Listed by `kinds`. Invariant: the ranks wait in real collectives or real pipes.
"""

from __future__ import annotations

import time

from firstlight.doctor.case.evidence import Case
from firstlight.doctor.case.values_process import BlackBoxSeen
from patients.foreign_servers import Foreign
from patients.kinds_dead import GONE, WHY_GONE, Asker
from patients.kinds_stopped import until_steps_end
from patients.models import TINY
from patients.native import SLOW_TO_JUDGE, Load, Ranks, Server, change
from patients.patient import Kind, Patient, Ward, until_still

_STUCK = frozenset({"stuck"})
_DESYNC = frozenset({"collective-desync"})
_MISSING = frozenset({"rendezvous-missing"})


def _elsewhere(ward: Ward) -> Patient:
    """Rank 1 waits at another place for rank 0."""
    mistake = change("rank 1", "firstlight.ops.collectives", "other_place")
    server = Server(ward, ward.models / TINY, "--tensor-parallel", "2", *SLOW_TO_JUDGE, variables=mistake)
    server.started()
    for rank in range(2):
        server.until_phase(f"rank-{rank}", "rendezvous")
    time.sleep(ward.random.uniform(0.0, 2.0))
    return server.patient()


def _absent(ward: Ward) -> Patient:
    """One rank was never started."""
    ranks = Ranks(ward, ward.models / TINY, 2, started=[0])
    ranks.until_phase("rank-0", "rendezvous")
    time.sleep(ward.random.uniform(0.0, 2.0))
    return ranks.patient()


def _foreign_absent(ward: Ward) -> Patient:
    missing = ward.random.randrange(1, 3)
    server = Foreign(ward, "vllm", ward.models / TINY, 3, {"not_started": [missing]})
    until_still(*(server.titled(f"VLLM::Worker_TP{rank}") for rank in range(3) if rank != missing))
    return server.patient(f"rank {missing}")


def _lost_plan(ward: Ward) -> Patient:
    number = ward.random.randrange(60, 160)  # behind the steps that are measured at the start
    mistake = change("rank 1", "firstlight.engine.channel", "skip_plan", number=number)
    return _diverged(ward, mistake, f"plan {number}")


def _other_branch(ward: Ward) -> Patient:
    number = ward.random.randrange(300, 600)
    mistake = change("rank 1", "firstlight.ops.collectives", "other_collective", number=number)
    # Memory that ranks share tells at once that they are apart; gloo lets them wait for each other.
    return _diverged(ward, mistake, f"sum {number}", "--collectives", "gloo")


def _diverged(ward: Ward, mistake: dict[str, str], note: str, *flags: str) -> Patient:
    flags = ("--tensor-parallel", "2", *flags, *SLOW_TO_JUDGE)
    server = Server(ward, ward.models / TINY, *flags, variables=mistake)
    Load(ward, server.ready())
    until_steps_end(server)
    return server.patient(note)


def _foreign_skips(ward: Ward) -> Patient:
    """One worker waits for another order while the rest sum."""
    number = ward.random.randrange(2, 5)
    server = Foreign(ward, "vllm", ward.models / TINY, 2, {"fault": "skip", "rank": 1, "number": number})
    Asker(ward, server.ready())
    return server.patient(f"step {number}")


def _full_both_ways(ward: Ward) -> Patient:
    """Engine and rank send each other more than a pipe holds, and neither reads."""
    order = {"fault": "long_answer", "rank": 0, "number": ward.random.randrange(2, 5)}
    server = Foreign(ward, "sglang", ward.models / TINY, 1, order)
    Asker(ward, server.ready())
    return server.patient()


def _is_inside(case: Case, key: str) -> bool:
    seen = case.of(BlackBoxSeen, key)
    return seen is not None and seen.box.entered.number > seen.box.left.number


KINDS = (
    Kind(
        name="rendezvous-elsewhere",
        what="one of two ranks waits at another rendezvous",
        start=_elsewhere,
        causes=_MISSING,
        conditions=_STUCK,
    ),
    Kind(
        name="rendezvous-absent",
        is_quick=True,
        what="one of two ranks was never started",
        start=_absent,
        causes=_MISSING,
        conditions=_STUCK,
    ),
    Kind(
        name="foreign-rendezvous-absent",
        what="one of three foreign workers was never started",
        start=_foreign_absent,
        causes=GONE,
        conditions=frozenset({"stuck", "dead"}),
        why=WHY_GONE,
    ),
    Kind(
        name="collective-n-1",
        what="one of two ranks lost a plan: the other is alone in its collective",
        start=_lost_plan,
        causes=_DESYNC,
        conditions=_STUCK,
        subject="rank-1",
        holds=lambda case: _is_inside(case, "rank-0") and not _is_inside(case, "rank-1"),
    ),
    Kind(
        name="collectives-differ",
        is_quick=True,
        what="two ranks are in different collectives",
        start=_other_branch,
        causes=_DESYNC,
        conditions=_STUCK,
        holds=lambda case: _is_inside(case, "rank-0") and _is_inside(case, "rank-1"),
    ),
    Kind(
        name="foreign-collective-n-1",
        what="one of two foreign workers does not come to a collective; /health is green",
        start=_foreign_skips,
        causes=_DESYNC,
        conditions=_STUCK,
        settle_s=2.0,
    ),
    Kind(
        name="pipes-full-both-ways",
        is_quick=True,
        what="a foreign engine and its rank write to each other, and neither reads",
        start=_full_both_ways,
        causes=frozenset({"deadlock"}),
        conditions=_STUCK,
        settle_s=2.0,
    ),
)
