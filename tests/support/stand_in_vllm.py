"""A small server that starts and speaks as vLLM does: for the path around an engine, not for an engine.

`install_stand_in` makes an interpreter that has it as the package `vllm`, so that everything from finding
the package to ending its processes goes the real way. Run as a module it is that server: it prints recorded
lines, starts a process called VLLM::EngineCore which makes the tokens and has a child in a session of its
own, and listens on the socket that it is given. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socketserver
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

VERSION = "0.32.0"
CORE = "VLLM::EngineCore"
SLEEPER = "import time; time.sleep(600)"
# What the core does: a line in, a line out, and a grandchild that hides in its own session.
CORE_SCRIPT = f"""
import os, subprocess, sys
python = os.path.realpath("/proc/self/exe")
subprocess.Popen([python, "-c", {SLEEPER!r}, "stand-in-grandchild"], start_new_session=True)
for line in sys.stdin:
    print(line, end="", flush=True)
"""
HEAD = "({who} pid={pid}) INFO 11-29 21:05:10 [x.py:1] "
BAR = "\rLoading safetensors checkpoint shards: {percent:3d}% Completed | {done}/4 [00:01<00:00]"


def install_stand_in(folder: Path) -> Path:
    """The interpreter that has it."""
    package = folder / "site" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for path in (package, package.parent, package.parent.parent):
        (path / "__init__.py").write_text("")
    shutil.copy(__file__, package / "api_server.py")
    metadata = folder / "site" / f"vllm-{VERSION}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder / "site"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


class Core:
    """The process that makes the tokens."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [CORE, "-c", CORE_SCRIPT],
            executable=sys.executable,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.num_tokens = 0
        self._lock = threading.Lock()

    def token(self) -> str:
        """One more."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with self._lock:
            self.process.stdin.write(f"t{self.num_tokens}\n")
            self.process.stdin.flush()
            self.num_tokens += 1
            return self.process.stdout.readline().strip()


class Server(socketserver.ThreadingUnixStreamServer):
    """Its HTTP side. `num_aborted`: clients that left before their answer was complete."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, path: str, core: Core, options: argparse.Namespace) -> None:
        super().__init__(path, Handler)
        self.core, self.options = core, options
        self.num_aborted = 0


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Server

    def address_string(self) -> str:
        """A Unix socket has none."""
        return "client"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """As uvicorn logs."""

    def do_GET(self) -> None:
        """State, in the forms that the tests read."""
        core = self.server.core
        if self.path == "/metrics":
            self._whole(f'vllm:generation_tokens_total{{engine="0"}} {core.num_tokens}.0\n'.encode())
        elif self.path == "/state":
            options = vars(self.server.options)
            self._json(
                {"aborted": self.server.num_aborted, "headers": dict(self.headers), "options": options}
            )
        else:
            self._json({"path": self.path})

    def do_POST(self) -> None:
        """A completion, whole or as a stream; a token takes `--token-s`."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        count = int(body.get("max_tokens", 4))
        if not body.get("stream"):
            tokens = [self._token() for _ in range(count)]
            self._json({"choices": [{"text": " ".join(tokens)}]})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "keep-alive, x-private")
        self.send_header("X-Private", "between the two of us")
        self.end_headers()
        try:
            for _ in range(count):
                self._chunk(f"data: {json.dumps({'text': self._token()})}\n\n".encode())
            self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")
        except OSError:
            self.server.num_aborted += 1
            self.close_connection = True

    def _token(self) -> str:
        time.sleep(self.server.options.token_s)
        return self.server.core.token()

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()

    def _json(self, value: Any) -> None:
        self._whole(json.dumps(value).encode(), "application/json")

    def _whole(self, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Access-Control-Allow-Origin", "*")
        self.end_headers()
        self.wfile.write(body)


def say(who: str, pid: int, text: str, options: argparse.Namespace) -> None:
    """A line, then the pause that stands in for the work."""
    print(HEAD.format(who=who, pid=pid) + text, flush=True)
    time.sleep(options.pause_s)


def start(options: argparse.Namespace) -> Core:
    """The lines of a start, and the core."""
    mine = os.getpid()
    say("APIServer", mine, f"   version {VERSION}", options)
    say("APIServer", mine, "Resolved architecture: LlamaForCausalLM", options)
    core = Core()
    pid = core.process.pid
    say("EngineCore", pid, f"Initializing a V1 LLM engine (v{VERSION}) with config: model='m'", options)
    say("EngineCore", pid, f"Starting to load model {options.model}...", options)
    for done in range(5):
        print(BAR.format(percent=25 * done, done=done), end="", flush=True)
        time.sleep(options.shard_s)
    print(flush=True)
    if options.fail:
        say("EngineCore", pid, "ValueError: there is not enough of it.", options)
        print("RuntimeError: Engine core initialization failed. See root cause above. ", flush=True)
        sys.exit(1)
    say("EngineCore", pid, "Loading weights took 1.67 seconds", options)
    say("EngineCore", pid, "GPU KV cache size: 78,208 tokens, Maximum concurrency for 512 tokens", options)
    say("EngineCore", pid, "init engine (profile, create kv cache, warmup model) took 2 s", options)
    say("APIServer", mine, f"Starting vLLM server on unix:{options.uds}", options)
    return core


def main() -> None:
    """The server."""
    parser = argparse.ArgumentParser()
    for name in ("model", "uds", "served-model-name", "max-model-len"):
        parser.add_argument(f"--{name}")
    for name in ("pause-s", "shard-s", "token-s"):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    parser.add_argument("--fail", action="store_true")
    options = parser.parse_args()
    core = start(options)
    with Server(options.uds, core, options) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
