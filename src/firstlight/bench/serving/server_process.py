"""A server as a benchmark's subject, `firstlight serve` or another: started, watched from outside, ended.

Linux only, as it reads /proc. Invariant: leaving the `with` block ends the server and everything it started,
and so does our own end.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shlex
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Self

from firstlight.base.blackbox.reader import NotABox, PhaseRecord, read_box
from firstlight.base.blackbox.store import box_path
from firstlight.base.environment import child_environment
from firstlight.base.errors import EngineError
from firstlight.base.process import Child, start_child
from firstlight.doctor.servers.procfs import TICKS_PER_S, ProcFs

_TRY_ALONE = "Run the same command by itself: {}"

_HOST = "127.0.0.1"
_POLL_S = 0.01
_LEAVE_S = 30.0
_ERROR = re.compile(r"^error: (.*?)\n  what to do: (.*?)\s*\Z", re.MULTILINE | re.DOTALL)  # the last words
_PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)


class CommandServer:
    """Any server that takes --host and --port after `command`: a free port is chosen."""

    def __init__(self, command: Sequence[str], variables: dict[str, str] | None = None) -> None:
        self.port = _free_port()
        self.url = f"http://{_HOST}:{self.port}"
        self._command = [*command, "--host", _HOST, "--port", str(self.port)]
        self._environment = child_environment(variables or {})
        self._child: Child | None = None
        self._log: IO[bytes] = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed in __exit__
        self._reader = threading.Thread(target=self._copy_output, daemon=True)
        self.started_s = 0.0  # time.monotonic(), the clock of the progress lines

    def __enter__(self) -> Self:
        self.started_s = time.monotonic()
        self._child = start_child(self._command, self._environment)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._child is not None
        self._child.send(signal.SIGTERM)
        deadline_s = time.monotonic() + _LEAVE_S
        while self._child.poll() is None and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        if self._child.poll() is None:
            self._child.send(signal.SIGKILL)  # the kernel ends its children with it
            self._child.wait(_LEAVE_S)
        self._reader.join(_LEAVE_S)
        self._child.close()
        self._log.close()

    def wait_for_port(self, deadline_s: float = 30.0) -> float:
        """Seconds from the launch until the port accepted a connection."""
        while True:
            try:
                socket.create_connection((_HOST, self.port), timeout=1).close()
            except OSError:
                self._wait_or_raise("its port is closed", deadline_s)
            else:
                return time.monotonic() - self.started_s

    def wait_for_answer(self, path: str, body: bytes, deadline_s: float) -> float:
        """Seconds from the launch until a POST of `body` was answered 200 to the end."""
        while self.status(path, body) != 200:
            self._wait_or_raise("it gives no answer", deadline_s)
        return time.monotonic() - self.started_s

    def wait_until_ready(self, deadline_s: float = 300.0) -> float:
        """Seconds from the launch until /health answered 200."""
        while self.status("/health") != 200:
            self._wait_or_raise("it is not ready", deadline_s)
        return time.monotonic() - self.started_s

    def status(self, path: str, body: bytes | None = None) -> int:
        """The status with which a GET, or a POST of `body`, is answered; 0: not at all."""
        connection = http.client.HTTPConnection(_HOST, self.port, timeout=5 if body is None else 60)
        try:
            if body is None:
                connection.request("GET", path)
            else:
                connection.request("POST", path, body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            reply.read()
            return reply.status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def pss_bytes(self) -> int:
        """Proportional memory of the whole process tree: shared pages are counted once in all."""
        assert self._child is not None
        return tree_pss_bytes(self._child.pid)

    def log(self) -> str:
        """What the server has printed."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def _copy_output(self) -> None:
        assert self._child is not None
        os.set_blocking(self._child.output_fd, True)
        while piece := os.read(self._child.output_fd, 1 << 16):
            self._log.write(piece)

    def tree(self) -> list[int]:
        """The ids of its processes, the first one first."""
        assert self._child is not None
        return process_tree(self._child.pid)

    @property
    def try_alone(self) -> str:
        """The remedy where it does not do what it should."""
        return _TRY_ALONE.format(shlex.join(self._command))

    def _wait_or_raise(self, state: str, deadline_s: float) -> None:
        assert self._child is not None
        if (cause := self._child.poll()) is not None:
            self._reader.join(_LEAVE_S)
            raise ended(f"the server {cause.describe()}", self.log(), self.try_alone)
        waited_s = time.monotonic() - self.started_s
        if waited_s > deadline_s:
            raise EngineError(f"{state} after {waited_s:.0f} s: {self.log()[-1500:].strip()}", self.try_alone)
        time.sleep(_POLL_S)


class ServerProcess(CommandServer):
    """`arguments` are those of `firstlight serve`, without a port."""

    def __init__(self, arguments: Sequence[str], variables: dict[str, str] | None = None) -> None:
        super().__init__([sys.executable, "-P", "-m", "firstlight", "serve", *arguments], variables)

    def phases(self) -> tuple[PhaseRecord, ...]:
        """The phases of rank 0 so far; empty where there is no run directory."""
        run_dir = self._run_directory()
        if run_dir is None:
            return ()
        try:
            return read_box(box_path(run_dir, "rank-0"), with_events=False).phases
        except NotABox:
            return ()

    def run_directory(self) -> Path:
        """Where the run keeps its black boxes. Raises `EngineError` before there is one."""
        run_dir = self._run_directory()
        if run_dir is None:
            raise EngineError("the server has no run directory", self.try_alone)
        return run_dir

    def pid(self, name: str) -> int:
        """Of the process with this name in the run: "api", "rank-0"."""
        return read_box(box_path(self.run_directory(), name), with_events=False).pid

    def cpu_s(self, name: str) -> float:
        """Processor time of one process of the run, all its threads."""
        stat = ProcFs().stat(self.pid(name))
        return (stat.user_ticks + stat.system_ticks) / TICKS_PER_S if stat is not None else 0.0

    def _run_directory(self) -> Path | None:
        for pid in self.tree():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"--run-dir" in command[:-1]:
                    return Path(os.fsdecode(command[command.index(b"--run-dir") + 1]))
        return None


def ended(how: str, log: str, remedy: str) -> EngineError:
    """What to say of a server that has ended: its own error and remedy, or else the end of its log."""
    if found := _ERROR.search(log):
        return EngineError(f"{how}: {found[1].strip()}", found[2].strip())
    return EngineError(f"{how}: {log[-1500:].strip()}", remedy)


def process_tree(pid: int) -> list[int]:
    """The process and all that descend from it."""
    pids = [pid]
    for one in pids:  # grows while it is walked
        pids += _children(one)
    return pids


def tree_pss_bytes(pid: int) -> int:
    """Proportional memory of a process and all that descend from it."""
    return sum(_pss_bytes(one) for one in process_tree(pid))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def _pss_bytes(pid: int) -> int:
    try:
        found = _PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_bytes())
    except OSError:  # it has just ended
        return 0
    return int(found[1]) * 1024 if found else 0
