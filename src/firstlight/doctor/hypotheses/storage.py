"""Storage that does not answer: a mount whose server or daemon is gone, a disk that is broken.

Invariant: a wait counts only if the same thread was in it in both looks and never woken in between; while a
mount answers, a read may take long, and is called slow.
"""

from __future__ import annotations

from firstlight.doctor.case.view import View
from firstlight.doctor.hypothesis import Card, Clue, Condition, Hypothesis, Judgement, Look, Weight, same
from firstlight.doctor.motion.motion import State
from firstlight.doctor.motion.wait_signatures import same_wait
from firstlight.doctor.report import describe

_ASK = "See which mounts answer (`stat -f MOUNT`, one at a time), and `dmesg`."


def _silent(view: View) -> Judgement | None:
    for motion in view.motion.processes:
        pair = same_wait(view.case, motion.key)
        if pair is None or motion.progress or motion.state is not State.BLOCKED:
            continue
        wait = pair.second.value
        seconds = max(pair.seconds, motion.quiet_s)
        where = f"{wait.path or 'a file'}{f' on {wait.mount}' if wait.mount else ''}"
        text = f"{motion.key}: thread {wait.tid} was not woken between the looks, and no byte came"
        clues = [Clue(text=text, evidence=pair.ids, weight=Weight.STRONG)]
        if wait.answers is False:
            text = "the mount was asked how full it is, and gave no answer"
            clues.append(Clue(text=text, evidence=(pair.second.id,), weight=Weight.PROOF))
        return Judgement(
            supports=tuple(clues),
            subject=motion.key,
            summary=f"storage does not answer: {describe.named(view, motion.key)} waits in the kernel for "
            f"{where}, for {seconds:.0f} s without a byte.",
            fills={"path": wait.path or "FILE", "remedy": wait.remedy or _ASK},
        )
    return None


HYPOTHESES = (
    Hypothesis(
        Card(
            cause="storage-silent",
            title="storage does not answer: a mount whose server or daemon is gone, or a broken disk",
            condition=Condition.STUCK,
            signs=(
                "a thread in state D, or in a request to a FUSE daemon, and never woken between two looks",
                "`stat -f` of the mount does not return",
            ),
            vetoes=("bytes that come, however slowly",),
            next_test="`timeout -s KILL 5 stat -f {path}` (it may not return); `dmesg`.",
            remedies=same("{remedy}"),
            looks=(Look.BYTES, Look.FILES),
        ),
        _silent,
    ),
)
