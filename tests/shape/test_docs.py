"""The documents say what the code does: every parameter and code of the API, and every limit, stands in
docs/api.md."""

from __future__ import annotations

import re

from firstlight.base.config import EngineSection, ServerSection
from firstlight.serve.openai import requests
from shape.source import PACKAGE, REPOSITORY

TEXT = (REPOSITORY / "docs" / "api.md").read_text()
MENTIONED = {name for quoted in re.findall(r"`([^`\n]+)`", TEXT) for name in re.findall(r"[a-z_]+", quoted)}


def test_every_parameter_is_documented() -> None:
    kinds = (requests.ChatRequest, requests.CompletionRequest, requests.StreamOptions)
    fields = {name for kind in kinds for name in kind.model_fields}
    assert fields - MENTIONED == set()


def test_what_is_ignored_or_refused_is_documented_in_its_place() -> None:
    after_ignored = TEXT.split("## Ignored")[1]
    ignored, refused = after_ignored.split("## Refused")
    assert {name for name in requests.IGNORED if f"`{name}`" not in ignored} == set()
    assert {name for name in requests.REFUSED if f"`{name}`" not in refused} == set()


def test_every_code_of_an_error_is_documented() -> None:
    source = "".join(path.read_text() for room in ("serve", "text") for path in (PACKAGE / room).glob("*.py"))
    codes = set(re.findall(r'code="([a-z_]+)"', source))
    assert codes
    assert codes - set(re.findall(r"`([a-z_]+)`", TEXT.split("## Status codes")[1])) == set()


def test_the_limits_are_those_of_the_server() -> None:
    rows = dict(
        re.findall(
            r"^\| (`--(?:max|header|body|request).*?) \| (.*?) \|", TEXT.split("## Limits")[1], re.MULTILINE
        )
    )
    server, engine = ServerSection(), EngineSection(threads=1)
    assert rows == {
        "`--max-body`": f"{server.max_body_bytes >> 20} MiB",
        "`--max-connections`": f"{server.max_connections}",
        "`--max-queue`": f"{engine.max_queue}",
        "`--max-choices`, `--max-batch-prompts`": f"{server.max_choices}, {server.max_batch_prompts}",
        "`--max-stop`, `--max-stop-chars`": f"{server.max_stop}, {server.max_stop_chars}",
        "`--max-top-logprobs`": f"{server.max_top_logprobs}",
        "`--max-model-len`": "what fits",
        "`--header-timeout`": f"{server.header_timeout_s:.0f} s",
        "`--body-timeout`": f"{server.body_timeout_s:.0f} s",
        "`--request-timeout`": f"{server.request_timeout_s:.0f} s",
    }


def test_links_between_documents_lead_somewhere() -> None:
    for path in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name} links to {target}"
