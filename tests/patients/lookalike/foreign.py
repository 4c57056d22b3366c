"""A small server that is built as the large ones are: an API process, an engine, ranks that hold the weights.

Started by `vllm serve …` or `sglang.launch_server` of this folder. The processes title themselves, meet
through gloo, map safetensors, wait for each other in pipes and sum their results, as those do. What goes
wrong in it is said by one variable, and happens in these real waits. Invariant: it is small, not pretended.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ORDER = json.loads(os.environ.get("XDG_SESSION_NOTES", "{}"))
SPAWN = multiprocessing.get_context("spawn")


def take_title(title: str) -> None:
    """Writes the title over our own arguments, and what of it fits into the 15 letters of the name."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = title.encode()[: end - start - 1].ljust(end - start, b"\0")
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(text)
    ctypes.CDLL(None).prctl(15, title.encode()[:15], 0, 0, 0)


class Rank:
    """One process that holds a part of the model."""

    def __init__(self, rank: int, size: int, model: str, meeting: str, to_engine: Connection) -> None:
        self.rank, self.size, self.model, self.meeting, self.to_engine = rank, size, model, meeting, to_engine
        self.weights: list[Any] = []

    def is_meant(self, fault: str) -> bool:
        return ORDER.get("fault") == fault and ORDER.get("rank", 0) == self.rank

    def run(self) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        torch.set_num_threads(1)
        self.share_memory()
        if self.is_meant("absent"):  # it waits for its turn, which nobody gives
            self.to_engine.recv()
        dist.init_process_group("gloo", init_method=self.meeting, rank=self.rank, world_size=self.size)
        self.load()
        dist.barrier()
        self.report()
        self.to_engine.send("ready")
        while True:
            number, _ = self.to_engine.recv()
            self.to_engine.send((self.step(number), self.details(number)))

    def load(self) -> None:
        """Opens every shard first, with a bar, and reads the bytes when they are needed."""
        from safetensors import safe_open

        files = sorted(Path(self.model).glob("*.safetensors"))
        opened = []
        for number, file in enumerate(files, 1):
            opened.append(safe_open(file, framework="pt"))
            if self.rank == 0:
                share = 100 * number // len(files)
                sys.stderr.write(
                    f"\rLoading safetensors checkpoint shards: {share:3d}% | {number}/{len(files)}"
                )
        if self.rank == 0:
            sys.stderr.write("\n")
        for shard in opened:
            for name in shard.keys():  # noqa: SIM118 - it is no mapping
                self.weights.append(shard.get_tensor(name).clone())
                if ORDER.get("grows"):  # a copy in a wider type, kept beside it
                    self.weights.append(self.weights[-1].double())

    def share_memory(self) -> None:
        """Room for what the ranks of a machine hand to each other."""
        if ORDER.get("shared_bytes"):
            self.torch.zeros(ORDER["shared_bytes"] // 4).share_memory_()

    def details(self, number: int) -> bytes:
        """What goes with an answer."""
        return bytes(2**22 if self.is_meant("long_answer") and number >= ORDER["number"] else 64)

    def report(self) -> None:
        """What is told about the weights; a lot of it, if asked for."""
        for number in range(ORDER.get("report_lines", 1) if self.is_meant("report") else 1):
            sys.stderr.write(
                f"rank {self.rank}: group {number} of the weights is {len(self.weights)} tensors\n"
            )

    def step(self, number: int) -> float:
        row = self.torch.ones(1, 64)
        if self.is_meant("skip") and number >= ORDER.get("number", 2):
            return float(self.to_engine.recv()[0])
        for _ in range(4):
            self.dist.all_reduce(row)
        print(f"rank {self.rank} step {number} done")  # as a print of somebody who looks for a mistake
        return float(row.sum())


def run_rank(style: str, rank: int, *arguments: Any) -> None:
    title = f"VLLM::Worker_TP{rank}" if style == "vllm" else f"sglang::scheduler_TP{rank}"
    take_title(title)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "users" in ORDER:
        import torch
        import torch.distributed  # noqa: F401

        become(ORDER["users"][rank])
    Rank(rank, *arguments).run()


def become(user: int | None) -> None:
    """Run on as another user, whom that user may look at."""
    if user is not None:
        os.setuid(user)
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)


class Ranks:
    """The processes of all ranks, and a pipe to each."""

    def __init__(self, style: str, size: int, model: str) -> None:
        meeting = f"tcp://127.0.0.1:{free_port()}"
        self.pipes, self.theirs, self.processes = [], [], []
        for rank in range(size):
            if rank in ORDER.get("not_started", []):
                continue
            ours, theirs = SPAWN.Pipe()
            process = SPAWN.Process(target=run_rank, args=(style, rank, size, model, meeting, theirs))
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
            self.theirs.append(theirs)  # kept open: so the end of a rank is no end of the pipe

    def wait(self) -> None:
        for pipe in self.pipes:
            pipe.recv()

    def step(self, number: int) -> float:
        is_long = ORDER.get("fault") == "long_answer" and number >= ORDER["number"]
        for pipe in self.pipes:
            pipe.send((number, bytes(2**22 if is_long else 64)))
            if is_long:  # a second order goes out before the first answer was read
                pipe.send((number, bytes(2**22)))
        return max(pipe.recv()[0] for pipe in self.pipes)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_core(size: int, model: str, to_api: Connection) -> None:
    """vLLM's engine core: a scheduler between the API process and the workers."""
    take_title("VLLM::EngineCore")
    ranks = Ranks("vllm", size, model)
    become(ORDER.get("user"))
    ranks.wait()
    to_api.send("ready")
    while True:
        to_api.send(ranks.step(to_api.recv()))


