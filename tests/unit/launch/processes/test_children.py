"""Real children with scripted behaviour, followed by the real loop."""

from __future__ import annotations

import io
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from firstlight.base.blackbox.store import box_path
from firstlight.base.blackbox.writer import create_box
from firstlight.base.clock import SystemClock
from firstlight.base.config import EngineSection, ModelSection, RunConfig, ServerSection
from firstlight.launch.control import LaunchState
from firstlight.launch.processes.children import Children
from firstlight.launch.processes.commands import ChildSpec
from firstlight.launch.public.public_side import PublicSide
from firstlight.launch.public.startup_responder import Front
from firstlight.launch.public.systemd import Notifier
from firstlight.launch.supervisor import supervise
from firstlight.launch.terminal.console import Console
from firstlight.launch.verdict import Verdict, verdict

SLEEPER = "import time\nwhile True: time.sleep(60)"
LEAVES_ON_SIGTERM = f"import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n{SLEEPER}"
IGNORES_SIGTERM = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{SLEEPER}"
FAILS = """
from firstlight.base.errors import ModelFileError
from firstlight.base.failure import write_failure
import sys
write_failure(RUN_DIR, "rank-0", ModelFileError("the file is cut short", "fetch it again"))
sys.exit(3)
"""
READY = """
import time
from pathlib import Path
from firstlight.base.blackbox.store import open_own_box
from firstlight.base.phases import PhaseReporter
report = PhaseReporter(open_own_box(Path(RUN_DIR), "rank-0", role="rank", rank=0)).report
report("weights", 0, 100, "bytes")
time.sleep(0.1)
report("weights", 100, 100, "bytes")
report("ready")
"""
HEALTHY_API = """
import signal, socket, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
listener = socket.socket(socket.AF_UNIX)
listener.bind(RUN_DIR + "/api.sock")
listener.listen()
print("the log of the api", flush=True)
while True:
    client, _ = listener.accept()
    client.recv(1000)
    client.sendall(b"HTTP/1.1 200 OK\\r\\n\\r\\n")
    client.close()
"""


def spec(name: str, script: str, run_dir: Path) -> ChildSpec:
    command = (sys.executable, "-c", f"RUN_DIR = {str(run_dir)!r}\n{script}")
    rank = int(name.removeprefix("rank-")) if name.startswith("rank-") else None
    return ChildSpec(name, command, {"PYTHONUNBUFFERED": "1"}, rank=rank)


class Run:
    """One supervised run in this process; `act` is called from a thread when `when` appears in the output."""

    def __init__(self, run_dir: Path, *, debug: bool = False) -> None:
        self.output = io.StringIO()
        self.config = RunConfig(
            run_dir=str(run_dir),
            model=ModelSection(path="m", served_names=("m",)),
            engine=EngineSection(threads=1),
            server=ServerSection(drain_s=1.0),
            debug=debug,
        )

    def follow(self, *specs: ChildSpec) -> Verdict:
        clock = SystemClock()
        console = Console(self.output, clock.now_s(), 1, has_keys=False)
        initial = LaunchState(running=tuple(s.name for s in specs), drain_s=1.0)
        run_dir = Path(self.config.run_dir)
        shutil.rmtree(run_dir / "boxes", ignore_errors=True)
        (run_dir / "boxes").mkdir()
        for one in specs:
            create_box(box_path(run_dir, one.name), role="rank", rank=one.rank, run_id="test")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            front = Front()
            front.open(listener)
            side = PublicSide(self.config, console, front, listener, Notifier(None, clock))
            try:
                with Children(self.config, specs, side, clock) as children:
                    return verdict(supervise(initial, children, clock))
            finally:
                side.close()
                front.close()

    def when(self, text: str, act: Callable[[], None]) -> None:
        def watch() -> None:
            deadline = time.monotonic() + 20
            while text not in self.output.getvalue() and time.monotonic() < deadline:
                time.sleep(0.01)
            act()

        threading.Thread(target=watch, daemon=True).start()


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_last_words_of_a_rank_become_the_verdict(tmp_path: Path) -> None:
    end = Run(tmp_path).follow(spec("rank-0", FAILS, tmp_path), spec("api", LEAVES_ON_SIGTERM, tmp_path))
    assert end.exit_code == 3
    assert end.failure is not None
    assert (end.failure.message, end.failure.hint) == ("the file is cut short.", "fetch it again")


