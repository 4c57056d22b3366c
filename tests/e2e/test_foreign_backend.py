"""`serve --backend vllm` around a stand-in for vLLM: phases, hand-over, forwarding, stalls, ends.

The stand-in prints recorded lines and makes tokens in a process of its own; the path around it is the real
one. With the real vLLM: `make test-vllm`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from firstlight.base.process import start_ticks
from support.serving import RunningServer
from support.stand_in_vllm import CORE, install_stand_in

DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_stand_in(tmp_path_factory.mktemp("stand-in"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def serve(python: Path, model: Path) -> Callable[..., RunningServer]:
    def start(*flags: str, engine: tuple[str, ...] = ()) -> RunningServer:
        backend = ("--backend", "vllm", "--backend-python", str(python), "--served-name", "m")
        return RunningServer(model, *backend, *flags, *(("--", *engine) if engine else ()))

    return start


@pytest.fixture(scope="module")
def server(serve: Callable[..., RunningServer]) -> Iterator[RunningServer]:
    flags = ("--max-body", "2000", "--max-model-len", "512", "--api-key", "sesame")
    with serve(*flags, engine=("--token-s", "0.02")) as running:
        yield running
        assert running.stop() == 0


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    headers = {"Authorization": "Bearer sesame"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=DEADLINE_S) as one:
        yield one


@contextlib.contextmanager
def starting(server: RunningServer) -> Iterator[RunningServer]:
    try:
        yield server
    finally:
        server.kill()


def until(look: Callable[[], Any]) -> Any:
    """What `look` says, once it says anything."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError, psutil.Error):
            if found := look():
                return found
        time.sleep(0.02)
    raise AssertionError("it did not happen in time")


def family(server: RunningServer, word: str = "") -> list[psutil.Process]:
    children = psutil.Process(server.pid).children(recursive=True)
    alive = [child for child in children if start_ticks(child.pid) is not None]
    return [child for child in alive if word in " ".join(child.cmdline())]


def core_of(server: RunningServer) -> psutil.Process:
    return until(lambda: family(server, CORE))[0]


def state(client: httpx.Client) -> Any:
    return client.get("/state").json()


def test_a_start_is_told_in_phases_and_ends_with_a_token(serve: Callable[..., RunningServer]) -> None:
    with starting(serve(engine=("--shard-s", "0.6", "--pause-s", "0.1"))) as server:
        seen = until(lambda: (s := httpx.get(f"{server.url}/startup").json()).get("phase") == "weights" and s)
        assert (seen["total"], seen["unit"], seen["status"]) == (4, "shards", "starting")
        names = {process["name"] for process in seen["processes"]}
        assert names == {"api", "rank-0", "vllm"}
        answer = httpx.post(f"{server.url}/v1/completions", json={})
        assert answer.status_code == 503
        assert "rank 0 is in phase weights" in answer.json()["error"]["message"]
        listed = until(lambda: _ps(server).get("rank-0", {}).get("pid") == core_of(server).pid)
        assert listed
        server.wait_for(r"^ready in")
        said = "\n".join(server.lines)
        assert "m with vllm 0.32.0, 1 rank" in said
        for phase in ("weights     4 of 4 shards", "kv          78,208 tokens"):
            assert phase in said
        assert httpx.get(f"{server.url}/startup").json()["status"] == "ready"
        until(lambda: {process["phase"] for process in _ps(server).values()} == {"serving"})
        assert server.stop() == 0


def _ps(server: RunningServer) -> dict[str, Any]:
    return {process["name"]: process for process in _run(server).get("processes", ())}


def _run(server: RunningServer) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "firstlight", "ps", "--json"], capture_output=True, text=True, check=True
    )
    return next((run for run in json.loads(done.stdout)["runs"] if run["pid"] == server.pid), {})


def test_what_stands_behind_the_dashes_and_our_own_options_reach_the_engine(client: httpx.Client) -> None:
    options = state(client)["options"]
    assert (options["token_s"], options["max_model_len"]) == (0.02, "512")
    assert options["served_model_name"] == "m"


def test_paths_queries_and_answers_go_through(client: httpx.Client) -> None:
    assert client.get("/v1/models?a=%2F&b=1").json() == {"path": "/v1/models?a=%2F&b=1"}
    done = client.post("/v1/completions", json={"max_tokens": 3})
    assert len(done.json()["choices"][0]["text"].split()) == 3
    assert "access-control-allow-origin" not in done.headers


