"""The supervisor's verdict in the doctor's: the same event is called the same, whoever is asked."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from firstlight.base.run_verdict import RunVerdict, write_run_verdict
from firstlight.doctor.case.evidence import Case
from firstlight.doctor.case.target import RUN
from firstlight.doctor.case.values_process import BlackBoxSeen, ExitRecord, ProcessState, SupervisorVerdict
from firstlight.doctor.collect.run_verdicts import RUN_VERDICTS
from firstlight.doctor.hypothesis import Condition, Grade
from firstlight.doctor.verdict import judge
from support import troubled_cases as troubled
from support.case_rows import Rows, asleep, both, boxed, one_rank, stack
from support.doctor_scenes import box, look, target

KILLED = SupervisorVerdict(
    message="rank 0 was ended by SIGKILL.", hint="Find out who did.", subject="rank-0", is_stall=False
)
STOPPED = SupervisorVerdict(
    message="rank 0 (pid 10) is stopped, in phase serving.",
    hint="let it go on: `kill -CONT 10`.",
    subject="rank-0",
    is_stall=True,
    cause="process-stopped",
    grade="proved",
)
UNKNOWN = SupervisorVerdict(
    message="cause unknown: rank 0 sleeps.", hint="Look.", subject="rank-0", is_stall=True, cause="unknown",
    grade="suspected",
)  # fmt: skip


def gone(*, told: bool, said: SupervisorVerdict) -> Case:
    """A run of one rank after its end."""
    seen = BlackBoxSeen(path="b", box=box(0, phase="serving"), is_alive=False)
    record = ExitRecord(name="rank-0", signal=9, was_told=told)
    rows: Rows = [*both("rank-0", ProcessState(state="")), *both("rank-0", seen), (0, "rank-0", record)]
    return one_rank(rows, both(RUN, said))


def test_who_was_killed_is_called_so_in_the_supervisors_words() -> None:
    verdict = judge(gone(told=False, said=KILLED))
    assert (verdict.condition, verdict.cause, verdict.grade) == (Condition.DEAD, "rank-died", Grade.PROVED)
    assert (verdict.summary, verdict.remedy, verdict.subject) == (KILLED.message, KILLED.hint, "rank-0")
    assert any(KILLED.message in clue.text and clue.evidence for clue in verdict.supports)


def test_an_engine_that_was_ended_because_it_stood_still_left_the_supervisors_word() -> None:
    verdict = judge(gone(told=True, said=STOPPED))
    assert (verdict.condition, verdict.cause) == (Condition.DEAD, "process-stopped")
    assert (verdict.summary, verdict.remedy) == (STOPPED.message, STOPPED.hint)
    assert "none left a word" not in " ".join(clue.text for clue in verdict.supports)
    assert "rank-died" not in [other.cause for other in verdict.others]


def test_a_root_says_why_what_the_supervisor_saw_has_happened() -> None:
    small = troubled.small_shm()
    (row,) = one_rank([(small.last_look, RUN, KILLED)]).evidence
    case = msgspec.structs.replace(small, evidence=(*small.evidence, row))
    verdict = judge(case)
    assert (verdict.condition, verdict.cause) == (Condition.DEAD, "shm-too-small")
    assert verdict.summary == f"{KILLED.message} {judge(small).summary}"
    assert verdict.remedy == judge(small).remedy


def test_who_stands_still_is_found_by_both_or_by_the_one_who_knows() -> None:
    stopped = both("rank-0", ProcessState(state="T", num_threads=4))
    serving = boxed("rank-0", 0, phase="serving")
    same = judge(one_rank(stopped, serving, both(RUN, STOPPED)))
    assert same.summary == judge(one_rank(stopped, serving)).summary
    assert any(STOPPED.message in clue.text for clue in same.supports)
    better = judge(one_rank(stopped, serving, both(RUN, UNKNOWN)))
    assert (better.cause, better.condition) == ("process-stopped", Condition.STUCK)
    frames = stack("rank-0", ("engine/worker/rank_loop.py", "mystery", "do()"))
    worse = judge(one_rank(asleep("rank-0", 10), frames, boxed("rank-0", 0, phase="kv"), both(RUN, STOPPED)))
    assert (worse.cause, worse.summary) == ("process-stopped", STOPPED.message)


def test_a_server_that_refuses_requests_is_not_healthy() -> None:
    idle = (asleep("rank-0", 10), boxed("rank-0", 0, phase="serving"))
    verdict = judge(one_rank(*idle, both(RUN, STOPPED)))
    assert (verdict.condition, verdict.cause, verdict.summary) == (
        Condition.STUCK,
        "process-stopped",
        STOPPED.message,
    )
    withdrawn: Rows = [(0, RUN, STOPPED)]  # between the two looks
    assert judge(one_rank(*idle, withdrawn)).condition is Condition.HEALTHY


@pytest.mark.parametrize("withdrawn_s", [None, 7.0])
def test_only_a_verdict_that_stands_is_evidence(tmp_path: Path, withdrawn_s: float | None) -> None:
    kept = RunVerdict(
        message="rank 0 is stopped: --api-key=sesame-opens.",
        hint="Look.",
        exit_code=6,
        subject="rank-0",
        is_stall=True,
        time_s=5.0,
        withdrawn_s=withdrawn_s,
    )
    write_run_verdict(tmp_path, kept)
    found = look(target(run_dir=str(tmp_path)), [RUN_VERDICTS])
    said = found.of(SupervisorVerdict, RUN)
    assert (said is None) == (withdrawn_s is not None)
    assert said is None or "sesame" not in said.message


def test_a_record_that_is_cut_is_no_evidence(tmp_path: Path) -> None:
    (tmp_path / "verdict.json").write_text('{"message": "rank 0')
    assert look(target(run_dir=str(tmp_path)), [RUN_VERDICTS]).evidence == ()
