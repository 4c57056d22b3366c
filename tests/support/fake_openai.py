"""An OpenAI-compatible server in a thread, for tests of load generators: scripted answers, no model.

Invariant: what it did is recorded (requests, connections, broken streams), so that a test can ask.
"""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass
class Behaviour:
    """How it answers. `prefix` is sent first on a stream, as the role chunk of chat is."""

    status: int = 200
    tokens_per_chunk: int = 1
    num_cached: int = 0
    sends_usage: bool = True
    breaks_after: int | None = None  # chunks, then the connection ends
    error_after: int | None = None  # chunks, then an error event
    starting: int = 0  # so many 503 on /v1/models first
    starting_code: str | None = None  # of these
    line_end: str = "\n"
    closes: bool = False  # the connection, after each answer
    chunk_delay_s: float = 0.0


@dataclass
class FakeOpenAI:
    """Use as a context manager; `url` is where it listens."""

    behaviour: Behaviour = field(default_factory=Behaviour)
    requests: list[dict[str, Any]] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    num_connections: int = 0
    num_broken: int = 0  # streams whose client went away
    url: str = ""

    def __enter__(self) -> Self:
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(ready)), daemon=True)
        self._thread.start()
        assert ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _main(self, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await self._stop.wait()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._exchange(reader, writer) and not self.behaviour.closes:
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            self.num_broken += 1
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        method, path, _ = head.split(b" ", 2)
        headers = head.decode().lower()
        length = next(
            (int(h.split(":")[1]) for h in headers.split("\r\n") if h.startswith("content-length")), 0
        )
        body = json.loads(await reader.readexactly(length) or b"{}")
        if method == b"DELETE":
            self.deleted.append(path.decode().rsplit("/", 1)[1])
            return self._plain(writer, 200, {})
        if path == b"/v1/models":
            if self.behaviour.starting > 0:
                self.behaviour.starting -= 1
                return self._plain(
                    writer, 503, {"error": {"message": "starting", "code": self.behaviour.starting_code}}
                )
            return self._plain(writer, 200, {"data": [{"id": "fake"}]})
        self.requests.append(body)
        if self.behaviour.status != 200:
            return self._plain(writer, self.behaviour.status, {"error": {"message": "no, thank you"}})
        return await self._answer(writer, path, body)

    def _plain(self, writer: asyncio.StreamWriter, status: int, content: object) -> bool:
        body = json.dumps(content).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        return True

    async def _answer(self, writer: asyncio.StreamWriter, path: bytes, body: dict[str, Any]) -> bool:
        is_chat, number = b"chat" in path, body.get("max_tokens", 4)
        usage = {"prompt_tokens": 5, "completion_tokens": number}
        usage["prompt_tokens_details"] = {"cached_tokens": self.behaviour.num_cached}
        if not body.get("stream"):
            choice = {"message": {"content": "x"}} if is_chat else {"text": "x"}
            answer = {"id": "whole", "choices": [{**choice, "finish_reason": "length"}], "usage": usage}
            return self._plain(writer, 200, answer)
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        per_chunk = self.behaviour.tokens_per_chunk
        if is_chat:
            self._event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for index in range(number // per_chunk):
            if index == self.behaviour.breaks_after:
                return False
            if index == self.behaviour.error_after:
                self._event(writer, {"error": {"message": "the engine fell over"}})
                break
            choice = {"delta": {"content": "x"}} if is_chat else {"text": "x"}
            is_last = index + 1 == number // per_chunk
            self._event(
                writer, {"id": "run", "choices": [{**choice, "finish_reason": "length" if is_last else None}]}
            )
            await writer.drain()
            await asyncio.sleep(self.behaviour.chunk_delay_s)
        if self.behaviour.sends_usage:
            self._event(writer, {"choices": [], "usage": usage})
        self._event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        return True

    def _event(self, writer: asyncio.StreamWriter, content: object) -> None:
        text = content if isinstance(content, str) else json.dumps(content)
        data = f"data: {text}{self.behaviour.line_end * 2}".encode()
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))
