"""Weights that come slowly, in pieces, or not at all.

Invariant: reading that goes on, however slowly, is never called stuck.
"""

from __future__ import annotations

from firstlight.base.phases import PREPARE, WEIGHTS
from firstlight.doctor.case.evidence import Seen
from firstlight.doctor.case.values_host import CheckpointFiles, SocketEnd, Sockets
from firstlight.doctor.case.view import View
from firstlight.doctor.cautions import BAR
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
from firstlight.doctor.looks import is_taken
from firstlight.doctor.motion.motion import State
from firstlight.doctor.report import describe

_READING = ("bytes read", "major faults", "disk wait")
_HUB = (r"huggingface\.co", r"hf-mirror", r"HF_HUB_OFFLINE", r"LocalEntryNotFoundError", r"huggingface_hub")
_HUB_STACK = (r"huggingface_hub", r"hf_hub_download|snapshot_download")
_DAMAGE = (
    r"HeaderTooLarge",
    r"MetadataIncompleteBuffer",
    r"InvalidHeader",
    r"git-lfs pointer",
    r"is truncated",
    r"became shorter",
    r"SafetensorError",
)


def _slow(view: View) -> Judgement | None:
    reading = [(one, item) for one in view.workers for item in one.progress if item.what in _READING]
    importing = {place.key for place in view.in_stack(r"importlib")}  # which reads too
    in_weights = [
        (one, item)
        for one, item in reading
        if view.phase(one.key) in (WEIGHTS, PREPARE, "") and one.key not in importing
    ]
    slow = [(one, item) for one, item in in_weights if one.state is State.SLOW]
    if slow and view.is_starting:
        one, item = slow[0]
        left = _left(view, one.key)
        return Judgement(
            supports=tuple(
                Clue(text=f"{motion.key}: {each.detail}", evidence=each.evidence, weight=Weight.STRONG)
                for motion, each in slow[:4]
            ),
            subject=one.key,
            summary=f"{describe.named(view, one.key)} reads its weights slowly: {item.detail}"
            f"{describe.where(view, one.key)}{left}.",
        )
    if not view.is_starting:
        return None
    if is_taken(view.case, Look.BYTES) and not reading:
        text = "no bytes were read and no pages faulted in between two looks"
        return Judgement(vetoes=(Clue(text=text, evidence=view.motion.evidence[:4]),))
    if reading:
        return None
    return Judgement(supports=tuple(_hints(view)), summary="the weights may still be on their way.")


def _hints(view: View) -> list[Clue]:
    """What makes slow reading more likely where nobody measured bytes."""
    clues = []
    bar = view.find_line(BAR.pattern)
    if bar is not None:
        text = "the last line is the bar of the shards, which counts files opened, not bytes"
        clues.append(Clue(text=text, evidence=(bar.evidence,), weight=Weight.WEAK, group="bar"))
    return clues


def _left(view: View, key: str) -> str:
    """Time left by the rate between the looks."""
    seen = view.box(key)
    one = view.motion.of(key)
    item = next((item for item in one.progress if item.what == "odometer"), None) if one else None
    phase = seen.value.box.phase if seen else None
    if item is None or phase is None or not phase.odometer.total:
        return ""
    left_s = (phase.odometer.total - phase.odometer.done) / max(item.per_s, 1e-9)
    return f"; about {left_s:.0f} s are left at this rate"


SLOW = Hypothesis(
    Card(
        cause="slow-weights",
        prior=3,
        title="the weights are read slowly (a slow disk, a network file system, page by page)",
        condition=Condition.SLOW,
        signs=(
            "bytes read, or major faults, rise between two looks, at less than a disk's rate",
            "state D, wchan in a page wait or in nfs",
        ),
        vetoes=("no bytes and no major faults between two looks",),
        next_test="the rate times what is left is the ETA: `cat /proc/PID/io` twice.",
        remedies=Remedies(
            native="wait, or copy the checkpoint to a local disk: ours reads each byte once, without mmap.",
            vllm="`--safetensors-load-strategy prefetch` (reads ahead, not page by page), or a local copy.",
            sglang="`--weight-loader-disable-mmap`, `--weight-loader-prefetch-checkpoints`, or a local copy.",
        ),
        looks=(Look.BYTES, Look.MOTION),
        depth=1,
    ),
    _slow,
)