def test_the_clients_key_stays_here_and_headers_of_a_connection_too(client: httpx.Client) -> None:
    headers = {"Connection": "keep-alive, x-mine", "X-Mine": "1", "X-Theirs": "2"}
    seen = {name.lower() for name in client.get("/state", headers=headers).json()["headers"]}
    assert "x-theirs" in seen
    assert not seen & {"authorization", "x-mine", "connection"} - {"connection"}
    with client.stream("POST", "/v1/completions", json={"stream": True, "max_tokens": 1}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert "x-private" not in answer.headers


def test_without_the_key_only_health_answers(server: RunningServer) -> None:
    assert httpx.get(f"{server.url}/v1/models").status_code == 401
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/health/live").json() == {"status": "live"}


def test_a_body_that_is_too_large_is_refused_here(client: httpx.Client) -> None:
    refused = client.post("/v1/completions", json={"prompt": "x" * 3000})
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")
    chunks = (b"x" * 1000 for _ in range(3))
    assert client.post("/v1/completions", content=chunks).status_code == 413


def test_tokens_come_as_they_are_made_and_a_client_that_leaves_ends_the_work(client: httpx.Client) -> None:
    before = state(client)["aborted"]
    body = {"stream": True, "max_tokens": 10_000}
    started_s = time.monotonic()
    with client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith('data: {"text": "t')
        assert time.monotonic() - started_s < 10
    assert until(lambda: state(client)["aborted"] > before)


def test_a_core_that_is_stopped_is_named_and_may_come_back(
    server: RunningServer, client: httpx.Client
) -> None:
    core = core_of(server)
    body = {"stream": True, "max_tokens": 10_000}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        core.suspend()
        said = [line for line in lines if line]
    assert said[-1] == "data: [DONE]"
    assert f"rank 0 (pid {core.pid}) is stopped, in phase serving" in said[-2]
    refused = client.post("/v1/completions", json={})
    assert refused.status_code == 503
    assert f"kill -CONT {core.pid}" in refused.json()["error"]["message"]
    core.resume()
    assert until(lambda: client.post("/v1/completions", json={"max_tokens": 1}).status_code == 200)


def test_a_core_that_is_stopped_while_starting_ends_the_start(serve: Callable[..., RunningServer]) -> None:
    with starting(serve(engine=("--shard-s", "3"))) as server:
        core = core_of(server)
        until(lambda: httpx.get(f"{server.url}/startup").json().get("phase") == "weights")
        core.suspend()
        assert server.wait() == 6
        said = next(line for line in server.lines if line.startswith("error: "))
        assert f"rank 0 (pid {core.pid}) is stopped, in phase weights at" in said


def test_an_idle_engine_is_healthy(serve: Callable[..., RunningServer]) -> None:
    with serve("--stall-look", "1", "--stall-verdict", "2") as server:
        for _ in range(8):
            assert httpx.get(f"{server.url}/health").status_code == 200
            time.sleep(0.5)
        assert server.stop() == 0
    assert not [line for line in server.lines if line.startswith("error")]


def test_the_doctor_finds_the_run_of_a_foreign_engine(server: RunningServer) -> None:
    run_dir = _run(server)["run_dir"]
    command = [sys.executable, "-m", "firstlight", "doctor", "--run", run_dir, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    (found,) = json.loads(done.stdout)["servers"]
    assert (done.returncode, found["condition"]) == (0, "healthy"), found["summary"]
    assert found["target"]["engine"] == "vllm"
    ranks = [one for one in found["processes"] if one["role"] == "rank"]
    assert [one["rank"] for one in ranks] == [0]


def test_an_engine_that_is_killed_leaves_nothing_and_its_end_is_told(
    serve: Callable[..., RunningServer],
) -> None:
    with serve() as server:
        rest = {*family(server, CORE), *family(server, "stand-in-grandchild")}
        assert len(rest) == 2
        engine = family(server, "vllm.entrypoints.openai.api_server")[0]
        body = {"stream": True, "max_tokens": 100_000}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            next(lines)
            engine.kill()
            said = [line for line in lines if line]
        assert "vllm was ended by SIGKILL" in said[-2]
        assert server.wait() == 6
        _, alive = psutil.wait_procs(list(rest), timeout=5)
        assert alive == []
    assert any("vllm was ended by SIGKILL" in line for line in server.lines)


def test_a_start_that_fails_says_the_cause_and_not_the_last_line(
    serve: Callable[..., RunningServer],
) -> None:
    with starting(serve(engine=("--fail",))) as server:
        assert server.wait() == 6
        said = "\n".join(server.lines)
        assert "error: vllm (rank 0) ended: ValueError: there is not enough of it." in said
        assert "the log of vllm is" in said


def test_nothing_is_left_when_the_supervisor_is_killed(
    serve: Callable[..., RunningServer], model: Path
) -> None:
    with serve() as server:
        everyone = family(server)
        assert len(everyone) == 5  # janitor, relay, engine, core, grandchild
        janitor = family(server, "janitor.py")[0].cmdline()
        # The run's control group is an argument of its janitor; empty where none may be made.
        group = Path(janitor[janitor.index(Path(_run(server)["run_dir"]).name) + 1] or model / "none")
        assert group.exists() == (group.name != "none")
        os.kill(server.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(everyone, timeout=10)
        assert alive == []
        until(lambda: not group.exists())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ("--backend", "vllm", "--page-size", "4", "--max-stop", "3"),
            "--max-stop is an option of the native",
        ),
        (("--backend", "vllm", "--", "--port", "1"), "--port cannot stand behind the --"),
        (("--backend", "sglang", "--backend-python", sys.executable), "has no package sglang"),
        (("--backend", "vllm", "--backend-python", "no/such/python"), "is no program that can be run"),
        (("--", "--enforce-eager"), "is for a foreign engine, but the backend is native"),
    ],
)
def test_a_mistake_is_said_before_anything_is_started(
    model: Path, flags: tuple[str, ...], words: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "firstlight", "serve", str(model), "--port", port, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert words in done.stderr
    assert "what to do: " in done.stderr


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_dead_core_ends_a_run_whose_engine_does_not_notice(
    serve: Callable[..., RunningServer], is_asked: bool
) -> None:
    """The stand-in's server goes on without its core: nobody asks it anything, or a request hangs."""
    with serve(engine=("--token-s", "0.05")) as server:
        run_dir = _run(server)["run_dir"]
        core = core_of(server)
        if not is_asked:
            core.kill()
            assert server.wait() == 6
        else:
            body = {"stream": True, "max_tokens": 100_000}
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as answer:
                lines = answer.iter_lines()
                next(lines)
                core.kill()
                said = [line for line in lines if line]
            assert said
            assert server.wait() == 6
    assert "error: rank 0 was ended by SIGKILL." in server.lines
    command = [sys.executable, "-m", "firstlight", "doctor", "--run", run_dir, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    (found,) = json.loads(done.stdout)["servers"]
    assert (done.returncode, found["summary"]) == (13, "rank 0 was ended by SIGKILL.")
