"""What `firstlight chat` samples with when nothing is given: the model's way, its card's, or local tools'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from firstlight.cli.chat_client import ChatClient
from firstlight.cli.chat_sampling import Known, choose_sampling, read_folder

TOOLS = {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05}
OURS = {"is_ours": True}


@pytest.mark.parametrize(
    ("known", "given", "fields", "words"),
    [
        (
            Known(("m",), {}, **OURS),
            {},
            TOOLS,
            "temperature 0.8, top_p 0.95, min_p 0.05 (the model names nothing",
        ),
        (
            Known(("m",)),
            {},
            {"temperature": 0.8, "top_p": 0.95},
            "as local tools do",
        ),  # min_p is not OpenAI's
        (
            Known(("SmolLM2-135M-Instruct",), {}, **OURS),
            {},
            {"temperature": 0.2, "top_p": 0.9},
            "temperature 0.2, top_p 0.9 (as the model's card says)",
        ),
        (
            Known(("m",), {"temperature": 0.6, "top_k": 20}, **OURS),
            {},
            {"temperature": 0.6, "top_k": 20},
            "as the model's generation_config says",
        ),
        (
            Known(("m",), {"top_k": 40}, **OURS),
            {},
            {"temperature": 0.8, "top_k": 40},
            "temperature 0.8, top_k 40",
        ),
        (
            Known(("SmolLM2-135M-Instruct",)),
            {"temperature": 1.0, "max_tokens": 5},
            {"temperature": 1.0, "top_p": 0.9},
            "temperature 1 (given), top_p 0.9",
        ),
        (Known(("m",), {"temperature": 0.6}, **OURS), {"temperature": 0.0}, {"temperature": 0.0}, "greedily"),
        (Known(("m",), {"temperature": "hot"}, **OURS), {}, TOOLS, "names nothing"),
    ],
)
def test_who_says_how_to_sample(
    known: Known, given: dict[str, Any], fields: dict[str, float], words: str
) -> None:
    sampling = choose_sampling(known, given)
    assert sampling.fields == fields
    assert words in sampling.words


def about(answers: dict[str, Any], model: str) -> Known:
    def answer(request: httpx.Request) -> httpx.Response:
        found = answers.get(request.url.path)
        return httpx.Response(404) if found is None else httpx.Response(200, json=found)

    with ChatClient("http://server", None, lambda *_: None, httpx.MockTransport(answer)) as client:
        return client.about(model)


def test_a_server_of_ours_says_it_and_of_others_a_folder_here_is_read(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "do_sample": True}))
    models = {"data": [{"id": "m", "root": str(tmp_path)}, {"id": "other"}]}
    ours = about({"/server_info": {"generation_defaults": {"top_p": 0.5}}, "/v1/models": models}, "m")
    assert (ours.defaults, ours.is_ours) == ({"top_p": 0.5}, True)
    foreign = about({"/v1/models": models, "/server_info": {"model_path": "x"}}, "m")
    assert (foreign.defaults, foreign.is_ours) == ({"temperature": 0.7, "do_sample": True}, False)
    assert about({"/v1/models": models}, "other").defaults is None
    assert about({}, "m") == Known(("m",))


@pytest.mark.parametrize("text", ["[]", "{", json.dumps({"do_sample": False, "temperature": 0.3})])
def test_a_folder_that_says_nothing_is_passed_over(tmp_path: Path, text: str) -> None:
    assert read_folder(str(tmp_path)) is None
    (tmp_path / "generation_config.json").write_text(text)
    assert read_folder(str(tmp_path)) is None
    assert read_folder("org/model") is None
