"""The foreign engine as the relay sees it: where it listens, what is open there, how far it has come.

Invariant: nothing here reads the environment for proxies, and a request that its client gave up is given up
at the engine too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec

from firstlight.base.blackbox.recorder import NoBox, Recorder
from firstlight.base.errors import RequestError, as_sentence
from firstlight.engine.messages import Failed

PLACE_FILE = "upstream.json"
_CONNECT_S = 5.0
_IDLE_S = 2.0  # less than the five seconds after which uvicorn closes a connection that is idle
_LOOK_S = 1.0


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine listens for us alone. `key`: what it wants as a bearer token.

    `counters`: names of metrics whose sum grows with every token.
    """

    engine: str
    uds: str | None = None
    port: int = 0
    key: str = ""
    counters: tuple[str, ...] = ()


def write_place(run_dir: str | Path, place: Place) -> None:
    """For our user's eyes only."""
    fd = os.open(Path(run_dir) / PLACE_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(fd, "wb") as file:
        file.write(msgspec.json.encode(place))


def read_place(run_dir: str | Path) -> Place:
    """What the supervisor has written. Raises `OSError` or `msgspec.DecodeError`."""
    return msgspec.json.decode((Path(run_dir) / PLACE_FILE).read_bytes(), type=Place)


class Upstream:
    """Open requests and the verdict on the engine.

    `recorder` gets the tokens that its metrics tell, and the pieces of answers that have come: together they
    grow as long as the engine gets anywhere, whatever its metrics leave out.
    """

    def __init__(self, place: Place, recorder: Recorder | None = None) -> None:
        self.place = place
        self._recorder = recorder or NoBox()
        self._open: set[asyncio.Future[RequestError]] = set()
        self._failure: Failed | None = None
        self._is_draining = False
        self._tasks: list[asyncio.Task[None]] = []
        self._num_tokens = self._num_pieces = 0

    @property
    def is_serving(self) -> bool:
        """Whether new requests are handed on."""
        return self._failure is None and not self._is_draining

    @property
    def num_open(self) -> int:
        """Requests that have not been answered."""
        return len(self._open)

    def start(self) -> None:
        """Opens the client; the engine may come later."""
        transport = httpx.AsyncHTTPTransport(
            uds=self.place.uds,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=_IDLE_S),
        )
        self.client = httpx.AsyncClient(
            transport=transport,
            base_url=f"http://127.0.0.1:{self.place.port or 80}",
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            trust_env=False,
            headers={"Authorization": f"Bearer {self.place.key}"} if self.place.key else {},
        )
        self._tasks = [asyncio.create_task(self._count_tokens(), name="tokens of the engine")]

    async def close(self) -> None:
        """Ends what is open and gives the connections back."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end_all(_unavailable("The server stops.", "stopping", 5.0))
        await self.client.aclose()

    @contextlib.contextmanager
    def opened(self) -> Iterator[asyncio.Future[RequestError]]:
        """For the time of one request: a future that tells why it must end."""
        ended: asyncio.Future[RequestError] = asyncio.get_running_loop().create_future()
        self._open.add(ended)
        try:
            yield ended
        finally:
            self._open.discard(ended)
            ended.cancel()

    def note_piece(self) -> None:
        """A piece of an answer has come."""
        self._num_pieces += 1
        self._recorder.advance(self._num_tokens + self._num_pieces)

    def unavailable(self) -> RequestError:
        """Why requests are not handed on."""
        if self._failure is not None:
            text = f"{as_sentence(self._failure.message)} {self._failure.hint}".strip()
            return _unavailable(text, "engine_failed", 10.0)
        return _unavailable(
            "The server is shutting down and takes no new requests; ask another one, or come back.",
            "stopping",
            5.0,
        )

    def unreachable(self, error: Exception) -> RequestError:
        """The engine does not take our connection, or broke it."""
        reason = str(error) or type(error).__name__
        return _unavailable(f"{self.place.engine} does not answer ({reason}).", "engine_unreachable", 1.0)

    def drain(self, deadline_s: float) -> None:
        """Takes no new requests; what runs has `deadline_s` to end."""
        self._is_draining = True
        late = _unavailable("The server stops, and this request took too long for it.", "stopping", 5.0)
        asyncio.get_running_loop().call_later(deadline_s, self._end_all, late)

    def refuse(self, failure: Failed) -> None:
        """The supervisor's verdict: open requests end with it, new ones are refused with it."""
        self._failure = failure
        self._end_all(self.unavailable())

    def resume(self) -> None:
        """The verdict is withdrawn."""
        self._failure = None

    def _end_all(self, error: RequestError) -> None:
        for ended in list(self._open):
            if not ended.done():
                ended.set_result(error)

    async def _count_tokens(self) -> None:
        """While requests are open: how many tokens the engine has taken and made, by its own metrics."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if not self._open or not self.place.counters:
                continue
            with contextlib.suppress(httpx.HTTPError):
                answer = await self.client.get("/metrics", timeout=_CONNECT_S)
                self._num_tokens = sum_of(answer.text, self.place.counters)
                self._recorder.advance(self._num_tokens + self._num_pieces)


def sum_of(metrics: str, names: tuple[str, ...]) -> int:
    """The sum of all samples of these names in Prometheus' text form."""
    total = 0.0
    for line in metrics.splitlines():
        if line.startswith(names):
            name, _, value = line.rpartition(" ")
            if name.partition("{")[0] in names:
                with contextlib.suppress(ValueError):
                    total += float(value)
    return int(total)


def _unavailable(message: str, code: str, retry_after_s: float) -> RequestError:
    return RequestError(message, code=code, status=503, kind="server_error", retry_after_s=retry_after_s)
