"""A container in small: a stranger's user, nothing to write to, proxies, limits; a rank that is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from firstlight.base.environment import cache_directory
from firstlight.base.process import start_ticks
from firstlight.ops.cpu.library import open_library
from support import container
from support.abilities import missing
from support.ports import free_port
from support.serving import write_chat_model

DEADLINE_S = 120.0
MEMORY = Path("/sys/fs/cgroup/memory")
PROCESSORS = Path("/sys/fs/cgroup/cpu")
VARIABLES = {
    "http_proxy": "http://127.0.0.1:9",
    "ALL_PROXY": "socks5://127.0.0.1:9",
    "PYTHONPATH": str(container.REPOSITORY / "src"),
    "PYTHONDONTWRITEBYTECODE": "1",
    "FIRSTLIGHT_CACHE": str(cache_directory()),  # read-only, and our kernels are in it
}
PROGRAM = [sys.executable, "-m", "firstlight"]
pytestmark = pytest.mark.needs("mount namespace")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    open_library()  # compiled, if it was not
    folder = write_chat_model(tmp_path_factory.mktemp("models") / "tiny")
    for file in folder.iterdir():
        file.chmod(0o644)  # a stranger reads it
    return folder


@pytest.fixture
def groups() -> Iterator[list[Path]]:
    """Limits of memory and of processors, where this machine lets us set them."""
    made: list[Path] = []
    if not missing("memory cgroup"):
        made.append(MEMORY / f"firstlight-test-{os.getpid()}")
        made[-1].mkdir()
        (made[-1] / "memory.limit_in_bytes").write_text(str(1500 * 2**20))
        if (PROCESSORS / "cpu.cfs_quota_us").exists() or (PROCESSORS / "cgroup.procs").exists():
            made.append(PROCESSORS / f"firstlight-test-{os.getpid()}")
            made[-1].mkdir()
            with contextlib.suppress(OSError):
                (made[-1] / "cpu.cfs_quota_us").write_text("150000")
    yield made
    for group in made:
        until(lambda group=group: not (group / "cgroup.procs").read_text(), "empty groups")  # type: ignore[misc]
        group.rmdir()


def until(look: object, what: str) -> object:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, httpx.TransportError, psutil.Error):
            if found := look():  # type: ignore[operator]
                return found
        time.sleep(0.05)
    raise AssertionError(f"there is no {what} in time")


class Box:
    """A container that serves, started again as `docker run --restart on-failure` would."""

    def __init__(self, tmp_path: Path, model: Path, groups: list[Path]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._tmp_path, self._model, self._groups = tmp_path, model, groups
        self.number = 0
        self.process: subprocess.Popen[str] | None = None

    @property
    def log(self) -> Path:
        return self._tmp_path / f"log-{self.number}"

    def start(self) -> None:
        self.number += 1
        folder = self._tmp_path / f"box-{self.number}"
        folder.mkdir()
        command = [*PROGRAM, "serve", str(self._model), "--port", str(self.port), "--tensor-parallel", "2"]
        with self.log.open("w") as log:
            self.process = container.start(
                folder,
                [*command, "--memory-fraction", "0.5"],
                shown=[self._model, cache_directory()],
                variables=VARIABLES,
                groups=self._groups,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        until(self.answers, "answer")

    def answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        answer = httpx.post(
            f"{self.url}/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0},
            timeout=60,
        )
        return answer.is_success

    def inside(self) -> psutil.Process:
        assert self.process is not None
        return psutil.Process(container.first_process(self.process))

    def rank(self) -> psutil.Process:
        alive = [one for one in self.inside().children() if start_ticks(one.pid) is not None]
        return next(one for one in alive if "firstlight.engine.rank" in one.cmdline())

    def end(self) -> None:
        if self.process is not None:
            container.end(self.process)


@pytest.fixture
def box(tmp_path: Path, model: Path, groups: list[Path]) -> Iterator[Box]:
    made = Box(tmp_path, model, groups)
    yield made
    made.end()


def test_it_serves_comes_back_after_a_rank_is_killed_and_drains(box: Box) -> None:
    box.start()
    first = box.inside()
    assert first.uids().real == container.UID
    assert first.environ().keys() - {"HOME", "LOGNAME", "TMPDIR"} <= VARIABLES.keys()
    assert "our own kernels" in box.log.read_text(), box.log.read_text()
    box.rank().kill()
    assert box.process is not None
    assert box.process.wait(DEADLINE_S) == 6, box.log.read_text()
    assert "was ended by SIGKILL" in box.log.read_text()
    box.start()
    streamed = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{box.url}/v1/completions", json=streamed, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        box.inside().send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2].replace(" ", "")
    assert box.process.wait(DEADLINE_S) == 0, box.log.read_text()


def test_a_command_inside_finds_its_server_and_strays_are_reaped(tmp_path: Path, model: Path) -> None:
    port = free_port()
    serve = [*PROGRAM, "serve", str(model), "--port", str(port)]
    folder = tmp_path / "box"
    folder.mkdir()
    log = tmp_path / "log"
    with log.open("w") as said:
        process = container.start(
            folder,
            serve,
            shown=[model, cache_directory()],
            variables=VARIABLES,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
    try:
        until(lambda: httpx.get(f"http://127.0.0.1:{port}/health").is_success, "health")
        enter = ["nsenter", "--target", str(container.first_process(process)), "--mount", "--pid"]
        enter += ["--ipc", "--root", f"--setuid={container.UID}", f"--setgid={container.UID}", "env", "-i"]
        enter += [f"{name}={value}" for name, value in VARIABLES.items()]
        listed = subprocess.run(
            [*enter, *PROGRAM, "ps"], capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert listed.returncode == 0, listed.stderr
        assert f":{port}" in listed.stdout
        stray = "import os, sys; os.fork() and os._exit(0); os.setsid(); print(os.getpid()); os._exit(0)"
        subprocess.run([*enter, sys.executable, "-c", stray], timeout=DEADLINE_S, check=True)
        first = psutil.Process(container.first_process(process))
        until(
            lambda: all(one.status() != psutil.STATUS_ZOMBIE for one in first.children()), "end of the strays"
        )
    finally:
        container.end(process)


@pytest.mark.parametrize(
    ("command", "code"),
    [(["env"], 0), (["ps"], 0), (["doctor"], 2)],  # 2: there is no server
)
def test_other_commands_work_there_too(tmp_path: Path, command: list[str], code: int) -> None:
    process = container.start(
        tmp_path,
        [*PROGRAM, *command],
        variables=VARIABLES,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert "this is a bug" not in said
    assert process.returncode == code, said


def test_where_nothing_at_all_can_be_written_to_the_variable_is_named(tmp_path: Path, model: Path) -> None:
    process = container.start(
        tmp_path,
        ["sh", "-c", 'dd if=/dev/zero of=/dev/shm/full bs=1M 2>/dev/null; exec "$@"', "sh"]
        + [*PROGRAM, "serve", str(model), "--port", "0"],
        shown=[model],
        variables=VARIABLES,
        shm_mb=1,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert "this is a bug" not in said
    assert "TMPDIR" in said
    assert process.returncode == 5, said
