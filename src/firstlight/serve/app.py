"""The application: routes and their descriptions for /docs.

Invariant: every route stands here, and what it takes and gives is described where it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import ASGIApp

import firstlight
from firstlight.base.errors import RequestError
from firstlight.engine.messages import Profile
from firstlight.serve.http import errors
from firstlight.serve.http.body import read_json
from firstlight.serve.http.middleware import with_layers
from firstlight.serve.http.readiness_gate import live_response
from firstlight.serve.http.request_ids import client_id, new_id
from firstlight.serve.http.streaming_response import Exchange
from firstlight.serve.openai import handlers_info, handlers_profile, handlers_tokens, openapi, replies
from firstlight.serve.openai.handlers_chat import ChatAnswer
from firstlight.serve.openai.handlers_completions import CompletionAnswer
from firstlight.serve.openai.openapi import describe, gives, gives_text, takes
from firstlight.serve.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ProfileRequest,
    TokenizeRequest,
    parse,
)
from firstlight.serve.server import Server

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def make_app(server: Server, api_keys: Sequence[str] = ()) -> ASGIApp:
    """The whole application. Without keys it is open to whoever reaches its port."""
    app = FastAPI(title="firstlight", version=firstlight.__version__, docs_url=None, redoc_url=None)
    errors.install(app)
    describe(app)
    _add_generation(app, server)
    _add_tokens(app, server)
    _add_information(app, server)
    _add_start(app, server)
    _add_profile(app, server, has_keys=bool(api_keys))
    return with_layers(app, server.config, server.client, server.metrics, api_keys)


def _add_generation(app: FastAPI, server: Server) -> None:
    limits = server.config.server

    def exchange(answer: ChatAnswer | CompletionAnswer, request_id: str, started_s: float) -> Response:
        return Exchange(request_id, answer.run, timeout_s=limits.request_timeout_s, started_s=started_s)

    @app.post(
        "/v1/chat/completions",
        tags=["generation"],
        openapi_extra=takes(ChatRequest),
        responses=gives(replies.ChatCompletion),
    )
    async def chat(request: Request) -> Response:
        """Answer a conversation, whole or as a stream of chunks."""
        started_s, request_id = monotonic(), _request_id("chatcmpl", request)
        body = parse(ChatRequest, await read_json(request, limits.max_body_bytes))
        return exchange(ChatAnswer(server, body, request_id), request_id, started_s)

    @app.post(
        "/v1/completions",
        tags=["generation"],
        openapi_extra=takes(CompletionRequest),
        responses=gives(replies.Completion),
    )
    async def completions(request: Request) -> Response:
        """Continue a text, or several."""
        started_s, request_id = monotonic(), _request_id("cmpl", request)
        body = parse(CompletionRequest, await read_json(request, limits.max_body_bytes))
        return exchange(CompletionAnswer(server, body, request_id), request_id, started_s)

    @app.delete("/v1/requests/{request_id:path}", tags=["generation"], responses=gives(replies.Aborted))
    async def abort(request_id: str) -> Response:
        """Abort a running request by its id, or all that were sent with an x-request-id.

        What it has so far is its answer, with the finish reason "abort".
        """
        if not server.client.cancel(request_id):
            raise RequestError(
                f"No request {request_id[:100]!r} is running; it may have ended already.",
                param="request_id",
                code="not_found",
                status=404,
            )
        return _json(replies.Aborted(request_id))


def _add_tokens(app: FastAPI, server: Server) -> None:
    max_bytes = server.config.server.max_body_bytes

    @app.post("/tokenize", include_in_schema=False)  # as vLLM has it
    @app.post(
        "/v1/tokenize", tags=["tokens"], openapi_extra=takes(TokenizeRequest), responses=gives(replies.Tokens)
    )
    async def tokenize(request: Request) -> Response:
        """The tokens of a prompt, or of a conversation as the model would see it."""
        body = parse(TokenizeRequest, await read_json(request, max_bytes))
        return _json(await handlers_tokens.tokens_of(server, body))

    @app.post("/detokenize", include_in_schema=False)
    @app.post(
        "/v1/detokenize",
        tags=["tokens"],
        openapi_extra=takes(DetokenizeRequest),
        responses=gives(replies.Text),
    )
    async def detokenize(request: Request) -> Response:
        """The text of tokens."""
        body = parse(DetokenizeRequest, await read_json(request, max_bytes))
        return _json(handlers_tokens.text_of(server, body))

    @app.get("/tokenizer_info", tags=["tokens"], responses=gives(replies.TokenizerInfo))
    async def tokenizer_info() -> Response:
        """Special tokens, chat template and sizes of the model's tokenizer."""
        return _json(handlers_info.tokenizer_info(server))


