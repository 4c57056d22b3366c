"""The documents say what the code does: every parameter of the API stands in docs/api.md."""

from __future__ import annotations

import re

from firstlight.serve import protocol, refusals
from shape.source import REPOSITORY

TEXT = (REPOSITORY / "docs" / "api.md").read_text()
MENTIONED = {name for quoted in re.findall(r"`([^`\n]+)`", TEXT) for name in re.findall(r"[a-z_]+", quoted)}


def test_every_parameter_is_documented() -> None:
    kinds = (protocol.ChatRequest, protocol.CompletionRequest, protocol.StreamOptions)
    fields = {name for kind in kinds for name in kind.model_fields}
    assert fields - MENTIONED == set()


def test_what_is_ignored_or_refused_is_documented_in_its_place() -> None:
    after_ignored = TEXT.split("## Ignored")[1]
    ignored, refused = after_ignored.split("## Refused")
    assert {name for name in refusals.IGNORED if f"`{name}`" not in ignored} == set()
    assert {name for name in refusals.REFUSED if f"`{name}`" not in refused} == set()


def test_links_between_documents_lead_somewhere() -> None:
    for path in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name} links to {target}"