def _damaged(view: View) -> Judgement | None:
    checked = view.case.all(CheckpointFiles)
    # What we may not read is another user's, and says nothing about its being whole.
    problems = [(seen, problem) for seen in checked for problem in seen.value.problems]
    bad = [(seen, problem) for seen, problem in problems if problem.kind != "unreadable"]
    words = stated(view, *_DAMAGE)
    if not bad and words is None:
        if checked:
            text = f"{checked[0].value.num_files} files are there and whole, by their headers"
            return Judgement(vetoes=(Clue(text=text, evidence=(checked[0].id,)),))
        if view.is_starting and view.motion.state is not State.MOVING:
            return Judgement(summary="a file of the model or the drafter may be missing or cut short.")
        return None
    clues = [
        Clue(
            text=f"{problem.kind}: {problem.path}: {problem.detail}"[:400],
            evidence=(seen.id,),
            weight=Weight.PROOF if view.is_starting else Weight.SOME,
        )
        for seen, problem in bad[:5]
    ]
    if words is not None:
        clues.append(words[0])
    first = f"{bad[0][1].path} ({bad[0][1].kind})" if bad else words[0].text if words else ""
    more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    return Judgement(
        supports=tuple(clues),
        subject=words[1] if words else None,
        condition=None if view.motion.state in (State.DEAD, State.ZOMBIE) else Condition.STUCK,
        summary=f"the checkpoint is not whole: {first}{more}.",
        fills={"path": bad[0][1].path if bad else "FILE"},
    )


DAMAGED = Hypothesis(
    Card(
        cause="checkpoint-damaged",
        prior=1,
        title="a file of the checkpoint is missing, cut short, or a pointer of git-lfs",
        condition=Condition.DEAD,
        signs=(
            "sizes and headers that do not agree with the index",
            "files of about 135 bytes",
            "header errors",
        ),
        vetoes=("all files are there and whole by their headers",),
        next_test="`ls -l` of the folder against its index; `head -c 100 {path}`.",
        remedies=same(
            "get the file again: `git lfs pull`, or `huggingface-cli download` into the same folder."
        ),
        looks=(Look.FILES, Look.LOGS),
    ),
    _damaged,
)


def _hub(view: View) -> Judgement | None:
    sockets = view.case.all(Sockets, look=view.case.last_look)
    waiting = [
        (seen, end)
        for seen in sockets
        for end in seen.value.sockets
        if end.state == "SYN_SENT" and end.owners
    ]
    words, place = stated(view, *_HUB), next(view.in_stack(*_HUB_STACK), None)
    partial = [
        (seen, problem)
        for seen in view.case.all(CheckpointFiles)
        for problem in seen.value.problems
        if problem.kind == "incomplete"
    ]
    if words is None and place is None and not partial:
        return None
    clues = []
    if place is not None:
        text = f"{place.key} is in {place.frame.function} ({place.frame.file})"
        clues.append(Clue(text=text, evidence=(place.evidence,), weight=Weight.STRONG, group="stack"))
    if words is not None:
        clues.append(words[0])
    if waiting and (place is not None or words is not None):
        seen, end = waiting[0]
        text = f"{', '.join(end.owners)} waits for an answer from {end.remote} (SYN_SENT)"
        clues.append(Clue(text=text, evidence=(seen.id,), weight=Weight.STRONG, group="socket"))
    if partial:
        text = f"a download that did not end: {partial[0][1].path}"
        clues.append(Clue(text=text, evidence=(partial[0][0].id,), weight=Weight.SOME, group="files"))
    subject = place.key if place else words[1] if words else None
    who = describe.named(view, subject) if subject else "the server"
    return Judgement(
        supports=tuple(clues),
        subject=subject,
        summary=f"{who} waits for a download from the hub{_target(waiting)}.",
    )


def _target(waiting: list[tuple[Seen[Sockets], SocketEnd]]) -> str:
    return f" that does not answer ({waiting[0][1].remote})" if waiting else ""


HUB = Hypothesis(
    Card(
        cause="hub-download",
        prior=1,
        title="a download from the hub that does not come",
        condition=Condition.STUCK,
        signs=(
            "a stack in huggingface_hub, a socket in SYN_SENT",
            "files of the snapshot missing or `.incomplete`",
        ),
        vetoes=("a local path whose files are all there",),
        next_test="`curl -sI https://huggingface.co` from there; start with HF_HUB_OFFLINE=1.",
        remedies=same(
            "download before (`huggingface-cli download {model}`), serve the local folder, and set "
            "HF_HUB_OFFLINE=1; HF_ENDPOINT and the proxies decide where it goes."
        ),
        looks=(Look.STACKS, Look.SOCKETS, Look.FILES, Look.BYTES),
    ),
    _hub,
)


HYPOTHESES = (DAMAGED, HUB, SLOW)