def _add_information(app: FastAPI, server: Server) -> None:
    @app.get("/v1/models", tags=["information"], responses=gives(replies.ModelList))
    async def models() -> Response:
        """The served model, by each of its names."""
        return _json(handlers_info.models(server))

    @app.get("/v1/models/{name:path}", tags=["information"], responses=gives(replies.Model))
    async def model(name: str) -> Response:
        """One model."""
        return _json(handlers_info.model(server, name))

    @app.get("/ping", include_in_schema=False)  # the names that SageMaker asks by
    @app.post("/ping", include_in_schema=False)
    @app.get("/health", tags=["information"])
    async def health() -> Response:
        """200 when requests are served; 503 with the reason otherwise."""
        return _json({"status": "ready"})

    @app.get("/health/live", tags=["information"])
    async def live() -> Response:
        """200 as long as the engine lives, be it stalled; 503 once it is lost for good."""
        return live_response(server.startup)

    @app.get(
        "/metrics",
        tags=["information"],
        responses=gives_text("All figures.", "text/plain"),
        response_class=Response,
    )
    async def metrics() -> Response:
        """Figures for Prometheus."""
        server.metrics.set_ready(server.client.is_serving)
        return Response(server.metrics.scrape(), media_type=METRICS_TYPE)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """A page that shows /openapi.json; it needs nothing from other hosts."""
        return Response(openapi.PAGE, media_type="text/html")

    @app.get("/version", tags=["information"], responses=gives(replies.Version))
    async def version() -> Response:
        """The version of this server."""
        return _json(replies.Version(firstlight.__version__))

    @app.get("/server_info", tags=["information"])
    async def server_info() -> Response:
        """Version, configuration, start-up report and current state."""
        return _json(handlers_info.server_info(server))


def _add_start(app: FastAPI, server: Server) -> None:
    @app.get("/startup", tags=["information"])
    async def startup() -> Response:
        """How the start went; while it lasts, the supervisor answers here with where each process is."""
        return _json(server.startup)

    @app.get(
        "/startup/events",
        tags=["information"],
        responses=gives_text("The start.", "text/event-stream"),
        response_class=Response,
    )
    async def startup_events() -> Response:
        """The start as server-sent events; it is over, so the last one is all there is."""
        return Response(replies.startup_event(server.startup), media_type="text/event-stream")


def _add_profile(app: FastAPI, server: Server, *, has_keys: bool) -> None:
    @app.post(
        "/v1/profile",
        tags=["information"],
        openapi_extra=takes(ProfileRequest),
        responses=gives(Profile),
    )
    async def profile(request: Request) -> Response:
        """Record decode steps on every rank: where their time goes. Answers when it is done."""
        if not has_keys:
            handlers_profile.require_near(request)
        started_s, request_id = monotonic(), _request_id("profile", request)
        body = parse(ProfileRequest, await read_json(request, server.config.server.max_body_bytes))
        answer = handlers_profile.ProfileAnswer(server, body)
        return Exchange(request_id, answer.run, timeout_s=answer.most_s, started_s=started_s)


def _request_id(kind: str, request: Request) -> str:
    return new_id(kind, client_id(request.scope["headers"]))


def _json(value: Any) -> Response:
    return Response(replies.encode(value), media_type="application/json")
