"""Ranks that are not where the others are: that never came to the rendezvous, or stay behind.

Invariant: the suspect is the rank that the others wait for, never the waiting ones.
"""

from __future__ import annotations

from firstlight.base.phases import RENDEZVOUS
from firstlight.doctor.case.view import View
from firstlight.doctor.hypotheses.collectives import still_moves
from firstlight.doctor.hypothesis import (
    Card,
    Clue,
    Condition,
    Hypothesis,
    Judgement,
    Look,
    Remedies,
    Weight,
    same,
)
from firstlight.doctor.motion.motion import State
from firstlight.doctor.report import describe

_RENDEZVOUS = (r"rendezvous", r"init_process_group", r"_store_based_barrier", r"TCPStore", r"FileStore")
_SILENCE_S = 60.0


def _absent(view: View) -> Judgement | None:
    waiting = [key for key in view.case.subjects if _waits_at_rendezvous(view, key)]
    expected, found = view.motion.expected_ranks, len(view.ranks)
    if not waiting or not view.is_starting:
        return None
    late = [one for one in view.ranks if one.key not in waiting and one.state is not State.MOVING]
    late = [one for one in late if _is_on_its_way(view, one.key) and one.state is not State.SLOW]
    names = ", ".join(describe.named(view, key) for key in waiting)
    ids = tuple(seen.id for key in waiting if (seen := view.box(key)))
    supports = [Clue(text=f"{names} wait at the rendezvous", evidence=ids or _stack_ids(view, waiting))]
    subject = None
    if expected is not None and found < expected and view.case.target.is_complete:
        missing = sorted(set(range(expected)) - {one.rank for one in view.ranks})
        text = f"{found} of {expected} ranks exist ({view.case.target.expected_from})"
        is_late = view.motion.state is not State.MOVING
        weight = Weight.PROOF if is_late else Weight.STRONG
        supports.append(Clue(text=text, evidence=view.motion.evidence[:4], weight=weight))
        who = f"rank {missing[0]}" if missing else "a rank"
        summary = f"{who} never came to the rendezvous: no such process is alive; {names} wait for it."
        subject = f"rank-{missing[0]}" if missing else None
    elif late:
        subject = late[0].key
        text = f"{describe.named(view, subject)} {describe.state(late[0])}{describe.where(view, subject)}"
        supports.append(Clue(text=text, evidence=late[0].evidence, weight=Weight.STRONG))
        summary = f"{describe.named(view, subject)} never came to the rendezvous; {names} wait for it."
    elif len(waiting) == expected and view.motion.state is not State.MOVING:
        text = "all ranks are there and do not find each other: they look in different places"
        supports.append(Clue(text=text, evidence=ids, weight=Weight.STRONG))
        summary = f"{names} are at the rendezvous and do not find each other."
        subject = waiting[-1]
    else:
        summary = f"{names} wait at the rendezvous for a rank that is still on its way."
    return Judgement(supports=tuple(supports), subject=subject, summary=summary)


def _is_on_its_way(view: View, key: str) -> bool:
    """Before the rendezvous; so is a process that has said nothing yet."""
    place = view.place(key)
    return place < view.places[RENDEZVOUS] if place is not None else not view.phase(key)


def _waits_at_rendezvous(view: View, key: str) -> bool:
    seen = view.case.pair(type(box.value), key) if (box := view.box(key)) else None
    if seen is not None:
        first, second = seen.first.value.box.phase, seen.second.value.box.phase
        if first is not None and second is not None:
            is_there = first.name == second.name == RENDEZVOUS
            return is_there and second.odometer.done < max(second.odometer.total, 1)
    return any(view.in_stack(*_RENDEZVOUS, keys=(key,), innermost=12))


def _stack_ids(view: View, keys: list[str]) -> tuple[str, ...]:
    return tuple(place.evidence for place in view.in_stack(*_RENDEZVOUS, keys=keys))[:4]


