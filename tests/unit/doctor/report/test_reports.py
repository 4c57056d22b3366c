"""Verdicts as text and Markdown: the golden form of a small case, and nothing that steers its reader."""

from __future__ import annotations

from firstlight.doctor.case.evidence import Case
from firstlight.doctor.case.target import RUN, Engine, Role
from firstlight.doctor.case.values import Failed, Value
from firstlight.doctor.case.values_process import LogTail, ProcessState, Threads, ThreadState
from firstlight.doctor.case.view import View, view_of
from firstlight.doctor.finding import Excluded, Finding, Verdict
from firstlight.doctor.hypothesis import Clue, Condition, Grade, Look, Remedies
from firstlight.doctor.report.report_markdown import code, fenced, report_markdown
from firstlight.doctor.report.report_text import headline, printable, report_text
from support.doctor_scenes import case, made_up, target

NASTY = "\x1b[2J\x1b]0;owned\x07 ``` <script> @someone [x](http://evil) \u202e\r\n# head"


def scene(line: str = "loading") -> Case:
    ranks = [made_up("rank-0", 10, rank=0), made_up("rank-1", 11, rank=1)]
    seen: list[tuple[int, str, Value]] = []
    for look in (0, 1):
        for key, pid in (("rank-0", 10), ("rank-1", 11)):
            state = "T" if key == "rank-1" else "S"
            thread = ThreadState(tid=pid, name="x", state=state, cpu_s=1.0, major_faults=0)
            seen.append((look, key, ProcessState(state=state, cpu_s=1.0, num_threads=1)))
            seen.append((look, key, Threads(threads=(thread,), cpu_source="schedstat")))
    seen.append((1, RUN, Failed(collector="http", reason=line)))
    seen.append((1, RUN, LogTail(path="/x.log", size_bytes=9, modified_wall_s=900.0, lines=(line,))))
    helper = made_up("helper-12", 12, Role.HELPER)
    return case(
        target(
            *ranks,
            helper,
            engine=Engine.VLLM,
            model="tiny",
            addresses=(("127.0.0.1", 8000),),
            expected_ranks=2,
        ),
        seen,
    )


def verdict(text: str = "it was stopped by a signal") -> Verdict:
    clue = Clue(text=text, evidence=("E7 process rank-1",))
    return Verdict(
        condition=Condition.STUCK,
        cause="process-stopped",
        grade=Grade.PROVED,
        subject="rank-1",
        summary="rank 1 (pid 11) is stopped by a signal.",
        supports=(clue,),
        contradicts=(Clue(text="it may go on by itself", evidence=()),),
        not_measured=(Look.LOGS,),
        next_test="let it go on: `kill -CONT 11`.",
        remedies=Remedies(native="n", vllm="`kill -CONT 11`.", sglang="s"),
        remedy="`kill -CONT 11`.",
        others=(
            Finding(
                cause="oom-killed",
                grade=Grade.SUSPECTED,
                condition=Condition.DEAD,
                subject=None,
                summary=f"killed {text}.",
            ),
        ),
        excluded=(Excluded(cause="rank-died", because=(clue,)),),
        cautions=("VIRT is no memory.",),
    )


GOLDEN = """\
STUCK: rank 1 (pid 11) is stopped by a signal. [process-stopped, proved]
  about rank 1 (pid 11); vllm server, tiny, 127.0.0.1:8000; 2 of 2 ranks alive

what to do
  `kill -CONT 11`.

next test
  let it go on: `kill -CONT 11`.

for it
  + it was stopped by a signal  [E7 process rank-1]

against it
  - it may go on by itself

not measured
  ? the log of every rank: the server's standard output and error, all of it

beware
  ! VIRT is no memory.

processes
  PROCESS  PID  STATE    CORES  PHASE
  rank-0   10   blocked  0.00
  rank-1   11   stopped  0.00
  and 1 more (janitor, helpers, compilers)

other causes
  suspected  oom-killed: killed it was stopped by a signal."""


def view() -> View:
    return view_of(scene())


def test_the_text_of_a_stuck_server() -> None:
    assert "\n".join(report_text(view(), verdict())) == GOLDEN


def test_verbose_adds_what_was_excluded_and_every_remedy() -> None:
    text = "\n".join(report_text(view(), verdict(), is_verbose=True))
    assert "  rank-died: it was stopped by a signal  [E7 process rank-1]" in text
    assert "  sglang   s" in text
    assert "http: loading (run)" in text
    assert "rank-died" not in GOLDEN


def test_commands_are_not_broken_over_lines() -> None:
    long = f"`{'x' * 90} {'y' * 90}`."
    found = verdict().__class__(
        condition=Condition.STUCK,
        cause="c",
        grade=Grade.PROVED,
        subject=None,
        summary="s.",
        remedy=long,
    )
    assert f"  {long}" in report_text(view(), found)


def test_nothing_steers_the_terminal() -> None:
    lines = report_text(view_of(scene(NASTY)), verdict(NASTY), is_verbose=True)
    assert any("owned" in line for line in lines)
    assert all(printable(line) == line and line.isprintable() for line in lines if line)
    assert headline(verdict(NASTY)).isprintable()


def test_the_issue_has_versions_verdict_and_evidence() -> None:
    text = report_markdown(view(), verdict())
    assert text.startswith("# STUCK: rank 1 (pid 11) is stopped by a signal. \\[process-stopped, proved\\]\n")
    for part in ("## Environment", "## Verdict", "### For it", "### Not measured", "## Evidence"):
        assert part in text
    assert "`E7 process rank-1` from `made up`, look 1" in text
    assert '"state":"T"' in text
    assert "- it was stopped by a signal `E7 process rank-1`" in text


def test_the_issue_holds_what_a_server_says_as_text_only() -> None:
    text = report_markdown(view_of(scene(NASTY)), verdict(NASTY))
    outside = _outside_code(text)
    assert "<script>" not in outside.replace("\\<script\\>", "")
    assert "@someone" not in outside
    assert "\n# head" not in text
    assert "\x1b" not in text
    assert "`````" not in "\n".join(fenced(["```"]))
    assert fenced(["```"])[0] == "````text"
    assert code("a`b") == "``a`b``"


def test_the_issue_holds_no_secret() -> None:
    text = report_markdown(view_of(scene("api_key='hunter2'")), verdict("token=hunter2"))
    assert "hunter2" not in text


def _outside_code(text: str) -> str:
    """What is read as Markdown: neither in a block nor in a span."""
    kept, fence = [], ""
    for line in text.splitlines():
        if fence:
            fence = "" if line == fence else fence
        elif line.startswith("```"):
            fence = line.removesuffix("text")
        else:
            kept.append(line)
    return "\n".join(kept)