def test_a_run_from_start_to_a_graceful_stop(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.when("ready in", interrupt)
    end = run.follow(spec("rank-0", READY + LEAVES_ON_SIGTERM, tmp_path), spec("api", HEALTHY_API, tmp_path))
    output = run.output.getvalue()
    assert end.exit_code == 0
    assert "100 B of 100 B" in output
    assert "the log of the api" in output
    assert output.index("weights") < output.index("ready in")


def test_output_of_a_rank_is_shown_only_with_debug(tmp_path: Path) -> None:
    script = "print('a warning')\nraise RuntimeError('broken')"
    for debug in (False, True):
        run = Run(tmp_path, debug=debug)
        end = run.follow(spec("rank-0", script, tmp_path), spec("api", LEAVES_ON_SIGTERM, tmp_path))
        assert end.failure is not None
        assert end.failure.message == "rank 0 ended with exit code 1: RuntimeError: broken"
        assert ("Traceback" in run.output.getvalue()) == debug


def test_a_second_interrupt_ends_children_that_ignore_the_first(tmp_path: Path) -> None:
    run = Run(tmp_path, debug=True)
    script = IGNORES_SIGTERM.replace("while", "print('deaf', flush=True)\nwhile")

    def interrupt_twice() -> None:
        interrupt()
        time.sleep(0.2)
        interrupt()

    run.when("rank 0: deaf", interrupt_twice)
    start = time.monotonic()
    end = run.follow(spec("rank-0", script, tmp_path))
    assert end.exit_code == 130
    assert time.monotonic() - start < 5


def test_grandchildren_do_not_outlive_their_parent(tmp_path: Path) -> None:
    script = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}])
open(RUN_DIR + "/grandchild", "w").write(str(child.pid))
raise SystemExit(1)
"""
    Run(tmp_path).follow(spec("rank-0", script, tmp_path))
    grandchild = int((tmp_path / "grandchild").read_text())
    deadline = time.monotonic() + 5
    while _is_alive(grandchild) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _is_alive(grandchild)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_child_that_cannot_start_leaves_nothing_behind(tmp_path: Path) -> None:
    missing = ChildSpec("api", ("/nonexistent/program",), {})
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(FileNotFoundError):
        Run(tmp_path).follow(spec("rank-0", SLEEPER, tmp_path), missing)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_flood_of_output_stops_nobody(tmp_path: Path) -> None:
    script = "import sys\nfor i in range(50000): sys.stdout.write('x' * 100 + '\\n')\nraise SystemExit(7)"
    run = Run(tmp_path)
    end = run.follow(spec("rank-0", script, tmp_path), spec("api", LEAVES_ON_SIGTERM, tmp_path))
    assert end.death is not None
    assert end.death.cause.code == 7
    assert len(end.death.last_lines) == 400


def test_nohup_is_respected(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = Run(tmp_path, debug=True)
        run.when("rank 0: up", lambda: os.kill(os.getpid(), signal.SIGHUP))
        script = "import time\nprint('up', flush=True)\ntime.sleep(0.3)\nraise SystemExit(9)"
        end = run.follow(spec("rank-0", script, tmp_path))
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert end.death is not None
    assert end.death.cause.code == 9


LOGS_AND_STAYS = f"""
print("the engine failed: the file is cut short", flush=True)
open(RUN_DIR + "/logged", "w").close()
{LEAVES_ON_SIGTERM}
"""
FAILS_ONCE_LOGGED = f"""
import os, time
while not os.path.exists(RUN_DIR + "/logged"): time.sleep(0.01)
{FAILS}
"""


@pytest.mark.parametrize("debug", [False, True])
def test_what_the_api_logs_of_a_start_that_fails_is_kept_for_debug(tmp_path: Path, debug: bool) -> None:
    """The launcher says the reason; the api process has been told it too, and logs it."""
    run = Run(tmp_path, debug=debug)
    end = run.follow(spec("rank-0", FAILS_ONCE_LOGGED, tmp_path), spec("api", LOGS_AND_STAYS, tmp_path))
    assert end.exit_code == 3
    assert ("the engine failed" in run.output.getvalue()) == debug
