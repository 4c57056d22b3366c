"""Keys, CORS, TLS, Unix sockets, figures, the description of the API, and the log."""

from __future__ import annotations

import json
import logging
import re
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import firstlight
from firstlight.base.config import ServerSection
from firstlight.base.errors import UsageError
from firstlight.serve.http.logs import JsonFormatter
from firstlight.serve.process import check_tls, read_api_keys
from support.api_server import MODEL, ApiServer, says
from support.tls import write_tls_files

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    keys = ["key-one", "schlüssel"]
    with ApiServer(says("ok"), keys=keys, cors_origins=("https://a.example",)) as running:
        yield running


@pytest.fixture
def http(server: ApiServer) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


# --- keys ---


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"Bearer wrong",
        b"Bearer key-on",
        b"Bearer key-one2",
        b"Basic key-one",
        b"key-one",
        b"Bearer",
        b"Bearer \xff\xfe",
    ],
)
def test_without_a_known_key_nothing_is_answered(http: httpx.Client, header: bytes | None) -> None:
    headers = {b"authorization": header} if header is not None else {}
    for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/server_info")):
        response = http.request(method, path, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("key", ["key-one", "schlüssel"])
def test_every_key_opens(http: httpx.Client, key: str) -> None:
    headers = {b"authorization": f"bearer {key}".encode()}
    assert http.post(CHAT, json=BODY, headers=headers).status_code == 200


def test_probes_and_the_description_are_open(http: httpx.Client) -> None:
    for path in ("/health", "/health/live", "/docs", "/openapi.json"):
        assert http.get(path).status_code == 200


def test_probes_may_ask_for_the_head_only(http: httpx.Client) -> None:
    for path in ("/health", "/health/live"):
        answer, head = http.get(path), http.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == answer.headers["content-length"]


def test_probes_and_versions_have_the_names_that_other_servers_give_them(http: httpx.Client) -> None:
    assert (http.get("/ping").status_code, http.post("/ping").status_code) == (200, 200)
    assert http.get("/version").status_code == 401
    answer = http.get("/version", headers={"authorization": "Bearer key-one"})
    assert answer.json() == {"version": firstlight.__version__}


def test_keys_are_read_one_a_line(tmp_path: Path) -> None:
    assert read_api_keys(tmp_path) == ()
    (tmp_path / "api-keys").write_text(" a \n\nb\n")
    assert read_api_keys(tmp_path) == ("a", "b")


# --- CORS ---


def test_browsers_may_call_from_named_origins_only(http: httpx.Client) -> None:
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    allowed = http.options(CHAT, headers={"origin": "https://a.example", **ask})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    refused = http.options(CHAT, headers={"origin": "https://b.example", **ask})
    assert "access-control-allow-origin" not in refused.headers
    error = http.post(CHAT, json=BODY, headers={"origin": "https://a.example"})
    assert (error.status_code, error.headers["access-control-allow-origin"]) == (401, "https://a.example")


def test_cors_is_off_by_default() -> None:
    with ApiServer() as plain, plain.http() as http:
        response = http.get("/v1/models", headers={"origin": "https://a.example"})
        assert "access-control-allow-origin" not in response.headers


# --- sockets ---


def test_https(tmp_path: Path) -> None:
    cert, key = write_tls_files(tmp_path)
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with ApiServer(tls_cert=cert, tls_key=key) as server, server.http(verify=context) as http:
        assert http.post(CHAT, json=BODY).status_code == 200


def test_wrong_tls_files_are_named(tmp_path: Path) -> None:
    cert, key = write_tls_files(tmp_path)
    check_tls(ServerSection(tls_cert=cert, tls_key=key))
    with pytest.raises(UsageError, match="both files"):
        check_tls(ServerSection(tls_cert=cert))
    with pytest.raises(UsageError, match="No such file"):
        check_tls(ServerSection(tls_cert=cert, tls_key=str(tmp_path / "none.pem")))
    with pytest.raises(UsageError, match="cannot be used"):
        check_tls(ServerSection(tls_cert=key, tls_key=cert))


def test_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "api.sock")
    transport = httpx.HTTPTransport(uds=path)
    with ApiServer(uds=path) as server, server.http(transport=transport) as http:
        assert http.get("/health").status_code == 200


