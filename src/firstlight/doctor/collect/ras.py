"""NCCL's own watch over its ranks (RAS), asked over its TCP port in plain text.

Taken in both looks: frozen and unequal counts while requests are in flight mean that a rank is missing in a
collective. Operations of captured graphs are not counted, and custom all-reduce kernels are unknown to it.
Invariant: it is asked only for a report, never for a diagnosis run.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Iterator

from firstlight.doctor.case.evidence import Observation
from firstlight.doctor.case.target import RUN
from firstlight.doctor.case.values_host import NcclRas, RasCommunicator, RasCount
from firstlight.doctor.collect.scene import Collector, Scene, failed

DEFAULT_ADDRESS = ("127.0.0.1", 28028)
VARIABLE = "NCCL_RAS_ADDR"
_TIMEOUT_S = 3.0
_MAX_BYTES = 1 << 20
_SECTION = re.compile(r"^(#\d+-\d+ \([0-9a-f]+\)) ([A-Z]+)")
_OPERATIONS = re.compile(r"ranks have different (.+) operation counts")
_MANY = re.compile(r"^(\d+) ranks have (?:launched up to operation (\d+)|not launched any operations)")
_ONE = re.compile(r"^Rank (\d+) has (?:launched up to operation (\d+)|not launched any operations)")
_RANK = re.compile(r"^Rank (\d+) -- ")
_MISSING = re.compile(r"missing rank[s:\s]+(\d+)", re.IGNORECASE)
_PROCESS = re.compile(r"^Process (\d+) on node ")


def collect_ras(scene: Scene) -> Iterator[Observation]:
    """Of each address that a rank names, or the default one. Nothing listens: there is no evidence."""
    for host, port in _addresses(scene):
        source = f"tcp {host}:{port}"
        try:
            protocol, text = ask(host, port)
        except ConnectionRefusedError:
            continue  # no NCCL yet, or older than 2.24
        except OSError as error:
            yield Observation(subject=RUN, source=source, value=failed("nccl-ras", error))
            continue
        value = parse_report(text, f"{host}:{port}", protocol)
        yield Observation(subject=RUN, source=source, value=value, raw=text)


def ask(host: str, port: int, timeout_s: float = _TIMEOUT_S) -> tuple[str, str]:
    """The server's protocol line and its report. Raises `OSError`."""
    until_s = time.monotonic() + timeout_s
    with socket.create_connection((host, port), timeout=timeout_s) as connection:
        connection.sendall(b"CLIENT PROTOCOL 2\n")
        greeting = b""
        while not greeting.endswith(b"\n") and len(greeting) < 256:
            greeting += _receive(connection, until_s, 1)
        connection.sendall(b"VERBOSE STATUS\n")
        report = bytearray()
        while len(report) < _MAX_BYTES and (data := _receive(connection, until_s, 65536)):
            report += data
    return greeting.decode("utf-8", "replace").strip(), report.decode("utf-8", "replace")


def _receive(connection: socket.socket, until_s: float, size: int) -> bytes:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("RAS did not finish its report")
    connection.settimeout(left_s)
    data = connection.recv(size)
    if not data and size == 1:
        raise ConnectionError("the port does not speak RAS")
    return data


def parse_report(text: str, address: str, protocol: str) -> NcclRas:
    """The errors and warnings of a report; communicators without any are not in it."""
    communicators: list[RasCommunicator] = []
    pids: dict[str, list[int]] = {"DEAD": [], "INCOMPLETE": []}
    for title, lines in _sections(text):
        match = _SECTION.match(title)
        if match:
            communicators.append(_communicator(match[1], match[2], lines))
        elif title in pids:
            pids[title] += [int(found[1]) for line in lines if (found := _PROCESS.match(line))]
    return NcclRas(
        address=address,
        protocol=protocol,
        communicators=tuple(communicators),
        dead_pids=tuple(pids["DEAD"]),
        unreachable_pids=tuple(pids["INCOMPLETE"]),
    )


def _sections(text: str) -> Iterator[tuple[str, list[str]]]:
    """A title at the left margin, and the indented lines below it."""
    title, lines = "", list[str]()
    for line in text.splitlines():
        if line.startswith(" ") and title:
            lines.append(line.strip())
        elif line.strip():
            yield title, lines
            title, lines = line.strip(), []
    yield title, lines


def _communicator(name: str, status: str, lines: list[str]) -> RasCommunicator:
    operation, counts, missing = "collective", list[RasCount](), list[int]()
    for line in lines:
        if match := _OPERATIONS.search(line):
            operation = match[1].removesuffix(" operation")
        elif match := _MANY.match(line):
            counts.append(RasCount(operation=operation, num_ranks=int(match[1]), launched=int(match[2] or 0)))
        elif match := _ONE.match(line):
            rank = int(match[1])
            counts.append(
                RasCount(operation=operation, num_ranks=1, launched=int(match[2] or 0), ranks=(rank,))
            )
        elif match := _RANK.match(line):
            _name_rank(int(match[1]), counts, missing, status)
        elif match := _MISSING.search(line):
            missing.append(int(match[1]))
    return RasCommunicator(name=name, status=status, counts=tuple(counts), missing_ranks=tuple(missing))


def _name_rank(rank: int, counts: list[RasCount], missing: list[int], status: str) -> None:
    """A line that names a rank belongs to the count above it, or to the missing ones."""
    if status == "MISMATCH" and counts:
        last = counts[-1]
        counts[-1] = RasCount(
            operation=last.operation,
            num_ranks=last.num_ranks,
            launched=last.launched,
            ranks=(*last.ranks, rank),
        )
    elif status == "INCOMPLETE":
        missing.append(rank)


def _addresses(scene: Scene) -> list[tuple[str, int]]:
    found: dict[tuple[str, int], None] = {}
    for process in scene.target.ranks:
        with contextlib.suppress(OSError):
            host, colon, port = scene.procfs.environ(process.pid).get(VARIABLE, "").rpartition(":")
            if colon and port.isdigit():
                found[host.strip("[]") or "127.0.0.1", int(port)] = None
    return list(found) or [DEFAULT_ADDRESS]


RAS = Collector("nccl-ras", collect_ras, deadline_s=4.0)
