"""Whether strangers who send half a request, or a header without end, slow down those who ask properly.

Run by hand against a server that runs: `python benchmarks/strangers.py URL [--key KEY]`. Rounds without and
with the strangers take turns, so that what else the machine does hits both alike. Invariant: the strangers
never send a key, and live in a process of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from urllib.parse import urlsplit

_HALF = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
_BODY = json.dumps({"prompt": "Once", "max_tokens": 1, "temperature": 0}).encode()
_PIECE = b"a" * 2**20
_BETWEEN_S = 0.02  # between two requests of one client: the server is not to be full of them alone
_READY_S = 120.0

Address = tuple[str, int]
Stranger = Callable[[Address, Event, Event], None]


def half_sent(address: Address, ready: Event, over: Event) -> None:
    """A thousand requests without an end, opened again whenever the server lets one go."""
    opened = [_half(address) for _ in range(1000)]
    ready.set()
    while not over.wait(0.1):
        for index, one in enumerate(opened):
            if one is None or _is_closed(one):
                opened[index] = _half(address)


def long_headers(address: Address, ready: Event, over: Event) -> None:
    """A header of 300 MB after the other, each as far as the server takes it."""
    ready.set()
    while not over.wait(0.05):
        with contextlib.suppress(OSError), socket.create_connection(address, 10) as one:
            one.sendall(_HALF + b"X-Long: ")
            for _ in range(300):
                one.sendall(_PIECE)


def _half(address: Address) -> socket.socket | None:
    with contextlib.suppress(OSError):
        one = socket.create_connection(address, 10)
        one.sendall(_HALF)
        one.setblocking(False)
        return one
    return None


def _is_closed(one: socket.socket) -> bool:
    try:
        is_closed = one.recv(4096) == b""
    except BlockingIOError:
        return False
    except OSError:
        is_closed = True
    if is_closed:
        one.close()
    return is_closed


def latencies_s(address: Address, key: str, seconds: float, num_clients: int) -> list[float]:
    """Of whole requests by some clients; every other one on a new connection. Raises on a failed one."""
    found: list[float] = []
    failures: list[str] = []
    until_s = time.monotonic() + seconds
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}

    def ask() -> None:
        connection = http.client.HTTPConnection(*address, timeout=60)
        number = 0
        while time.monotonic() < until_s:
            number += 1
            if number % 2:
                connection.close()
            start_s = time.monotonic()
            try:
                connection.request("POST", "/v1/completions", _BODY, headers)
                answer = connection.getresponse()
                answer.read()
            except OSError as error:
                failures.append(repr(error))
                return
            found.append(time.monotonic() - start_s)
            if answer.status != 200:
                failures.append(f"status {answer.status}")
            time.sleep(_BETWEEN_S)

    threads = [threading.Thread(target=ask) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise SystemExit(f"{len(failures)} requests failed, the first: {failures[0]}")
    return found


def beside(stranger: Stranger | None, address: Address, measure: Callable[[], list[float]]) -> list[float]:
    """What `measure` finds while the strangers are there."""
    if stranger is None:
        return measure()
    context = multiprocessing.get_context("spawn")
    ready, over = context.Event(), context.Event()
    process = context.Process(target=stranger, args=(address, ready, over), daemon=True)
    process.start()
    try:
        if not ready.wait(_READY_S):
            raise SystemExit("the strangers did not come in")
        return measure()
    finally:
        over.set()
        process.join(30)
        process.kill()


def quantile_ms(values_s: list[float], share: float) -> float:
    """In milliseconds."""
    return 1000 * sorted(values_s)[min(len(values_s) - 1, int(share * len(values_s)))]


def main() -> None:
    """Measures and prints one line for each kind of stranger."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--key", default="")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="of one round")
    parser.add_argument("--clients", type=int, default=2)
    options = parser.parse_args()
    parts = urlsplit(options.url)
    address = (parts.hostname or "127.0.0.1", parts.port or 80)
    kinds: dict[str, Stranger | None] = {
        "nobody else": None,
        "1,000 half-sent requests": half_sent,
        "headers of 300 MB": long_headers,
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}

    def measure() -> list[float]:
        return latencies_s(address, options.key, options.seconds, options.clients)

    measure()  # warms up
    for _ in range(options.rounds):
        for name, stranger in kinds.items():
            found[name] += beside(stranger, address, measure)
    for name, values_s in found.items():
        figures = "  ".join(
            f"p{100 * share:g} {quantile_ms(values_s, share):6.2f} ms" for share in (0.5, 0.9, 0.99)
        )
        sys.stdout.write(
            f"{name:26} {len(values_s):6d} requests  {figures}  most {1000 * max(values_s):.1f} ms\n"
        )


if __name__ == "__main__":
    main()
