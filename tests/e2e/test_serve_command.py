"""`firstlight serve` from outside: starts, refusals, stops, and what is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from firstlight.base.process import start_ticks
from firstlight.facts.sources import resolve_model
from support.serving import RunningServer, write_chat_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny")


@contextlib.contextmanager
def starting(model: Path | str, *flags: str) -> Iterator[RunningServer]:
    """A server that is not waited for."""
    server = RunningServer(model, *flags)
    try:
        yield server
    finally:
        server.kill()


def children_of(server: RunningServer) -> list[psutil.Process]:
    """Those that live: a disposable child may just have ended."""
    found = psutil.Process(server.pid).children(recursive=True)
    return [child for child in found if start_ticks(child.pid) is not None]


def assert_all_end(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=15)
    assert alive == []


def test_a_life_with_a_request_and_a_graceful_stop(model: Path) -> None:
    with RunningServer(model) as server:
        rank = child_of(server, "firstlight.engine.rank").cmdline()
        run_dir = Path(rank[rank.index("--run-dir") + 1])
        assert run_dir.is_dir()
        children = children_of(server)
        assert len(children) == 3  # janitor, rank, api
        models = httpx.get(f"{server.url}/v1/models").json()
        assert [entry["id"] for entry in models["data"]] == ["tiny"]
        assert server.stop() == 0
    assert_all_end(children)
    assert server.lines[-1] == "stopped."
    assert any(line.startswith("stopping: running requests have 10 s to end") for line in server.lines)
    assert not run_dir.exists()
    assert list(Path("/dev/shm").glob(f"{run_dir.name}-*")) == []


def test_while_it_drains_a_stream_goes_on_and_others_are_told(model: Path) -> None:
    """With the launcher in play, which holds the socket beside the api process."""
    body = {"prompt": ["x"] * 4, "n": 16, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with RunningServer(model, "--drain", "20") as server:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(server.pid, signal.SIGINT)
            deadline = time.monotonic() + 10
            while (told := httpx.get(f"{server.url}/health", timeout=1)).status_code == 200:
                assert time.monotonic() < deadline
            assert (told.status_code, told.json()["error"]["code"]) == (503, "stopping")
            assert httpx.get(f"{server.url}/health/live", timeout=1).status_code == 200
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.wait() == 0


def test_the_printed_command_works(model: Path) -> None:
    with RunningServer(model, "--max-model-len", "128") as server:
        first = next(number for number, line in enumerate(server.lines) if line.startswith("  curl"))
        deadline = time.monotonic() + 10
        while len(server.lines) < first + 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        command = "\n".join(server.lines[first : first + 3])
        shown = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
    assert json.loads(shown)["choices"][0]["message"]["role"] == "assistant"


def test_it_listens_long_before_it_is_ready_and_says_where_it_is(model: Path) -> None:
    with starting(model) as server:
        url = server.url
        assert time.monotonic() - server.started_s < 3
        answer = httpx.get(f"{url}/v1/models", timeout=60)
        assert answer.status_code in (200, 503)
        if answer.status_code == 503:
            assert "retry-after" in answer.headers
            assert answer.json()["error"]["message"]


def accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def test_the_first_answer_comes_before_the_ordinary_imports_end(tmp_path: Path) -> None:
    """The command line is not read by typer yet: the message is that of the first moment."""
    path = tmp_path / "early.sock"
    with starting(tmp_path / "no-model", "--uds", str(path)) as server:
        deadline = time.monotonic() + 20
        while not accepts(path):
            assert time.monotonic() < deadline
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            answer = client.get("http://server/v1/models")
        assert answer.status_code == 503
        assert "it reads its options" in answer.json()["error"]["message"]
        assert server.wait() == 3
    assert not path.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_while_starting_leaves_nothing(model: Path, number: int) -> None:
    with starting(model) as server:
        server.wait_for("listening on")
        deadline = time.monotonic() + 10
        while len(children_of(server)) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        children = children_of(server)
        assert server.stop(number) == 0
    assert_all_end(children)


def test_children_die_with_a_launcher_that_was_killed(model: Path) -> None:
    with RunningServer(model) as server:
        children = children_of(server)
        os.kill(server.pid, signal.SIGKILL)
        assert_all_end(children)


def child_of(server: RunningServer, module: str) -> psutil.Process:
    return next(child for child in children_of(server) if module in child.cmdline())


def verdict_of(server: RunningServer) -> str:
    """What the public port says once it refuses."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.get(f"{server.url}/health", timeout=2)
            if answer.status_code == 503:
                return str(answer.json()["error"]["message"])
        time.sleep(0.02)
    raise AssertionError("the port does not refuse")


