"""The `openai` package against our server: sync and async, streaming and not, and its errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import httpx
import openai
import pytest

from firstlight.engine.messages import Abort
from support.api_server import MODEL, ApiServer, says
from support.byte_text import tokens

ANSWER = "Paris, 🗼 of course."
USER = [{"role": "user", "content": "Where?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with ApiServer(says(ANSWER, num_cached=4), keys=["secret-1", "secret-2"]) as running:
        yield running


@pytest.fixture
def client(server: ApiServer) -> Iterator[openai.OpenAI]:
    http = httpx.Client(trust_env=False)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret-2", http_client=http) as made:
        yield made


@pytest.fixture
async def async_client(server: ApiServer) -> AsyncIterator[openai.AsyncOpenAI]:
    http = httpx.AsyncClient(trust_env=False)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret-1", http_client=http) as made:
        yield made


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=USER, logprobs=True, top_logprobs=1)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert answer.choices[0].logprobs.content[0].bytes == [ord("P")]
    assert answer._request_id == answer.id


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(tokens(ANSWER)) + 1


def test_chat_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=USER) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == ANSWER


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="x", logprobs=1, max_tokens=50)
    assert answer.choices[0].text == ANSWER
    assert answer.choices[0].logprobs is not None
    chunks = client.completions.create(model=MODEL, prompt=tokens("x"), stream=True, max_tokens=50)
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER


def test_extra_body(client: openai.OpenAI) -> None:
    extra = {"top_k": 5, "return_token_ids": True}
    answer = client.chat.completions.create(model=MODEL, messages=USER, extra_body=extra)
    assert answer.choices[0].token_ids[:3] == tokens("Par")  # type: ignore[attr-defined]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "alias"]
    assert client.models.retrieve(MODEL).max_model_len == 256  # type: ignore[attr-defined]


def test_errors_become_the_clients_exceptions(client: openai.OpenAI, server: ApiServer) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=USER, temperature=-1)
    assert bad.value.param == "temperature"
    assert "must lie in" in bad.value.message
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="other", messages=USER)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


async def test_async(async_client: openai.AsyncOpenAI) -> None:
    answer = await async_client.chat.completions.create(model=MODEL, messages=USER)
    assert answer.choices[0].message.content == ANSWER
    stream = await async_client.chat.completions.create(model=MODEL, messages=USER, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == ANSWER


async def test_many_at_once(async_client: openai.AsyncOpenAI) -> None:
    async def one() -> str:
        stream = await async_client.completions.create(model=MODEL, prompt="x", max_tokens=50, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    assert set(await asyncio.gather(*(one() for _ in range(40)))) == {ANSWER}


async def test_leaving_a_stream_aborts(async_client: openai.AsyncOpenAI, server: ApiServer) -> None:
    before = len(server.engine.received(Abort))
    with_long_answer = {"model": MODEL, "prompt": "x", "max_tokens": 200}
    stream = await async_client.completions.create(**with_long_answer, stream=True)
    await stream.close()
    # The answer is short, so it may have ended by itself; what counts is that nothing is left.
    server.engine.wait_until_idle()
    assert len(server.engine.received(Abort)) >= before