ABSENT = Hypothesis(
    Card(
        cause="rendezvous-missing",
        title="a rank never came to the rendezvous",
        condition=Condition.STUCK,
        signs=(
            "some ranks wait in `rendezvous` (their phase, or `init_process_group` in their stack)",
            "another one is not there, and does not move, or was never started",
        ),
        vetoes=("no rank waits at a rendezvous",),
        next_test="the log and the stack of the missing rank: `py-spy dump --nonblocking --pid {pid}`.",
        remedies=Remedies(
            native="read `{run}/logs` of the missing rank; start again.",
            vllm="start every node with the same `--master-addr`, `--master-port` and sizes; VLLM_HOST_IP "
            "where a host has several addresses.",
            sglang="check that every node runs with the same `--dist-init-addr`, `--nnodes` and its own "
            "`--node-rank`.",
        ),
        looks=(Look.RANKS, Look.STACKS, Look.COLLECTIVES, Look.LOGS),
        depth=1,
    ),
    _absent,
)


def _behind(view: View) -> Judgement | None:
    """A rank that has not come as far as the others, by black boxes or by a milestone in the log."""
    found = _behind_by_log(view) or _behind_by_box(view)
    if found is None:
        return None
    ranks, clue = found
    still = () if view.has_stopped_moving or clue.weight is Weight.STRONG else (still_moves(view),)
    key = f"rank-{ranks[0]}"
    return Judgement(
        supports=(clue,),
        contradicts=still,
        subject=key,
        summary=f"{describe.named(view, key)} has not come as far as the others: {clue.text}.",
    )


def _behind_by_log(view: View) -> tuple[list[int], Clue] | None:
    if view.log is None or not view.is_starting:
        return None
    reader, seen = view.log
    for milestone, reached in reader.milestones.items():
        missing = reader.missing(milestone)
        if missing:
            names, others = (", ".join(map(str, sorted(ranks))) for ranks in (reached, missing))
            text = f"the log has the end of `{milestone}` from ranks {names}, and not from {others}"
            is_old = seen.time_s - seen.value.modified_wall_s > _SILENCE_S
            weight = Weight.STRONG if is_old or view.has_stopped_moving else Weight.WEAK
            return missing, Clue(text=text, evidence=(seen.id,), weight=weight)
    return None


def _behind_by_box(view: View) -> tuple[list[int], Clue] | None:
    phases = {one.rank: view.phase(one.key) for one in view.ranks if one.rank is not None}
    known = {rank: view.places[phase] for rank, phase in phases.items() if phase in view.places}
    least, most = min(known.values(), default=0), max(known.values(), default=0)
    if least == most or not view.is_starting or not view.has_stopped_moving:
        return None
    ranks = [rank for rank, place in known.items() if place == least]
    others = next(phases[rank] for rank, place in known.items() if place == most)
    text = f"ranks {', '.join(map(str, ranks))} are in phase {phases[ranks[0]]}, others in {others}"
    ids = tuple(seen.id for one in view.ranks if (seen := view.box(one.key)))
    return ranks, Clue(text=text, evidence=ids[:8] or view.motion.evidence[:4], weight=Weight.STRONG)


BEHIND = Hypothesis(
    Card(
        cause="rank-behind",
        title="a rank has not come as far as the others",
        condition=Condition.STUCK,
        signs=(
            "`Load weight end` (or another milestone) in the log from some ranks and not from all",
            "black boxes: one rank in an earlier phase, and nothing moves",
        ),
        vetoes=("all ranks have reached the same milestone",),
        next_test="the stack and the log of that rank: `py-spy dump --nonblocking --pid {pid}`.",
        remedies=same("look at that rank, not at the others: they only wait for it."),
        looks=(Look.RANKS, Look.LOGS, Look.STACKS),
        depth=2,
    ),
    _behind,
)
HYPOTHESES = (ABSENT, BEHIND)
