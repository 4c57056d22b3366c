"""Asks a server where the time of its decode steps goes, with load of our own or without.

Invariant: load that was started here has ended when the profile is there, and a profile without any decode
step is an error that says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from firstlight.base.errors import EngineError, RequestError, UsageError
from firstlight.base.urls import no_answer
from firstlight.bench.serving.completions import error_text
from firstlight.bench.serving.http_client import HttpClient, Reply
from firstlight.bench.serving.prompts import SyntheticPrompts
from firstlight.bench.serving.serving import WAIT_S, fast_loop, first_model
from firstlight.engine.messages import Profile

PATH = "/v1/profile"
LOOK_S, TELL_EVERY_S = 0.5, 5.0  # until the first look at what the engine does, and between later ones
_PAUSE_S = 0.2  # before a request that was refused is sent again


@dataclass(frozen=True, kw_only=True)
class ProfileOrder:
    """What is asked of which server. `load`: requests of our own that are open meanwhile; 0: none."""

    url: str
    api_key: str | None = None
    num_steps: int = 64
    timeout_s: float = 60.0
    load: int = 0
    prompt_tokens: int = 32


@dataclass(frozen=True)
class Answer:
    """The profile, and what /server_info says."""

    profile: Profile
    info: Mapping[str, Any]


def profile_server(order: ProfileOrder, on_news: Callable[[str], None] = lambda words: None) -> Answer:
    """Raises where the server cannot be asked, or where no decode step was recorded.

    `on_news` hears what is being waited for.
    """
    with asyncio.Runner(loop_factory=fast_loop) as runner:
        answer = runner.run(_profile(order, on_news))
    if not answer.profile.num_steps:
        seen = answer.profile.num_other_steps + answer.profile.num_plain_steps
        raise EngineError(
            f"no decode step was recorded in {answer.profile.window_s:.1f} s "
            f"({seen} other steps, idle for {answer.profile.idle_s:.1f} s).",
            "Send requests meanwhile, or let this command do it: --load 1.",
        )
    return answer


async def _profile(order: ProfileOrder, on_news: Callable[[str], None]) -> Answer:
    client = HttpClient(order.url, order.api_key)
    try:
        model = await first_model(client, None, WAIT_S, on_news)
        info = _decoded(await _asked(client, "GET", "/server_info"))
        async with _load(client, order, model, info), _watched(client, order, info, on_news):
            body = msgspec.json.encode({"steps": order.num_steps, "timeout_s": order.timeout_s})
            reply = await _asked(client, "POST", PATH, body)
        return Answer(msgspec.convert(_decoded(reply), Profile), info)
    except OSError as error:
        raise no_answer(client.base_url, error) from error
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise _no_profile(f"its answer is not understood: {error}") from error
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def _load(
    client: HttpClient, order: ProfileOrder, model: str, info: Mapping[str, Any]
) -> AsyncIterator[None]:
    """Requests one after the other, so many at a time, until the block is left."""
    tasks = [asyncio.create_task(_ask_on(client, _bodies(order, model, info, n))) for n in range(order.load)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        refused = next((error for error in ended if isinstance(error, RequestError)), None)
    if refused is not None:
        raise refused


@contextlib.asynccontextmanager
async def _watched(
    client: HttpClient, order: ProfileOrder, info: Mapping[str, Any], on_news: Callable[[str], None]
) -> AsyncIterator[None]:
    """Says meanwhile how many steps there were, until the block is left."""
    watch = asyncio.create_task(_watch(client, order, info["engine"]["num_steps"], on_news))
    try:
        yield
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)  # the profile's own request says what is wrong


async def _watch(
    client: HttpClient, order: ProfileOrder, num_before: int, on_news: Callable[[str], None]
) -> None:
    began_s = time.monotonic()
    await asyncio.sleep(LOOK_S)
    while True:
        info = _decoded(await _asked(client, "GET", "/server_info"))
        num, passed_s = info["engine"]["num_steps"] - num_before, time.monotonic() - began_s
        if num:
            on_news(f"{num} steps in {passed_s:.0f} s; about half of the decode steps are recorded")
        elif order.load:
            on_news(f"no step yet in {passed_s:.0f} s of {order.timeout_s:g} s")
        else:
            on_news(
                "nothing is decoding: send requests, or use --load N; this waits for them, "
                f"{passed_s:.0f} s of {order.timeout_s:g} s are over"
            )
        await asyncio.sleep(TELL_EVERY_S)


def _bodies(order: ProfileOrder, model: str, info: Mapping[str, Any], number: int) -> list[bytes]:
    vocabulary, most = info["vocab_size"], info["max_model_len"]
    num_prompt = min(order.prompt_tokens, most // 4)
    first = min(1000, vocabulary // 4)
    prompts = SyntheticPrompts(num_tokens=num_prompt, first_id=first, end_id=min(20_000, vocabulary))
    fields = {
        "model": model,
        "max_tokens": most - num_prompt - 1,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
    }
    made = prompts.make(8, number, as_text=False)
    return [msgspec.json.encode({**fields, "prompt": prompt}) for prompt in made]


async def _ask_on(client: HttpClient, bodies: list[bytes]) -> None:
    """As a client with a stream does; a request that is cancelled closes its connection, which aborts it."""
    while True:
        for body in bodies:
            reply = await client.request("POST", "/v1/completions", body, lambda time_s, data: None)
            if reply.status in (429, 503):
                await asyncio.sleep(_PAUSE_S)
            elif reply.status != 200:
                raise RequestError(f"the load was refused: {error_text(reply)}")


async def _asked(client: HttpClient, method: str, path: str, body: bytes = b"") -> Reply:
    reply = await client.request(method, path, body)
    if reply.status == 200:
        return reply
    if reply.status in (404, 405):
        raise UsageError(
            f"the server at {client.base_url} has no {path}.",
            "Only a server of firstlight can be profiled, with an engine of its own (--backend firstlight).",
        )
    if reply.status in (401, 403):
        raise UsageError(
            f"the server refuses: {error_text(reply)}", "Give --api-key, or run this on its own machine."
        )
    raise _no_profile(error_text(reply))


def _decoded(reply: Reply) -> Any:
    return msgspec.json.decode(reply.body)


def _no_profile(reason: str) -> EngineError:
    return EngineError(f"the server gave no profile: {reason}", "Look at the server's own output; ask again.")
