"""POST /v1/profile: who may ask, one at a time, and no profile without an end."""

from __future__ import annotations

import socket
import threading

import httpx
import pytest
from starlette.requests import Request

from firstlight.base.errors import RequestError
from firstlight.engine.messages import Failed, StartProfile, StopProfile
from firstlight.serve.openai.handlers_profile import require_near
from support.api_server import ApiServer
from support.fake_engine import EMPTY_PROFILE

SOON = {"steps": 5, "timeout_s": 0.05}


def test_at_its_deadline_the_engine_is_told_to_hand_it_in() -> None:
    with ApiServer() as server, server.http() as client:
        answer = client.post("/v1/profile", json=SOON)
        assert answer.status_code == 200, answer.text
        assert answer.json()["num_steps"] == 0
        assert server.engine.wait_for(StartProfile) == [StartProfile(5)]
        assert len(server.engine.wait_for(StopProfile)) == 1


def test_one_is_made_at_a_time() -> None:
    with ApiServer() as server, server.http() as client:
        answers = []
        ask = threading.Thread(
            target=lambda: answers.append(client.post("/v1/profile", json={"timeout_s": 60.0}))
        )
        ask.start()
        server.engine.wait_for(StartProfile)
        with server.http() as other:
            refused = other.post("/v1/profile", json=SOON)
        assert refused.status_code == 409
        assert "being made already" in refused.json()["error"]["message"]
        server.engine.send(EMPTY_PROFILE)
        ask.join(10)
        assert answers[0].status_code == 200
        assert client.post("/v1/profile", json=SOON).status_code == 200


def test_a_client_that_goes_away_ends_its_profile() -> None:
    with ApiServer() as server, server.http() as other:
        body = b'{"timeout_s": 60.0}'
        head = f"POST /v1/profile HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
        address = httpx.URL(server.url)
        with socket.create_connection((address.host, address.port)) as client:
            client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            server.engine.wait_for(StartProfile)
        assert len(server.engine.wait_for(StopProfile)) == 1
        answer = other.post("/v1/profile", json=SOON)
        assert answer.status_code == 200, answer.text
        assert len(server.engine.received(StopProfile)) == 2  # that of its own; the first one's was dropped


def test_an_engine_that_fails_ends_the_wait() -> None:
    with ApiServer() as server, server.http() as client:
        threading.Timer(0.1, server.engine.send, (Failed("broken", "mend it", 6),)).start()
        answer = client.post("/v1/profile", json={"timeout_s": 60.0})
        assert answer.status_code == 503
        assert "broken" in answer.json()["error"]["message"]


def test_a_wrong_number_is_named() -> None:
    with ApiServer() as server, server.http() as client:
        for fields, name in (({"steps": 0}, "steps"), ({"timeout_s": 1e9}, "timeout_s")):
            answer = client.post("/v1/profile", json=fields)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == name


def test_with_keys_a_key_is_asked_for() -> None:
    with ApiServer(keys=["secret"]) as server, server.http() as client:
        assert client.post("/v1/profile", json=SOON).status_code == 401
        key = {"Authorization": "Bearer secret"}
        assert client.post("/v1/profile", json=SOON, headers=key).status_code == 200


def request_from(client: tuple[str, int] | None) -> Request:
    return Request({"type": "http", "client": client, "headers": []})


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::ffff:127.0.0.1", ""])
def test_without_keys_this_machine_may_ask(host: str) -> None:
    require_near(request_from((host, 4711)))


def test_so_may_who_comes_through_a_unix_socket() -> None:
    require_near(request_from(None))


@pytest.mark.parametrize("host", ["10.0.0.7", "fe80::1", "::ffff:10.0.0.7", "a"])
def test_another_machine_is_told_why(host: str) -> None:
    with pytest.raises(RequestError, match="API key") as caught:
        require_near(request_from((host, 4711)))
    assert caught.value.status == 403
