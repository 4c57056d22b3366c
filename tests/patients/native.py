"""Native servers and ranks of patients, and what is asked of them.

Used by the kinds of our own engine. `Server` is `firstlight serve` as anybody runs it; `Ranks` are the
engine's processes without a supervisor, which would end a stopped start before the doctor comes. Invariant:
the moment of a fault is found in the engine's own black boxes.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

from firstlight.base.blackbox.reader import Box, NotABox, read_box
from firstlight.base.blackbox.store import box_path
from firstlight.base.config import EngineSection, ModelSection, RunConfig, ServerSection, write_config
from firstlight.doctor.case.target import Target
from firstlight.doctor.servers.discover import target_of_run
from patients.patient import INJECTED, Patient, Ward, until

SLOW_TO_JUDGE = ("--stall-look", "600", "--stall-verdict", "900")  # so that the living can be examined
_SMALL = ("--kv-memory", "64M")


def change(process: str, module: str, function: str, **arguments: Any) -> dict[str, str]:
    """Variables that put a mistake into one process of the engine: "rank 1", or "rank" for each."""
    words = ["firstlight.engine.rank", f"--{process}"]
    order = {"process": words, "module": module, "change": function, "arguments": arguments}
    return {"XDG_SESSION_NOTES": json.dumps(order), "PYTHONPATH": ""}


def box(run_dir: Path, name: str) -> Box | None:
    """A black box, if it is there."""
    with contextlib.suppress(NotABox):
        return read_box(box_path(run_dir, name), with_events=False)
    return None


def phase(run_dir: Path, name: str) -> str:
    """Where a process is; empty before its first phase."""
    found = box(run_dir, name)
    return found.phase.name if found and found.phase else ""


class Engine:
    """What server and ranks have in common."""

    run_dir: Path

    def find(self) -> Target:
        return target_of_run(self.run_dir)

    def pid(self, name: str) -> int:
        """Waits until the process has opened its box."""
        return int(until(lambda: (found := box(self.run_dir, name)) and found.pid, f"a box of {name}"))

    def until_phase(self, name: str, *phases: str) -> str:
        """Waits until a process is in one of these phases; looks all the time, as some are short."""
        wait = f"{name} in {phases}"
        return str(until(lambda: (now := phase(self.run_dir, name)) in phases and now, wait, every_s=0.0005))

    def patient(self, note: str = "", fault_s: float | None = None, **fields: Any) -> Patient:
        """The fault has happened just now, or at `fault_s`."""
        at_s = time.monotonic() if fault_s is None else fault_s
        say = getattr(self, "verdict", None)
        return Patient(self.find, ("--run", str(self.run_dir)), at_s, note, own_verdict=say, **fields)


class Server(Engine):
    """`firstlight serve MODEL` on a free port."""

    def __init__(
        self,
        ward: Ward,
        model: Path | str,
        *flags: str,
        variables: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.log = ward.folder / f"serve-{len(os.listdir(ward.folder))}.txt"
        command = [sys.executable, "-m", "firstlight", "serve", str(model), "--port", "0"]
        if ward.is_left_to_us:
            flags = tuple(flag for flag in flags if flag not in SLOW_TO_JUDGE)
        with self.log.open("wb") as log:
            options = {"stderr": log, "stdout": log, **options}
            self.process = ward.spawn([*command, *_SMALL, *flags], with_injected(ward, variables), **options)
        self.run_dir = Path()

    def started(self) -> Server:
        """Waits until the children exist."""
        self.run_dir = Path(until(self._run_dir, "the start of the children"))
        return self

    def ready(self) -> Server:
        """Waits until it serves."""
        self.started()
        until(lambda: "ready in" in self.said() or self._fails(), "readiness", every_s=0.02)
        return self

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def port(self) -> int:
        config = json.loads((self.run_dir / "config.json").read_bytes())
        return int(config["server"]["port"])

    def ask(self, prompt: str = "x", timeout_s: float = 60.0, **fields: Any) -> dict[str, Any]:
        """One completion. Raises `OSError` when none comes."""
        body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, **fields}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        with contextlib.closing(connection):
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            return dict(json.loads(connection.getresponse().read()))

    def verdict(self) -> str:
        """What the supervisor says by itself: at its end, or to who asks for its health; else empty."""
        if self.process.poll() is not None:
            return next((line for line in self.said().splitlines() if line.startswith("error: ")), "it ended")
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1)
        with contextlib.closing(connection), contextlib.suppress(OSError, ValueError, LookupError):
            connection.request("GET", "/health")
            answer = connection.getresponse()
            message = str(json.loads(answer.read())["error"]["message"]) if answer.status == 503 else ""
            return "" if "not ready yet" in message else message
        return ""

    def _run_dir(self) -> str | None:
        self._fails()
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children():
                words = child.cmdline()
                if "--run-dir" in words:
                    return words[words.index("--run-dir") + 1]
        return None

    def _fails(self) -> None:
        assert self.process.poll() is None, f"the server ended: {self.said()}"


class Ranks(Engine):
    """The ranks of an engine; `after_ready` are not waited for: nobody takes their outputs."""

    def __init__(
        self,
        ward: Ward,
        model: Path,
        size: int = 1,
        variables: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.run_dir = ward.folder / "r"
        self.run_dir.mkdir(mode=0o755)
        section = EngineSection(tensor_parallel=size, threads=1, kv_memory_bytes=2**26)
        config = RunConfig(
            run_dir=str(self.run_dir),
            model=ModelSection(path=str(model), served_names=("m",), dtype="auto"),
            engine=msgspec.structs.replace(section, **options.pop("section", {})),
            server=ServerSection(),
        )
        write_config(config)
        command = ("-P", "-m", "firstlight.engine.rank", "--run-dir", str(self.run_dir), "--rank")
        given = {"OMP_NUM_THREADS": "1", **with_injected(ward, variables)}
        started = options.pop("started", range(size))
        with (self.run_dir / "ranks.log").open("wb") as log:
            options = {"stderr": log, "stdout": log, **options}
            self.processes = {
                rank: ward.python(*command, str(rank), variables=given, **options) for rank in started
            }


def with_injected(ward: Ward, variables: dict[str, str] | None) -> dict[str, str]:
    """The variables of a child; where they ask for a change, Python finds it."""
    given = dict(variables or {})
    if given.pop("PYTHONPATH", None) is not None:
        given["PYTHONPATH"] = os.pathsep.join((str(INJECTED), ward.environment()["PYTHONPATH"]))
    return given


class Load:
    """Clients that ask again and again, until the ward ends."""

    def __init__(self, ward: Ward, server: Server, clients: int = 2, **fields: Any) -> None:
        self._server, self._fields = server, {"max_tokens": 64, **fields}
        self._end = threading.Event()
        self.num_done = 0
        ward.stack.callback(self._end.set)
        for _ in range(clients):
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self._end.is_set():
            try:
                if "choices" in self._server.ask(**self._fields):
                    self.num_done += 1
            except (OSError, ValueError, http.client.HTTPException):
                self._end.wait(0.2)
