"""One patient from its start to the doctor's first verdict: `python -m patients.one KIND SEED --models M`.

Started by `run` in a process of its own. Invariant: the doctor is given a pid or a run directory and nothing
else; what it is compared with stays here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from firstlight.doctor.case.bundle import read_bundle
from firstlight.doctor.case.evidence import Case
from firstlight.doctor.collect.run import examine
from firstlight.doctor.collect.scene import Scene
from firstlight.doctor.verdict import judge
from patients.kinds import KINDS
from patients.patient import Kind, Patient, Unavailable, Ward, until
from support.doctor_scenes import decode_case, encode_case

_OWN_DEADLINE_S = 90.0
_SECOND_THOUGHT_S = 1.5  # the first word may be the complaint of another rank
Examine = Callable[[Patient], tuple[Case, dict[str, Any]]]


class Result(msgspec.Struct, kw_only=True):
    """What came of one patient. `missing`: why this machine cannot have it. `error`: it could not be made."""

    kind: str
    seed: int
    note: str = ""
    causes: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()
    is_healthy: bool = False
    condition: str = ""
    cause: str = ""
    grade: str = ""
    subject: str | None = None
    summary: str = ""
    seconds: float = 0.0
    total_s: float = 0.0  # of the whole patient, its start and its end included
    holds: bool | None = None
    is_right: bool = False
    wrong: str = ""
    missing: str = ""
    error: str = ""
    case_path: str = ""

    @property
    def is_false_alarm(self) -> bool:
        return self.is_healthy and self.condition in ("stuck", "dead")


def run_patient(
    kind: Kind, seed: int, models: Path, cases: Path, *, looks: int = 1, by_command: bool = False
) -> list[Result]:
    """Makes the patient and has it examined `looks` times; more than once only where it stays as it is."""
    fields = {"causes": tuple(sorted(kind.causes)), "conditions": tuple(sorted(kind.conditions))}
    blank = Result(kind=kind.name, seed=seed, is_healthy=kind.is_healthy, **fields)
    try:
        with Ward(kind.name, seed, models) as ward:
            patient = kind.start(ward)
            time.sleep(max(0.0, patient.fault_s + kind.settle_s - time.monotonic()))
            found = []
            examine = _by_command if by_command and patient.as_uid is None else _in_process
            for look in range(looks):
                if look:
                    time.sleep(ward.random.uniform(0, 1))
                result, case = _examined(kind, patient, examine, blank)
                if result.wrong:
                    result.case_path = str(_keep(case, cases / f"{kind.name}-{seed}-{look}"))
                found.append(result)
            return found
    except Unavailable as reason:
        return [msgspec.structs.replace(blank, missing=str(reason))]
    except Exception as error:  # noqa: BLE001 - the top of a process: it is told
        return [msgspec.structs.replace(blank, error=f"{type(error).__name__}: {error}"[:2000])]


def run_own(kind: Kind, seed: int, models: Path) -> list[Result]:
    """Leaves the patient to its own supervisor: when does it say what is wrong, and whom does it name."""
    result = Result(kind=kind.name, seed=seed, is_healthy=kind.is_healthy)
    try:
        with Ward(kind.name, seed, models, is_left_to_us=True) as ward:
            patient = kind.start(ward)
            assert patient.own_verdict is not None, "it has no supervisor"
            until(patient.own_verdict, "a verdict", _OWN_DEADLINE_S, 0.1)
            result.seconds = round(time.monotonic() - patient.fault_s, 2)
            time.sleep(_SECOND_THOUGHT_S)
            result.summary = patient.own_verdict()
            result.subject, result.note = patient.subject or kind.subject, patient.note
            result.is_right = (result.subject or "rank-").replace("-", " ") in result.summary
            result.condition = "told"
    except Exception as error:  # noqa: BLE001 - the top of a process: it is told
        result.error = f"{type(error).__name__}: {error}"[:2000]
    return [result]


def _examined(kind: Kind, patient: Patient, examine: Examine, blank: Result) -> tuple[Result, Case]:
    """One look and the verdict on it; the time counts from the fault."""
    result = msgspec.structs.replace(blank, note=patient.note)
    case, verdict = examine(patient)
    result.seconds = round(time.monotonic() - patient.fault_s, 2)
    for field in ("condition", "cause", "grade", "subject", "summary"):
        setattr(result, field, verdict[field])
    if kind.holds is not None:
        result.holds = bool(kind.holds(case))
    result.wrong = _wrong(kind, patient, result)
    result.is_right = not result.wrong
    return result, case


def _in_process(patient: Patient) -> tuple[Case, dict[str, Any]]:
    uid = patient.as_uid
    case = examine(Scene(patient.find())) if uid is None else _as_user(uid, patient)
    return case, msgspec.to_builtins(judge(case))


def _by_command(patient: Patient) -> tuple[Case, dict[str, Any]]:
    """As a person examines it; the exit code and the replayed bundle must say the same."""
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder, "bundle")
        command = [sys.executable, "-m", "firstlight", "doctor", *patient.arguments]
        command += ["--json", "--bundle", str(bundle)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout, done.stderr
        (said,) = json.loads(done.stdout)["servers"]
        (case,) = read_bundle(bundle)
    again = judge(case)
    assert done.returncode == said["exit_code"], f"exit code {done.returncode}"
    assert (again.condition.value, again.cause) == (said["condition"], said["cause"]), again
    return case, said


def _wrong(kind: Kind, patient: Patient, result: Result) -> str:
    """In which of its three parts the verdict is wrong."""
    wrong, subject = [], patient.subject or kind.subject
    if result.condition not in kind.conditions:
        wrong.append("condition")
    if result.cause not in kind.causes:
        wrong.append("cause")
    if subject is not None and result.subject != subject and not wrong:
        wrong.append("subject")
    return ", ".join(wrong)


def _as_user(uid: int, patient: Patient) -> Case:
    """What another user sees: by a child that has imported all and then becomes that user."""
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if not child:
        with open(write_fd, "wb") as answer:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            answer.write(encode_case(examine(Scene(patient.find()))))
        os._exit(0)
    os.close(write_fd)
    with open(read_fd, "rb") as answer:
        data = answer.read()
    os.waitpid(child, 0)
    return decode_case(data)


def _keep(case: Case, path: Path) -> Path:
    path = path.with_suffix(".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_case(case))
    return path


def main() -> None:
    """Prints the results as JSON, one a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind")
    parser.add_argument("seed", type=int)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--cases", type=Path, required=True)
    parser.add_argument("--looks", type=int, default=1)
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--by-command", action="store_true")
    given = parser.parse_args()
    with contextlib.redirect_stdout(sys.stderr):
        kind, started_s = KINDS[given.kind], time.monotonic()
        if given.own:
            results = run_own(kind, given.seed, given.models)
        else:
            how = {"looks": given.looks, "by_command": given.by_command}
            results = run_patient(kind, given.seed, given.models, given.cases, **how)
        for result in results:
            result.total_s = round(time.monotonic() - started_s, 1)
    for result in results:
        print(msgspec.json.encode(result).decode())


if __name__ == "__main__":
    main()
