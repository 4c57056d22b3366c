"""A small client of an OpenAI-compatible server: its models, and streamed chat answers.

Works against any such server, not only ours. Invariant: leaving a stream early closes the connection, which
tells the server to stop generating.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import httpx

from firstlight.base.errors import EngineError, UsageError
from firstlight.base.urls import no_answer
from firstlight.cli.chat_sampling import Known, read_folder
from firstlight.serve.http.outgoing import open_client

_CONNECT_S = 5.0
_ABOUT_S = 5.0  # for what a server says of itself, which it may also not say
_BETWEEN_PIECES_S = 300.0
_CHECK_SERVER = "Look at the server's own output, and ask again."


@dataclass(frozen=True)
class Piece:
    """Part of an answer. `finish_reason` and `num_tokens` (of the whole answer) come with the last ones."""

    text: str = ""
    reasoning: str = ""  # what the model thinks before it speaks
    finish_reason: str | None = None
    num_tokens: int | None = None


class ChatClient:
    """One server. `on_wait` hears why the server is not ready yet and how many seconds we shall wait."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        on_wait: Callable[[str, float], None],
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(_BETWEEN_PIECES_S, connect=_CONNECT_S)
        self._http = open_client(url, headers=headers, timeout=timeout, transport=transport)
        self._url = str(self._http.base_url).rstrip("/")
        self._on_wait = on_wait

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def first_model(self) -> str:
        """The id of the first model that the server lists; waits for a server that is still starting."""
        while True:
            try:
                response = self._http.get("/v1/models")
            except httpx.HTTPError as error:
                raise no_answer(self._url, error) from error
            if response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                break
            self._on_wait(_message_in(response), _retry_after_s(response))
        _raise_for_error(response)
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise UsageError(
                f"{self._url} answers, but not like an OpenAI-compatible server.", "Check --url."
            ) from error

    def about(self, model: str) -> Known:
        """What the server says of a model; nothing where it does not say it."""
        info = self._ask("/server_info")
        defaults = info.get("generation_defaults")
        listed = self._ask("/v1/models").get("data")
        cards = listed if isinstance(listed, list) else []
        roots = [c.get("root") for c in cards if isinstance(c, dict) and c.get("id") == model]
        names = (model, *(root for root in roots if isinstance(root, str)))
        if isinstance(defaults, dict):
            return Known(names, defaults, is_ours=True)
        found = (read_folder(root) for root in names[1:])
        return Known(names, next((values for values in found if values is not None), None))

    def _ask(self, path: str) -> dict[str, Any]:
        try:
            response = self._http.get(path, timeout=_ABOUT_S)
            found = response.json() if response.is_success else None
        except (httpx.HTTPError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def stream(self, body: Mapping[str, Any]) -> Iterator[Piece]:
        """The pieces of the answer to a chat request, as they come."""
        whole = {**body, "stream": True, "stream_options": {"include_usage": True}}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=whole) as response:
                if response.is_error:
                    response.read()
                    _raise_for_error(response)
                for line in response.iter_lines():
                    if line.startswith("data:") and line != "data: [DONE]":
                        yield _piece(line.removeprefix("data:").strip())
        except httpx.HTTPError as error:
            raise no_answer(self._url, error) from error


def _piece(data: str) -> Piece:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise EngineError(
            f"the server sent something that is not JSON: {data[:100]!r}", _CHECK_SERVER
        ) from error
    if "error" in event:
        raise EngineError(
            f"the server broke off: {event['error'].get('message', event['error'])}", _CHECK_SERVER
        )
    usage = event.get("usage") or {}
    choice: dict[str, Any] = next(iter(event.get("choices") or []), {})
    delta = choice.get("delta") or {}
    return Piece(
        text=delta.get("content") or "",
        reasoning=delta.get("reasoning_content") or delta.get("reasoning") or "",
        finish_reason=choice.get("finish_reason"),
        num_tokens=usage.get("completion_tokens"),
    )


def _raise_for_error(response: httpx.Response) -> None:
    if response.status_code == httpx.codes.UNAUTHORIZED:
        raise UsageError(_message_in(response), "Give the server's key with --api-key or FIRSTLIGHT_API_KEY.")
    if response.is_error:
        raise UsageError(
            f"the server refused ({response.status_code}): {_message_in(response)}",
            "Change what it names; /reset shortens the conversation.",
        )


def _message_in(response: httpx.Response) -> str:
    """The message of an OpenAI-shaped error, or the beginning of whatever came instead."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200] or f"HTTP {response.status_code}"


def _retry_after_s(response: httpx.Response) -> float:
    text = response.headers.get("Retry-After", "")
    return min(5.0, float(text)) if text.isdigit() else 1.0
