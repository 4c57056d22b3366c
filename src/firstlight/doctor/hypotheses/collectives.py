"""Processes that wait for each other: ranks in a collective, or anybody in a circle.

Invariant: the suspect is the rank that the others wait for, never the waiting ones.
"""

from __future__ import annotations

import msgspec

from firstlight.doctor.case.values_host import NcclRas
from firstlight.doctor.case.view import View
from firstlight.doctor.hypotheses.gpu_case import without_a_kernel
from firstlight.doctor.hypotheses.texts import stated
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

_APART = (r"collective mismatch", r"op\.preamble\.length", r"Mismatch between collective operation")
_IN_COLLECTIVE = (
    r"distributed_c10d\.py:(all_|broadcast|barrier|reduce|gather|scatter)",
    r"pynccl.*:all_reduce",
    r"parallel_state\.py:(all_reduce|all_gather|broadcast)",
    r"collectives.*\.py:",
)


def _desync(view: View) -> Judgement | None:
    edges = [edge for edge in view.graph.edges if edge.kind == "collective"]
    if view.motion.expected_ranks == 1 and len(view.ranks) <= 1:
        return Judgement(vetoes=(Clue(text="there is one rank only", evidence=view.motion.evidence[:2]),))
    words = stated(view, *_APART)
    if words is not None:
        summary = f"the ranks came apart in a collective: {words[0].text}."
        return Judgement(supports=(words[0],), subject=words[1], summary=summary)
    by_stack = _minority(view)
    by_ras, by_gpu = _ras(view), without_a_kernel(view)
    if not edges and by_stack is None and by_ras is None and by_gpu is None:
        if view.motion.state is State.UNCLEAR and view.is_starting:
            return Judgement(summary="a rank may be absent from a collective or a barrier of the others.")
        return None
    supports = [Clue(text=edge.why, evidence=edge.evidence, group="edges") for edge in edges[:4]]
    cycle = next((cycle for cycle in view.graph.cycles if _is_collective(view, cycle)), None)
    subject: str | None = None
    if edges:
        subject = next((key for key in view.graph.sinks if any(e.holder == key for e in edges)), None)
        weight = Weight.PROOF if cycle and view.has_stopped_moving else Weight.STRONG
        supports = [msgspec.structs.replace(clue, weight=weight) for clue in supports]
        subject = subject or (cycle[-1] if cycle else edges[0].holder)
    if by_stack is not None:
        subject, clue = subject or by_stack[0], by_stack[1]
        supports.append(clue)
    if by_gpu is not None:
        subject = subject or by_gpu[0]
        supports.append(by_gpu[1])
    if by_ras is not None:
        supports.append(by_ras)
    contradicts = () if view.has_stopped_moving or by_ras else (still_moves(view),)
    who = describe.named(view, subject) if subject else "a rank"
    place = describe.where(view, subject) if subject else ""
    what = "the ranks are in different collectives" if cycle else f"{who} has not come to the collective"
    return Judgement(
        supports=tuple(supports),
        contradicts=contradicts,
        subject=subject,
        summary=f"{what} that the others wait in: {supports[0].text}; {who}{place}.",
    )


def still_moves(view: View) -> Clue:
    """What speaks against a rank being stuck."""
    return Clue(text="something of it moves: the other rank may be late", evidence=view.motion.evidence[:4])


def _is_collective(view: View, cycle: tuple[str, ...]) -> bool:
    inside = [edge for edge in view.graph.edges if edge.waiter in cycle and edge.holder in cycle]
    return all(edge.kind == "collective" for edge in inside)


def _minority(view: View) -> tuple[str, Clue] | None:
    """The one rank whose stack is in no collective while those of the others are, and nothing moves."""
    ranks = [one.key for one in view.ranks]
    inside = {place.key: place for place in view.in_stack(*_IN_COLLECTIVE, keys=ranks, innermost=12)}
    outside = [key for key in ranks if key not in inside]
    if not inside or len(outside) != 1 or not view.has_stopped_moving:
        return None
    ids = tuple(place.evidence for place in inside.values())
    stack = describe.stack(view, outside[0]) or "elsewhere"
    names = ", ".join(sorted(inside))
    text = f"{names} are in a collective; {outside[0]} is in {stack}"
    return outside[0], Clue(text=text, evidence=ids[:6], weight=Weight.STRONG, group="stacks")


def _ras(view: View) -> Clue | None:
    """RAS: unequal counts that stand still in both looks."""
    looks = view.case.all(NcclRas)
    bad = [
        (seen, one)
        for seen in looks
        for one in seen.value.communicators
        if one.status in ("MISMATCH", "INCOMPLETE")
    ]
    if not bad or len({seen.evidence.look for seen, _ in bad}) < 2:
        return None
    first, last = bad[0][1], bad[-1][1]
    if first.counts != last.counts:
        return None
    counts = "; ".join(f"{c.operation}: {c.num_ranks} ranks at {c.launched}" for c in last.counts[:4])
    text = f"NCCL RAS: communicator {last.name} {last.status}, the same in two looks ({counts})"
    return Clue(text=text, evidence=(bad[0][0].id, bad[-1][0].id), weight=Weight.STRONG, group="ras")


DESYNC = Hypothesis(
    Card(
        cause="collective-desync",
        prior=3,
        title="the ranks are not in the same collective",
        condition=Condition.STUCK,
        signs=(
            "black boxes: a collective entered by some ranks and not by all, or two different ones",
            "stacks: all ranks but one are in a collective",
            "NCCL RAS: unequal counts that stand still while requests wait",
        ),
        vetoes=("one rank only", "all ranks in the same collective"),
        next_test="the stacks of all ranks, twice; RAS twice; the torch flight recorder.",
        remedies=Remedies(
            native="report it with `firstlight doctor --bundle FILE`: our ranks follow one plan.",
            vllm="`--no-async-scheduling`; leave out the drafter and data parallelism to corner it.",
            sglang="`--disable-overlap-schedule`; leave out the drafter and data parallelism to corner it.",
        ),
        looks=(Look.RANKS, Look.STACKS, Look.COLLECTIVES),
        depth=1,
    ),
    _desync,
)


def _deadlock(view: View) -> Judgement | None:
    cycles = [cycle for cycle in view.graph.cycles if not _is_collective(view, cycle)]
    if not cycles:
        return None
    cycle = cycles[0]
    edges = [edge for edge in view.graph.edges if edge.waiter in cycle and edge.holder in cycle]
    weight = Weight.PROOF if view.has_stopped_moving else Weight.STRONG
    return Judgement(
        supports=tuple(
            Clue(text=edge.why, evidence=edge.evidence, weight=weight, group="cycle") for edge in edges
        ),
        subject=cycle[0],
        summary=f"deadlock: {' and '.join(describe.named(view, key) for key in cycle)} wait for each other: "
        f"{'; '.join(edge.why for edge in edges[:4])}.",
    )


DEADLOCK = Hypothesis(
    Card(
        cause="deadlock",
        title="processes wait for each other in a circle",
        condition=Condition.STUCK,
        signs=("a cycle in the wait-for graph (pipes, sockets, file locks), the same in two looks",),
        vetoes=("the wait-for graph has no cycle",),
        next_test="the stacks of the processes of the cycle.",
        remedies=same("end one process of the cycle (`kill {pid}`), keep a bundle, and report it."),
        looks=(Look.RANKS, Look.STACKS, Look.SOCKETS),
    ),
    _deadlock,
)


HYPOTHESES = (DEADLOCK, DESYNC)