# --- information ---


def test_the_description_names_every_field_and_resolves(http: httpx.Client) -> None:
    api = http.get("/openapi.json").json()
    schemas = api["components"]["schemas"]
    assert {"messages", "temperature", "stop"} <= set(schemas["ChatRequest"]["properties"])
    for name in re.findall(r'"#/components/schemas/(\w+)"', json.dumps(api)):
        assert name in schemas
    assert api["paths"][CHAT]["post"]["requestBody"]["required"]
    assert schemas["ChatRequest"]["properties"]["messages"]["minItems"] == 1
    assert schemas["CompletionRequest"]["properties"]["prompt"]["minLength"] == 1
    for path, kind in (("/metrics", "text/plain"), ("/startup/events", "text/event-stream")):
        assert list(api["paths"][path]["get"]["responses"]["200"]["content"]) == [kind]
    page = http.get("/docs").text
    assert "openapi.json" in page
    assert not re.search(r"https?://(?!\$)", page), "the page must need nothing from other hosts"


def test_server_info_holds_configuration_and_state_but_no_key(http: httpx.Client) -> None:
    response = http.get("/server_info", headers={"authorization": "Bearer key-one"})
    info = response.json()
    assert info["config"]["model"]["served_names"] == [MODEL, "alias"]
    assert (info["max_model_len"], info["vocab_size"]) == (256, 300)
    assert info["startup_report"] == {"layout": "none"}
    assert "key-one" not in response.text
    assert "run_dir" not in response.text


def test_metrics_count_what_happened() -> None:
    with ApiServer(says("abcd")) as server, server.http() as http:
        http.post(CHAT, json={**BODY, "n": 2})
        http.post(CHAT, json={**BODY, "temperature": -1})
        http.get("/a/scanner")
        text = http.get("/metrics").text
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert figures['firstlight:sequences_total{finish_reason="stop"}'] == "2.0"
    assert figures["firstlight:generation_tokens_total"] == "10.0"
    assert float(figures["firstlight:prompt_tokens_total"]) > 0
    assert figures["firstlight:time_to_first_token_seconds_count"] == "2.0"
    assert figures["firstlight:inter_token_latency_seconds_count"] == "8.0"
    assert figures["firstlight:request_latency_seconds_count"] == "2.0"
    assert float(figures["firstlight:step_seconds_count"]) >= 5
    assert figures['firstlight:step_seconds_bucket{le="0.001"}'] == figures["firstlight:step_seconds_count"]
    assert figures['firstlight:http_answers_total{path="/v1/chat/completions",status="200"}'] == "1.0"
    assert figures['firstlight:http_answers_total{path="/v1/chat/completions",status="400"}'] == "1.0"
    assert figures['firstlight:http_answers_total{path="other",status="404"}'] == "1.0"
    for name in ("requests_waiting", "kv_usage_ratio", "preemptions_total", "prefix_cache_hit_tokens_total"):
        assert f"firstlight:{name}" in figures


def test_the_log_has_a_line_an_answer_and_no_secrets(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "firstlight.access")
    with ApiServer(says("an answer"), keys=["key-one"]) as server, server.http() as http:
        http.post(CHAT, json=BODY, headers={"authorization": "Bearer key-one"})
        http.get("/health")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "firstlight.access"]
    assert line.startswith(f"POST {CHAT} 200, ")
    assert "key-one" not in caplog.text
    assert "an answer" not in caplog.text


def test_json_log_lines() -> None:
    try:
        raise ValueError("x")
    except ValueError:
        record = logging.LogRecord("n", logging.ERROR, "f", 1, "said %s", ("ü",), sys.exc_info())
    line = json.loads(JsonFormatter().format(record))
    assert (line["level"], line["logger"], line["message"]) == ("error", "n", "said ü")
    assert "ValueError: x" in line["traceback"]


def test_the_api_process_loads_no_torch() -> None:
    code = (
        "import sys, firstlight.serve.process as _; "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
