"""Starting, failing, stopping; clients that leave, come too late, or do not read."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from firstlight.base.config import EngineSection
from firstlight.engine.messages import Abort, Drain, Failed, Ready, Submit
from firstlight.serve.http.http_server import CLOSE_MARGIN_S
from support.api_server import ApiServer, wait_until
from support.byte_text import END, tokens
from support.fake_engine import DEADLINE_S, Script

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Hi"}]


def endless(_: Submit) -> Script:
    return Script(tokens("abc "), repeat=True)


def held(_: Submit) -> Script:
    return Script(tokens("done"), END, held=True)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


class Call(threading.Thread):
    """A request in a thread; `response` is there after `done`."""

    def __init__(
        self, server: ApiServer, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(daemon=True)
        self._server, self._body, self._headers = server, {"messages": USER, **body}, headers
        self._response: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        with self._server.http() as http:
            self._response = http.post(CHAT, json=self._body, headers=self._headers)

    def done(self) -> httpx.Response:
        self.join(DEADLINE_S)
        assert self._response is not None, "no answer in time"
        return self._response


# --- starting and failing ---


def test_until_ready_everything_says_where_the_start_is() -> None:
    with ApiServer(ready=False) as server, server.http() as http:
        response = http.post(CHAT, json={"messages": USER})
        error = error_of(response, 503)
        assert (error["code"], error["type"]) == ("starting", "server_error")
        assert response.headers["retry-after"] == "1"
        assert response.headers["connection"] == "close"
        assert "/startup says how far it is" in error["message"]
        assert http.get("/health/live").status_code == 200
        assert "firstlight:ready 0.0" in http.get("/metrics").text
        assert (http.head("/health").status_code, http.head("/health/live").status_code) == (503, 200)
        error_of(http.get("/v1/models"), 503)
        error_of(http.get("/nothing"), 503)
        server.engine.send(Ready(256, 300, {}))
        wait_until(lambda: server.client.is_serving, "ready")
        assert http.get("/health").json() == {"status": "ready"}
        assert "firstlight:ready 1.0" in http.get("/metrics").text


def test_after_a_failure_the_reason_is_the_answer() -> None:
    with ApiServer(held) as server, server.http() as http:
        call = Call(server, {})
        server.engine.wait_for(Submit)
        server.engine.send(Failed("out of memory", "Use --kv-memory.", 5))
        error = error_of(call.done(), 503)
        assert (error["code"], error["type"]) == ("engine_failed", "server_error")
        assert "out of memory. /health says more." in error["message"]
        error = error_of(http.get("/health"), 503)
        assert (error["code"], error["type"]) == ("engine_failed", "server_error")
        assert "out of memory. Use --kv-memory." in error["message"]
        assert http.get("/health/live").status_code == 200


def test_a_dead_engine_ends_open_requests() -> None:
    with ApiServer(held) as server, server.http() as http:
        call = Call(server, {"stream": True})
        server.engine.wait_for(Submit)
        server.engine.stop()
        assert "the engine process ended" in error_of(call.done(), 503)["message"]
        error_of(http.get("/health"), 503)
        server.engine.stop = lambda: None  # type: ignore[method-assign]


def test_a_failure_within_a_stream_is_its_last_event() -> None:
    with ApiServer(endless) as server, server.http() as http:
        with http.stream("POST", CHAT, json={"messages": USER, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            server.engine.send(Failed("a rank died", "", 6))
            rest = [line for line in lines if line]
        error = json.loads(rest[-2].removeprefix("data: "))["error"]
        assert (error["code"], error["type"]) == ("engine_failed", "server_error")
        assert "a rank died. /health says more." in error["message"]
        assert rest[-1] == "data: [DONE]"


# --- leaving ---


def test_a_client_that_leaves_a_stream_frees_its_sequence() -> None:
    with ApiServer(endless) as server, server.http() as http:
        with http.stream("POST", CHAT, json={"messages": USER, "stream": True, "n": 2}) as response:
            next(response.iter_lines())
        server.engine.wait_for(Abort)
        server.engine.wait_until_idle()
        wait_until(lambda: server.client.num_open == 0, "free")
        wait_until(lambda: b"disconnects_total 1.0" in server.metrics.scrape(), "counted")
        assert b'sequences_total{finish_reason="abort"} 2.0' in server.metrics.scrape()


def test_a_client_that_leaves_before_its_answer_frees_its_sequence() -> None:
    with ApiServer(held) as server:
        with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as raw:
            body = json.dumps({"messages": USER}).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            raw.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            server.engine.wait_for(Submit)
        (abort,) = server.engine.wait_for(Abort)
        assert len(abort.request_ids) == 1
        server.engine.wait_until_idle()


def test_a_client_that_leaves_within_its_body_is_forgotten() -> None:
    with ApiServer(held) as server:
        with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as raw:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            raw.sendall(head.encode() + b"Content-Length: 100\r\n\r\n{")
        wait_until(lambda: b"http_answers_total" in server.metrics.scrape(), "over")
        assert server.engine.received(Submit) == []


def test_a_request_is_aborted_by_its_id() -> None:
    with ApiServer(endless) as server, server.http() as http:
        with http.stream("POST", CHAT, json={"messages": USER, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            request_id = response.headers["x-request-id"]
            with server.http() as other:
                answer = other.delete(f"/v1/requests/{request_id}")
                assert answer.json() == {"id": request_id, "aborted": True, "object": "request"}
            events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "abort"
        error_of(http.delete(f"/v1/requests/{request_id}"), 404)
        server.engine.wait_until_idle()


def test_a_request_is_aborted_by_the_clients_own_id() -> None:
    with ApiServer(held) as server, server.http() as http:
        call = Call(server, {}, {"x-request-id": "mine-1"})
        server.engine.wait_for(Submit)
        twice = Call(server, {}, {"x-request-id": "mine-1"})
        other = Call(server, {}, {"x-request-id": "mine-10"})
        server.engine.wait_for(Submit, 3)
        assert http.delete("/v1/requests/mine-1").status_code == 200
        answers = [one.done() for one in (call, twice)]
        assert [answer.headers["x-request-id"] for answer in answers] == ["mine-1", "mine-1"]
        ids = {answer.json()["id"] for answer in answers}
        assert len(ids) == 2
        assert all(id_.startswith("chatcmpl-mine-1-") for id_ in ids)
        assert {answer.json()["choices"][0]["finish_reason"] for answer in answers} == {"abort"}
        assert http.delete("/v1/requests/mine-10").status_code == 200
        assert other.done().json()["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("given", ["Root=1-5f84c7a1-ab/c", "x" * 128, "4bf92f35-77b3-4da6-a3ce-929d0e0e4736"])
def test_a_clients_id_is_in_every_answer(given: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "firstlight.access")
    with ApiServer() as server, server.http() as http:
        for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/nowhere")):
            assert (
                http.request(method, path, headers={"x-request-id": given}).headers["x-request-id"] == given
            )
    assert caplog.text.count(f"id {given}") == 3


@pytest.mark.parametrize("given", ["x" * 129, "a b", 'say "hi"', "é", ""])
def test_an_id_that_could_do_harm_is_not_kept(given: str) -> None:
    with ApiServer() as server, server.http() as http:
        answer = http.post(CHAT, json={"messages": USER}, headers={"x-request-id": given.encode()})
        assert answer.headers["x-request-id"] == answer.json()["id"]


def test_who_left_before_an_answer_is_counted_as_499(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "firstlight.access")
    with ApiServer(held) as server:
        with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as raw:
            body = json.dumps({"messages": USER}).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            raw.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            server.engine.wait_for(Submit)
        wait_until(lambda: b'status="499"' in server.metrics.scrape(), "over")
        assert b'status="0"' not in server.metrics.scrape()
    assert f"POST {CHAT} 499, " in caplog.text


def test_what_can_never_fit_the_queue_is_not_told_to_try_again() -> None:
    with ApiServer(engine=EngineSection(max_queue=8)) as server, server.http() as http:
        error = error_of(http.post("/v1/completions", json={"prompt": ["a", "b", "c"], "n": 3}), 400)
        assert "9 answers (3 prompts, n 3)" in error["message"]
        assert "at most 8 (--max-queue)" in error["message"]
        assert http.post("/v1/completions", json={"prompt": ["a", "b"], "n": 4}).is_success


# --- time ---


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_that_takes_too_long_is_ended(streams: bool) -> None:
    with ApiServer(held, request_timeout_s=0.2) as server, server.http() as http:
        response = http.post(CHAT, json={"messages": USER, "stream": streams})
        error = error_of(response, 504)
        assert (error["code"], error["type"]) == ("request_timeout", "timeout_error")
        assert "0.2 s" in error["message"]
        server.engine.wait_for(Abort)
        server.engine.wait_until_idle()


def test_a_stream_that_takes_too_long_ends_with_an_error() -> None:
    with ApiServer(endless, request_timeout_s=0.3) as server, server.http() as http:
        events = http.post(CHAT, json={"messages": USER, "stream": True}).text.split("\n\n")
        assert json.loads(events[-3].removeprefix("data: "))["error"]["code"] == "request_timeout"
        server.engine.wait_until_idle()


def test_a_client_that_does_not_read_is_dropped_at_the_deadline() -> None:
    """And what it has not read is bounded: the rest waits as plain token ids, one merged output."""
    with ApiServer(endless, request_timeout_s=1.0) as server:
        address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.connect(address)
            body = json.dumps({"messages": USER, "stream": True}).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            raw.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            server.engine.wait_for(Abort)
            server.engine.wait_until_idle()


# --- stopping ---


def test_a_graceful_stop_lets_open_requests_finish() -> None:
    with ApiServer(held, drain_s=5.0) as server, server.http() as http:
        http.get("/health")  # a connection that stays open
        call = Call(server, {})
        server.engine.wait_for(Submit)
        server.ask_to_stop()
        (drain,) = server.engine.wait_for(Drain)
        assert drain.deadline_s == 5.0
        server.engine.release()
        assert call.done().json()["choices"][0]["message"]["content"] == "done"


def test_while_it_drains_who_comes_is_told_at_once_that_it_shuts_down() -> None:
    """On new connections and on old ones; the launcher's hold on the socket is played by `twin`."""
    with ApiServer(held, drain_s=30.0) as server, server.http() as http, server.listener_twin() as twin:
        http.get("/health")
        call = Call(server, {"stream": True})
        server.engine.wait_for(Submit)
        server.ask_to_stop()
        server.engine.wait_for(Drain)
        with server.http() as new:
            for client in (http, new):
                for path in ("/health", "/v1/models"):
                    assert_shuts_down(client.get(path))
                assert_shuts_down(client.post(CHAT, json={"messages": USER}))
                assert client.get("/health/live").status_code == 200
                assert client.head("/health").status_code == 503
        server.engine.release()
        assert call.done().text.endswith("data: [DONE]\n\n")
        server.stop()
        with pytest.raises(httpx.ConnectError):  # refused, not left in the queue of the twin
            httpx.get(f"{server.url}/health", trust_env=False, timeout=DEADLINE_S)
        assert twin.fileno() >= 0


