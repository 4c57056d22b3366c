"""The relay's view of an engine: tokens from metrics, the verdict, and who is told of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from firstlight.engine.messages import Failed
from firstlight.serve.foreign.forward import _kept
from firstlight.serve.foreign.upstream import Place, Upstream, read_place, sum_of, write_place

METRICS = """
# HELP vllm:prompt_tokens_total Prefill tokens.
vllm:prompt_tokens_total{engine="0",model_name="a b"} 12.0
vllm:prompt_tokens_total_by_source{engine="0"} 700.0
vllm:generation_tokens_total{engine="0"} 30.0
vllm:generation_tokens_total{engine="1"} 1e2
vllm:generation_tokens_total{engine="2"} NotANumber
"""


def test_tokens_are_summed_over_engines_and_nothing_else_is() -> None:
    assert sum_of(METRICS, ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")) == 142


async def test_a_verdict_ends_what_is_open_and_is_withdrawn() -> None:
    upstream = Upstream(Place(engine="vllm"))
    assert upstream.is_serving
    with upstream.opened() as ended:
        assert upstream.num_open == 1
        upstream.refuse(Failed("rank 0 is stopped", "Let it go on.", 6))
        assert not upstream.is_serving
        assert str(ended.result()) == "rank 0 is stopped. Let it go on."
        assert ended.result().status == 503
    assert upstream.num_open == 0
    upstream.resume()
    assert upstream.is_serving


async def test_a_drain_lets_open_requests_end_and_takes_no_new_ones() -> None:
    upstream = Upstream(Place(engine="vllm"))
    with upstream.opened() as ended:
        upstream.drain(0.01)
        assert not upstream.is_serving
        assert upstream.unavailable().code == "stopping"
        assert (await ended).code == "stopping"


def test_the_place_is_for_our_user_only(tmp_path: Path) -> None:
    place = Place(engine="sglang", port=7, key="secret", counters=("a",))
    write_place(tmp_path, place)
    assert read_place(tmp_path) == place
    assert os.stat(tmp_path / "upstream.json").st_mode & 0o777 == 0o600


@pytest.mark.parametrize("connection", [b"keep-alive, X-One", b"x-one"])
def test_headers_of_a_connection_are_not_handed_on(connection: bytes) -> None:
    headers = [(b"Connection", connection), (b"X-One", b"1"), (b"x-two", b"2"), (b"Host", b"h")]
    assert _kept(headers, frozenset({b"connection", b"host"})) == [(b"x-two", b"2")]
