"""Starting the small foreign server of `lookalike` as vLLM or as SGLang is started.

Used by the kinds that need an engine which is not ours. Invariant: its command line and titles are those that
the real engines have, so that it is found as they are.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import time
from pathlib import Path
from typing import Any

import psutil

from firstlight.doctor.case.target import Target
from firstlight.doctor.servers.discover import target_of_pid
from patients.patient import HERE, Patient, Ward, until
from support.ports import free_port

_PLACE = HERE / "lookalike"


class Foreign:
    """A running server. `order` says what goes wrong in it; `flags` are further ones of its command."""

    def __init__(
        self,
        ward: Ward,
        style: str,
        model: Path | str,
        size: int = 2,
        order: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.port = options.pop("port", 0) or free_port()
        flags: tuple[str, ...] = options.pop("flags", ())
        self.log = ward.folder / "log.txt"
        variables = {"XDG_SESSION_NOTES": json.dumps(order or {}), **options.pop("variables", {})}
        path = ward.environment()["PYTHONPATH"]
        variables["PYTHONPATH"] = os.pathsep.join((str(_PLACE), path))
        with self.log.open("wb") as log:
            options = {"stdout": log, "stderr": log, **options}
            self.process = ward.python(
                *_command(ward, style, str(model), size, self.port), *flags, variables=variables, **options
            )
        self.pid = self.process.pid

    def find(self) -> Target:
        return target_of_pid(self.pid)

    def titled(self, title: str) -> int:
        """The pid of the process with this title; waits for it."""
        return int(until(lambda: self._titled(title), f"a process called {title}"))

    def ready(self) -> Foreign:
        until(lambda: "startup complete" in self.said() or self._fails(), "readiness", every_s=0.05)
        return self

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def ask(self, tokens: int = 4, timeout_s: float = 60.0) -> int:
        """One completion; its status."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps({"max_tokens": tokens}))
            return connection.getresponse().status

    def patient(self, note: str = "", fault_s: float | None = None, **fields: Any) -> Patient:
        """The fault has happened just now, or at `fault_s`."""
        at_s = time.monotonic() if fault_s is None else fault_s
        return Patient(self.find, ("--pid", str(self.pid)), at_s, note, **fields)

    def _titled(self, title: str) -> int | None:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if child.cmdline()[:1] == [title]:
                        return child.pid
        return None

    def _fails(self) -> None:
        assert self.process.poll() is None, f"the server ended: {self.said()}"


def _command(ward: Ward, style: str, model: str, size: int, port: int) -> list[str]:
    if style == "sglang":
        options = ("--model-path", model, "--tp-size", str(size), "--port", str(port))
        return ["-m", "sglang.launch_server", *options]
    script = ward.folder / "vllm"  # the name that the engine's own command has
    script.write_text((_PLACE / "vllm.py").read_text())
    return [str(script), "serve", model, "--tensor-parallel-size", str(size), "--port", str(port)]
