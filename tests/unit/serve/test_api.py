"""The api process itself, started as the launcher starts it: it serves, ends with code 0, has last words."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from firstlight.base.config import (
    API_KEYS_FILE,
    API_SOCKET,
    EngineSection,
    ModelSection,
    RunConfig,
    ServerSection,
    write_config,
)
from firstlight.base.failure import read_failure
from firstlight.engine.messages import Drain
from firstlight.serve.engine_link.orders import Accept, Refuse, Resume, encode_order
from support.api_server import says, wait_until
from support.byte_text import TEMPLATE, byte_tokenizer
from support.checkpoints import random_weights, tiny_description, write_hf_folder
from support.fake_engine import DEADLINE_S, FakeEngine

BODY = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fl-") as folder:  # short: it holds Unix sockets
        yield Path(folder)


def write_model(folder: Path) -> Path:
    description = tiny_description(vocab_size=300, eos_token_ids=(257,))
    write_hf_folder(folder, description, random_weights(description))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 257, "temperature": 0.5}))
    return folder


def start(run_dir: Path, model: str, **section: Any) -> tuple[subprocess.Popen[bytes], str, socket.socket]:
    """The process, the URL at which it serves, and the supervisor's end of its link."""
    config = RunConfig(
        run_dir=str(run_dir),
        model=ModelSection(path=model, served_names=("tiny",)),
        engine=EngineSection(),
        server=ServerSection(drain_s=5.0, **section),
    )
    write_config(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        command = [sys.executable, "-P", "-m", "firstlight.serve.api", "--run-dir", str(run_dir)]
        ours, control = socket.socketpair()
        with control:
            process = subprocess.Popen(
                [*command, "--fd", str(listener.fileno()), "--control-fd", str(control.fileno())],
                pass_fds=[listener.fileno(), control.fileno()],
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        return process, f"http://127.0.0.1:{listener.getsockname()[1]}", ours


def test_it_serves_and_ends_with_code_0(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / API_KEYS_FILE).write_text("key\n")
    process, url, link = start(run_dir, str(write_model(tmp_path)))
    link.sendall(encode_order(Accept({"status": "ready", "elapsed_s": 1.5})))
    engine = FakeEngine(run_dir, says("Hello!")).start()
    try:
        headers = {"authorization": "Bearer key"}
        with httpx.Client(base_url=url, headers=headers, timeout=DEADLINE_S, trust_env=False) as http:
            wait_until(lambda: http.get("/health").status_code == 200, "ready")
            answer = http.post("/v1/chat/completions", json=BODY).json()
            assert answer["choices"][0]["message"]["content"] == "Hello!"
            assert http.get("/startup").json()["elapsed_s"] == 1.5
            assert http.get("/startup/events").text.startswith("event: ready\ndata: {")
            assert http.get("/server_info").json()["generation_defaults"] == {"temperature": 0.5}
            http.headers["authorization"] = "Bearer wrong"
            assert http.get("/v1/models").status_code == 401
        process.send_signal(signal.SIGINT)  # of a terminal; only the launcher's SIGTERM counts
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
        assert len(engine.wait_for(Drain)) == 1
        assert read_failure(run_dir, "api") is None
    finally:
        link.close()
        process.kill()
        process.wait()
        engine.stop()


@pytest.mark.parametrize(
    ("section", "model", "exit_code", "message"),
    [
        ({}, "none.gguf", 3, "does not exist"),
        ({"tls_cert": "none.pem", "tls_key": "none.pem"}, "", 2, "none.pem"),
    ],
)
def test_a_start_that_fails_leaves_last_words(
    run_dir: Path, tmp_path: Path, section: dict[str, str], model: str, exit_code: int, message: str
) -> None:
    path = str(tmp_path / model) if model else str(write_model(tmp_path))
    process, _, link = start(run_dir, path, **section)
    with link:
        assert process.wait(DEADLINE_S) == exit_code
    failure = read_failure(run_dir, "api")
    assert failure is not None
    assert (failure.exit_code, bool(failure.hint)) == (exit_code, True)
    assert message in failure.message


@pytest.mark.parametrize("source", ["{% for %}", "{{ raise_exception('never') }}", "{{ nothing() }}"])
def test_a_chat_template_that_cannot_work_refuses_to_start(
    run_dir: Path, tmp_path: Path, source: str
) -> None:
    model = write_model(tmp_path)
    (model / "chat_template.jinja").write_text(source)
    process, _, link = start(run_dir, str(model))
    with link:
        assert process.wait(DEADLINE_S) == 3
    failure = read_failure(run_dir, "api")
    assert failure is not None
    assert failure.message.startswith(f"{model / 'chat_template.jinja'}: the chat template ")
    assert "--chat-template" in failure.hint


def test_it_obeys_its_supervisor(run_dir: Path, tmp_path: Path) -> None:
    """Nobody is accepted before the order; a verdict refuses until it is withdrawn; it ends with its link."""
    process, url, link = start(run_dir, str(write_model(tmp_path)))
    engine = FakeEngine(run_dir, says("Hello!")).start()
    try:
        wait_until(lambda: _is_healthy(run_dir / API_SOCKET), "ready on its private socket")
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(f"{url}/health", timeout=0.5, trust_env=False)
        with httpx.Client(base_url=url, timeout=DEADLINE_S, trust_env=False) as http:
            link.sendall(encode_order(Accept({"status": "ready"})))
            assert http.get("/health").status_code == 200
            link.sendall(encode_order(Refuse("rank 1 is stopped.", "Look.")))
            wait_until(lambda: http.get("/health").status_code == 503, "refusing")
            error = http.post("/v1/chat/completions", json=BODY).json()["error"]
            assert "rank 1 is stopped. Look." in error["message"]
            told = {"message": "rank 1 is stopped.", "what_to_do": "Look."}
            assert http.get("/startup").json() == {"status": "stalled", "verdict": told}
            assert http.get("/startup/events").text.startswith("event: stalled\n")
            assert http.get("/health/live").status_code == 200
            link.sendall(encode_order(Resume()))
            wait_until(lambda: http.get("/health").status_code == 200, "serving again")
            assert http.get("/startup").json() == {"status": "ready"}
            link.sendall(encode_order(Refuse("rank 0 was ended.", "Look.", for_good=True)))
            wait_until(lambda: http.get("/health/live").status_code == 503, "dead")
            assert "rank 0 was ended. Look." in http.get("/health/live").json()["error"]["message"]
            assert http.get("/startup").json()["status"] == "lost"
        link.close()
        assert process.wait(DEADLINE_S) == 0
    finally:
        link.close()
        process.kill()
        process.wait()
        engine.stop()


def _is_healthy(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return client.recv(100).startswith(b"HTTP/1.1 200")