class Drafts:
    """A small drafter over a small target: both choose a token from a state, and equal ones are accepted.

    It is the target behind a first matrix, fc, which makes of a captured state what the target chooses by.
    """

    STATE, VOCABULARY, MOST = 12, 256, 3

    def __init__(self, has_fc: bool) -> None:
        chance = random.Random(0)
        self._head = [[chance.gauss(0, 1) for _ in range(self.STATE)] for _ in range(self.VOCABULARY)]
        self._has_fc = has_fc
        self._num_steps = self._num_tokens = 0

    def step(self, number: int) -> None:
        """One step of the target, which verifies the drafts made for it."""
        accepted = 0
        while accepted < self.MOST and self._accepts(number * 10 + accepted):
            accepted += 1
        self._num_steps += 1
        self._num_tokens += 1 + accepted

    @property
    def accept_length(self) -> float:
        """Tokens of a step since it was asked last."""
        length = self._num_tokens / max(self._num_steps, 1)
        self._num_steps = self._num_tokens = 0
        return length

    def _accepts(self, seed: int) -> bool:
        chance = random.Random(seed)
        state = [chance.gauss(0, 1) for _ in range(self.STATE)]
        captured = [-value for value in state]
        through_fc = [-value for value in captured]
        return self._choose(through_fc if self._has_fc else captured) == self._choose(state)

    def _choose(self, state: list[float]) -> int:
        scores = [sum(a * b for a, b in zip(row, state, strict=True)) for row in self._head]
        return scores.index(max(scores))


class Engine:
    """What the API process has of the engine."""

    def __init__(self, style: str, size: int, model: str) -> None:
        self._lock, self._number = threading.Lock(), 0
        self.num_running = 0
        self.is_warm = False
        if style == "vllm":
            self._pipe, self._theirs = SPAWN.Pipe()
            self._core = SPAWN.Process(target=run_core, args=(size, model, self._theirs))
            self._core.start()
            become(ORDER.get("user"))
            self._pipe.recv()
        else:
            self._ranks: Ranks | None = Ranks(style, size, model)
            self._ranks.wait()
        self._style = style
        self._drafts = Drafts(ORDER["drafts"] != "fc left out") if "drafts" in ORDER else None

    def generate(self, tokens: int) -> None:
        self.num_running += 1
        for _ in range(tokens):
            with self._lock:
                self._number += 1
                self._step()
                if self._drafts is not None:
                    self._drafts.step(self._number)
        if self._drafts is not None:
            sys.stderr.write(
                f"Decode batch. #running-req: {self.num_running}, #token: {self._number}, "
                f"token usage: 0.01, accept len: {self._drafts.accept_length:.2f}, #queue-req: 0\n"
            )
        self.num_running -= 1

    def _step(self) -> None:
        if self._style == "vllm":
            self._pipe.send(self._number)
            self._pipe.recv()
        else:
            self._ranks.step(self._number)


def handler_of(engine: Engine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(200, f"vllm:num_requests_running {engine.num_running}\n")
            else:
                self._answer(200 if engine.is_warm else 503, "{}")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            engine.generate(body.get("max_tokens", 1))
            self._answer(200, json.dumps({"choices": [{"text": "a"}]}))

        def _answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            return

    return Handler


def serve(style: str, model: str, size: int, port: int) -> None:
    """Loads, opens the port, warms up through it as a client would, and serves until it is ended."""
    if ORDER.get("ignores_children"):
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if ORDER.get("tokens_file"):
        fetch(ORDER["tokens_file"])
    engine = Engine(style, size, model)
    server_thread = threading.Thread(target=listen, args=(engine, port), name="http", daemon=True)
    server_thread.start()
    time.sleep(0.3)
    body = json.dumps({"max_tokens": 1}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body)
    while not engine.is_warm:
        try:
            with urllib.request.urlopen(request, timeout=600):
                engine.is_warm = True
        except OSError as error:
            sys.stderr.write(f"warm-up failed: {error}\n")
            time.sleep(1)
    sys.stderr.write("Application startup complete.\n")
    signal.pause()


def listen(engine: Engine, port: int) -> None:
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer.allow_reuse_address = False
    ThreadingHTTPServer(("127.0.0.1", port), handler_of(engine)).serve_forever()


def fetch(url: str) -> None:
    """A file of the model that is not here yet."""
    with urllib.request.urlopen(url, timeout=600) as answer:
        answer.read()


def build(source: str) -> None:
    """Compiles a kernel, as a child."""
    subprocess.run(["g++", "-O2", "-c", source, "-o", "/dev/null"], check=True)


def arguments_of(words: list[str]) -> tuple[str, int, int]:
    """Model, ranks and port from either engine's options."""
    options = {words[place]: words[place + 1] for place in range(len(words) - 1) if words[place][:2] == "--"}
    size = options.get("--tensor-parallel-size") or options.get("--tp-size") or "1"
    model = options.get("--model-path") or next(word for word in words if not word.startswith("-"))
    return model, int(size), int(options["--port"])
