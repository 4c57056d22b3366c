"""What a server prints, where nobody reads it, nowhere can it be printed, or somebody stops it at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from support.ports import free_port
from support.serving import READY_DEADLINE_S, STOP_DEADLINE_S, write_chat_model

PROGRAM = [sys.executable, "-m", "firstlight"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny")


def wait_until_ready(process: subprocess.Popen[bytes], port: int) -> None:
    deadline_s = time.monotonic() + READY_DEADLINE_S
    while time.monotonic() < deadline_s:
        assert process.poll() is None, f"the server ended with code {process.returncode}"
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError("the server is not ready")


def stop(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(STOP_DEADLINE_S)
    finally:
        process.kill()
        process.wait()


def test_a_reader_of_the_log_that_goes_away_costs_nothing(model: Path) -> None:
    port = free_port()
    command = [*PROGRAM, "serve", str(model), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        wait_until_ready(process, port)
        for _ in range(20):  # the access log of the api process is drained all the same
            body = {"prompt": "x", "max_tokens": 1}
            assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body).is_success
        assert stop(process) == 0


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_it_serves_with_closed_descriptors(model: Path, closed: str) -> None:
    port = free_port()
    command = f'exec "$@" {closed}'
    arguments = [*PROGRAM, "serve", str(model), "--port", str(port)]
    with subprocess.Popen(["sh", "-c", command, "sh", *arguments], stdout=subprocess.DEVNULL) as process:
        wait_until_ready(process, port)
        body = {"prompt": "x", "max_tokens": 1}
        assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body).is_success
        names = {os.readlink(f"/proc/{process.pid}/fd/{number}") for number in range(3)}
        assert not any(name.startswith(("socket:", "anon_inode:")) for name in names)
        assert stop(process) == 0


@pytest.mark.parametrize("command", [["env"], ["plan", "no-such-model"]])
def test_a_command_with_all_descriptors_closed_keeps_its_exit_code(command: list[str]) -> None:
    code = [subprocess.run([*PROGRAM, *command], capture_output=True, check=False).returncode]
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *PROGRAM, *command]
    code.append(subprocess.run(shell, check=False).returncode)
    assert code[0] == code[1]


def test_a_command_whose_reader_goes_away_does_not_claim_success() -> None:
    with subprocess.Popen([*PROGRAM, "env"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(STOP_DEADLINE_S) == 141


@pytest.mark.parametrize(
    "after", ["_socket", "firstlight.launch.public.startup_responder", "typer", "firstlight.launch.serve"]
)
def test_an_interrupt_in_the_first_moments_is_no_traceback(model: Path, after: str, tmp_path: Path) -> None:
    """The interrupt comes while a module is being imported, however quick this machine is."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        # Ignored by whatever a script starts with `&`, and so by all that is started below it.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {after!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "        return None\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    done = subprocess.run(
        [*PROGRAM, "serve", str(model), "--port", "0"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=READY_DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "interrupted.\n")
