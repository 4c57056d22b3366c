"""Answers of a server that speaks the OpenAI protocol, with the exact token ids of prompt and answer.

Prompts are sent as token ids, and the ids of the answer must come back: firstlight and vLLM give them for
`return_token_ids`. Invariant: text is never tokenised again; a server that returns no ids is refused, and so
is one that read another prompt than it was sent.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec

from firstlight.base.errors import EngineError, UnsupportedError
from firstlight.base.urls import no_answer
from firstlight.drafter.tapped import Tapped
from firstlight.engine.params import SamplingParams
from firstlight.serve.http.outgoing import open_client

TIMEOUT_S = 600.0
MAX_ERROR_CHARS = 300


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class RemoteEngine:
    """A server in the place of an engine in this process; its answers come without states."""

    layers: tuple[int, ...] = ()

    def __init__(self, url: str, parallel: int, transport: httpx.BaseTransport | None = None) -> None:
        self._http = open_client(url, timeout=TIMEOUT_S, transport=transport)
        self._url, self._parallel = str(self._http.base_url).rstrip("/"), parallel
        self._model = self._first_model()

    def answer(
        self, prompts: list[list[int]], params: SamplingParams, on_done: Callable[[int], None]
    ) -> list[Tapped]:
        """Answers all prompts, `parallel` at a time; `on_done` hears of each that is finished."""

        def one(prompt: list[int]) -> Tapped:
            answer = self._ask(prompt, params)
            on_done(1)
            return answer

        with ThreadPoolExecutor(self._parallel) as pool:
            return list(pool.map(one, prompts))

    def _ask(self, prompt: list[int], params: SamplingParams) -> Tapped:
        request = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": params.seed,
            "return_token_ids": True,
        }
        found = self._call("POST", "/v1/completions", request)
        try:
            choice = msgspec.json.decode(found, type=_Completion).choices[0]
        except (msgspec.DecodeError, IndexError) as error:
            raise EngineError(
                f"{self._url} answered what is no completion: {found[:MAX_ERROR_CHARS]!r}.",
                "Check that --url is the address of an OpenAI-compatible server.",
            ) from error
        if choice.token_ids is None:
            raise UnsupportedError(
                f"{self._url} returns no token ids, and text that is tokenised again may be other tokens.",
                "Use firstlight or vLLM there (they know return_token_ids), or leave --url out.",
            )
        if choice.prompt_token_ids is not None and choice.prompt_token_ids != prompt:
            raise EngineError(
                f"{self._url} read another prompt than it was sent: {len(choice.prompt_token_ids)} tokens of "
                f"{len(prompt)}, so it is not this target, or it adds tokens.",
                "Serve the very model of --target there.",
            )
        return Tapped(prompt, choice.token_ids, choice.finish_reason or "")

    def _first_model(self) -> str:
        listed = msgspec.json.decode(self._call("GET", "/v1/models"))
        models = listed.get("data") if isinstance(listed, dict) else None
        if not models:
            raise EngineError(f"{self._url} lists no model.", "Check that it has started.")
        return str(models[0]["id"])

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise no_answer(self._url, error) from error
        if response.status_code != httpx.codes.OK:
            raise EngineError(
                f"{self._url}{path} answered {response.status_code}: {response.text[:MAX_ERROR_CHARS]}",
                "What is finished is kept; mend the server and start the command again.",
            )
        return response.content