def assert_shuts_down(response: httpx.Response) -> None:
    error = error_of(response, 503)
    assert (error["code"], error["type"]) == ("stopping", "server_error")
    assert "shutting down" in error["message"]
    assert response.headers["retry-after"] == "5"
    assert response.headers["connection"] == "close"


def test_a_unix_socket_is_closed_for_everybody_too(tmp_path: Path) -> None:
    path = str(tmp_path / "api.sock")
    with ApiServer(uds=path) as server, server.listener_twin():
        server.stop()
        with socket.socket(socket.AF_UNIX) as raw, pytest.raises(ConnectionRefusedError):
            raw.connect(path)


def test_a_client_that_does_not_read_does_not_hold_the_stop_beyond_its_margin() -> None:
    with ApiServer(endless, drain_s=0.0) as server, socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        body = json.dumps({"messages": USER, "stream": True}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        raw.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        server.engine.wait_for(Submit)
        begun_s = time.monotonic()
        server.stop()
        assert time.monotonic() - begun_s < CLOSE_MARGIN_S + 1.0


def test_what_runs_past_the_drain_is_aborted() -> None:
    with ApiServer(endless, drain_s=0.0) as server:
        call = Call(server, {})
        server.engine.wait_for(Submit)
        server.ask_to_stop()
        assert call.done().json()["choices"][0]["finish_reason"] == "abort"
