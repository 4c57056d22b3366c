"""Parts of `firstlight doctor`: who gets a key, and that a replay looks at nothing of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from firstlight.base.config import API_KEYS_FILE
from firstlight.base.errors import UsageError
from firstlight.cli.doctor_options import DoctorOptions
from firstlight.cli.doctor_output import as_json, judged
from firstlight.cli.doctor_targets import key_for
from firstlight.doctor.case.bundle import redact_case, write_bundle
from firstlight.doctor.case.target import Target
from firstlight.doctor.collect.process_state import STATE
from firstlight.doctor.collect.threads import THREADS
from support.doctor_scenes import case, living, look, made_up, target

OPENED = """
import sys
seen = []
def hook(event, arguments):
    if event == "open" and str(arguments[0]).startswith(("/proc", "/sys")):
        seen.append(arguments[0])
    if event in ("socket.connect", "subprocess.Popen", "os.kill", "os.posix_spawn"):
        seen.append(event)
import firstlight.cli.main, firstlight.cli.doctor_output, firstlight.doctor.case.bundle
sys.addaudithook(hook)
sys.argv = ["firstlight", "doctor", "--replay", sys.argv[1], "--json"]
try:
    firstlight.cli.main.main()
finally:
    sys.stderr.write(repr(seen))
"""


def of_uid(uid: int, run_dir: Path | None = None) -> Target:
    process = msgspec.structs.replace(made_up("rank-0", 10, rank=0), uid=uid)
    return target(process, run_dir=None if run_dir is None else str(run_dir))


def test_the_key_of_the_environment_is_sent_to_our_own_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRSTLIGHT_API_KEY", "first,second")
    assert key_for(of_uid(os.geteuid()), DoctorOptions()) == "first"
    assert key_for(of_uid(os.geteuid() + 1), DoctorOptions()) is None
    assert key_for(of_uid(os.geteuid() + 1), DoctorOptions(pid=10)) == "first"
    assert key_for(target(), DoctorOptions()) is None


def test_a_run_has_its_own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRSTLIGHT_API_KEY", "other")
    (tmp_path / API_KEYS_FILE).write_text("own\nnext\n")
    assert key_for(of_uid(os.geteuid(), tmp_path), DoctorOptions()) == "own"


def test_a_file_of_keys_wins_and_must_be_readable(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# mine\ngiven\n")
    assert key_for(of_uid(os.geteuid() + 1), DoctorOptions(api_key_file=path)) == "given"
    with pytest.raises(UsageError, match="cannot read the API keys"):
        key_for(of_uid(1), DoctorOptions(api_key_file=tmp_path / "none"))


def test_a_replay_looks_at_nothing_of_this_machine(tmp_path: Path) -> None:
    found = look(target(living(os.getpid(), "rank-0")), [STATE, THREADS], num_looks=2)
    write_bundle(tmp_path / "x", [redact_case(found)])
    done = subprocess.run(
        [sys.executable, "-c", OPENED, str(tmp_path / "x")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == "[]"
    assert msgspec.json.decode(done.stdout)["servers"][0]["target"]["processes"][0]["pid"] == os.getpid()


def test_the_worst_of_several_decides() -> None:
    nobody = judged(case(target(), []))
    report = as_json([nobody, nobody])
    assert report["exit_code"] == nobody_code(report)
    assert len(report["servers"]) == 2


def nobody_code(report: dict[str, object]) -> int:
    return {"unclear": 14, "dead": 13}[str(report["condition"])]
