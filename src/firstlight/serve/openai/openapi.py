"""The description of the API for /openapi.json and /docs.

Handlers read bodies and write answers themselves, so their types are described here. Invariant: every type
that a route names is in the document, and nothing is fetched from another host.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from firstlight.engine.messages import Profile
from firstlight.serve.http.errors import ErrorBody
from firstlight.serve.openai import replies
from firstlight.serve.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ProfileRequest,
    TokenizeRequest,
)

_REFERENCE = "#/components/schemas/{}"
_REQUESTS = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest, ProfileRequest)
_REPLIES = (
    replies.ChatCompletion,
    replies.ChatChunk,
    replies.Completion,
    replies.Tokens,
    replies.Text,
    replies.ModelList,
    replies.Model,
    replies.Aborted,
    replies.Version,
    replies.TokenizerInfo,
    Profile,
    ErrorBody,
)
PAGE = r"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>firstlight API</title>
<style>
  :root { color-scheme: light dark; --line: #8884; --soft: #888; }
  body { font: 15px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem; }
  code, pre { font-family: ui-monospace, monospace; font-size: .9em; }
  pre { padding: .8rem; border: 1px solid var(--line); border-radius: 6px; overflow-x: auto; }
  details { border: 1px solid var(--line); border-radius: 6px; margin: .5rem 0; padding: .4rem .8rem; }
  summary { cursor: pointer; }
  summary b { display: inline-block; min-width: 4.5rem; }
  table { border-collapse: collapse; width: 100%; margin: .5rem 0; }
  td { border-top: 1px solid var(--line); padding: .25rem .6rem .25rem 0; vertical-align: top; }
  td:nth-child(2), small { color: var(--soft); }
</style>
<h1>firstlight <small id="version"></small></h1>
<p>An OpenAI-compatible API. Point any OpenAI client at <code id="base"></code>.
The machine-readable description is <a href="openapi.json">openapi.json</a>.</p>
<pre id="example"></pre>
<div id="routes">Reading openapi.json …</div>
<script>
const make = (tag, text, parent) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
};
const resolve = (api, schema) =>
  schema && schema.$ref ? api.components.schemas[schema.$ref.split("/").pop()] : schema;
const typeName = schema => {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(typeName).filter(name => name !== "null").join(" or ");
  if (schema.type === "array") return "list of " + (typeName(schema.items) || "anything");
  return schema.type || "";
};
const fields = (api, schema, parent) => {
  const body = resolve(api, schema);
  if (!body || !body.properties) return;
  const table = make("table", undefined, parent);
  for (const [name, field] of Object.entries(body.properties)) {
    const row = make("tr", undefined, table);
    make("code", name, make("td", undefined, row));
    const needed = (body.required || []).includes(name) ? ", required" : "";
    make("td", typeName(field) + needed, row);
    make("td", field.description || "", row);
  }
};
const route = (api, path, method, info, parent) => {
  const box = make("details", undefined, parent);
  const head = make("summary", undefined, box);
  make("b", method.toUpperCase(), head);
  make("code", path, head);
  make("span", " – " + (info.description || info.summary || ""), head);
  const content = schema => schema && schema.content && schema.content["application/json"];
  const taken = content(info.requestBody);
  if (taken) { make("h4", "Request", box); fields(api, taken.schema, box); }
  const given = content((info.responses || {})["200"]);
  if (given) { make("h4", "Answer", box); fields(api, given.schema, box); }
};
const base = location.origin + location.pathname.replace(/\/docs\/?$/, "");
document.getElementById("base").textContent = base + "/v1";
document.getElementById("example").textContent =
  `curl ${base}/v1/chat/completions \\\n  -H 'Content-Type: application/json' \\\n` +
  `  -d '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "stream": true}'`;
fetch("openapi.json").then(answer => answer.json()).then(api => {
  document.getElementById("version").textContent = api.info.version;
  const parent = document.getElementById("routes");
  parent.textContent = "";
  for (const [path, methods] of Object.entries(api.paths))
    for (const [method, info] of Object.entries(methods)) route(api, path, method, info, parent);
}).catch(error => { document.getElementById("routes").textContent = String(error); });
</script>
</html>
"""


def takes(kind: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route whose handler reads a `kind` from the body."""
    return {"requestBody": {"required": True, "content": _json(kind)}}


def gives(kind: type[msgspec.Struct]) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that answers with a `kind`, or with an error."""
    return {
        200: {"description": (kind.__doc__ or "").partition("\n")[0], "content": _json(kind)},
        "default": {"description": "An error.", "content": _json(ErrorBody)},
    }


def gives_text(description: str, media_type: str) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that answers with a text."""
    return {200: {"description": description, "content": {media_type: {"schema": {"type": "string"}}}}}


def describe(app: FastAPI) -> None:
    """Makes `app` describe itself with our own types."""

    def schema() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = schema  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    _, requests = models_json_schema(
        [(kind, "validation") for kind in _REQUESTS], ref_template=_REFERENCE.format("{model}")
    )
    _, answers = msgspec.json.schema_components(_REPLIES, ref_template=_REFERENCE.format("{name}"))
    document["components"] = {"schemas": {**requests.get("$defs", {}), **answers}}
    return document


def _json(kind: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REFERENCE.format(kind.__name__)}}}


# The page at /docs: one file that shows /openapi.json and needs nothing from other hosts. It asks only the
# server it came from, by relative addresses.