def test_a_lost_rank_ends_open_requests_with_the_verdict_and_then_the_run(model: Path) -> None:
    body = {"prompt": ["x"] * 4, "n": 16, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with RunningServer(model) as server:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            next(lines)
            child_of(server, "firstlight.engine.rank").kill()
            last = [line for line in lines if line.startswith("data: {")][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
        assert "rank 0 was ended by SIGKILL" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert server.wait() == 6


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_lost_api_process_ends_the_run(model: Path, number: int) -> None:
    with RunningServer(model) as server:
        children = children_of(server)
        child_of(server, "firstlight.serve.api").send_signal(number)
        assert server.wait() == 6
    assert any("the api process was ended by SIG" in line for line in server.lines)
    assert_all_end(children)


def test_an_engine_that_was_lost_is_started_again(model: Path) -> None:
    with RunningServer(model, "--on-stall", "restart") as server:
        child_of(server, "firstlight.engine.rank").kill()
        assert "rank 0 was ended by SIGKILL" in verdict_of(server)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{server.url}/health", timeout=2).status_code == 200:
                    break
            time.sleep(0.1)
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 2}).is_success
        assert server.stop() == 0
    assert any("starting again in 1 s (1 of 5)" in line for line in server.lines)


def test_a_rank_that_is_killed_ends_the_run_with_its_name(model: Path) -> None:
    with RunningServer(model, "--on-stall", "exit") as server:
        child_of(server, "firstlight.engine.rank").kill()
        assert server.wait() == 6
    said = [line for line in server.lines if "rank 0 was ended by SIGKILL" in line]
    assert len(said) == 1
    log = next(Path(line.split(" is ")[1]) for line in server.lines if "the log of rank 0 is" in line)
    assert "was ended by SIGKILL" in log.read_text()
    assert (log.parent / "api.log").exists()
    assert not list(log.parent.glob("*.sock"))
    shutil.rmtree(log.parent)


def test_what_a_killed_launcher_left_goes_when_another_starts(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # a short path, for the sockets
        monkeypatch.setenv("XDG_RUNTIME_DIR", "")
        monkeypatch.setenv("TMPDIR", place)
        with RunningServer(model) as server:
            children = children_of(server)
            os.kill(server.pid, signal.SIGKILL)
            assert_all_end(children)
        (left,) = Path(place).glob("firstlight-*")
        for path in (*left.iterdir(), left):
            os.utime(path, (0, 0))
        with RunningServer(model) as server:
            assert not left.exists()
            assert server.stop() == 0
        assert list(Path(place).glob("firstlight-*")) == []


def test_a_unix_socket(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "public.sock"
    with (
        RunningServer(model, "--uds", str(path)),
        httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client,
    ):
        assert client.get("/health").status_code == 200
    assert not path.exists()


def refused(*arguments: str) -> tuple[int, str]:
    """Exit code and message of a server that cannot start."""
    done = subprocess.run(
        [sys.executable, "-m", "firstlight", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def test_a_port_that_is_taken(model: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        code, message = refused(str(model), "--port", str(holder.getsockname()[1]))
    assert code == 5
    assert "the port is taken" in message


def test_files_that_are_no_models(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a model")
    pickle = tmp_path / "pytorch_model.bin"
    pickle.write_bytes(b"\x80\x02}q\x00.")
    for path in (text, pickle, tmp_path / "missing.gguf", tmp_path):
        code, message = refused(str(path), "--port", "0")
        assert code == 3, message
        assert "what to do:" in message


def test_a_model_that_was_cut_short(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    code, message = refused(str(tmp_path), "--port", "0")
    assert code == 3
    assert "model.safetensors" in message


def test_an_architecture_that_is_not_supported(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "strange"}))
    code, message = refused(str(tmp_path), "--port", "0")
    assert code == 4
    assert "strange" in message


def test_too_little_memory_says_how_much_is_needed(model: Path) -> None:
    code, message = refused(str(model), "--port", "0", "--kv-memory", "1000T")
    assert code == 5, message
    assert message.count("Not enough memory") == 1
    assert "what to do:" in message


@contextlib.contextmanager
def service_manager(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """All that systemd would hear, complete after the block: until the service says that it ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(folder / "notify"))
        manager.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(folder / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "1000000")
        heard: list[str] = []

        def listen() -> None:
            while "STOPPING=1" not in heard:
                heard.extend(manager.recv(4096).decode().split("\n"))

        listener = threading.Thread(target=listen)
        listener.start()
        yield heard
        listener.join()


def test_systemd_hears_of_a_dead_rank_and_sees_the_service_fail(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default: `Restart=on-failure` starts it again for the exit code, and the verdict is its status."""
    with service_manager(tmp_path, monkeypatch) as heard, RunningServer(model) as server:
        children = children_of(server)
        alive = [one for one in children if start_ticks(one.pid) is not None]
        next(one for one in alive if "engine.rank" in " ".join(one.cmdline())).kill()
        assert server.wait() == 6
    told = next(i for i, row in enumerate(heard) if row.startswith("STATUS=rank 0 was ended by SIGKILL."))
    assert heard.index("READY=1") < told < heard.index("STOPPING=1")
    assert "WATCHDOG=1" not in heard[told:]
    assert_all_end(children)


def test_systemd_hears_of_the_whole_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = resolve_model(None)  # a tiny one may be ready before the second status
    with service_manager(tmp_path, monkeypatch) as heard, RunningServer(model) as server:
        assert server.stop() == 0
    assert heard.index("READY=1") < heard.index("STATUS=The model is ready.")
    assert any(row.startswith("STATUS=The model is not ready yet: rank 0 is in phase") for row in heard)
    assert "WATCHDOG=1" in heard
