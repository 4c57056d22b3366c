"""`firstlight serve --drafter ngram` answers what `firstlight serve` answers, and says what its drafts did.

Over HTTP, on a tiny model: stop strings, log-probabilities, streams, several answers, usage, figures. The
offline `LLM` with the same drafter is asked the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from firstlight import LLM, SamplingParams
from support.serving import RunningServer, write_chat_model

pytestmark = pytest.mark.timeout(300)
FLAGS = ("--dtype", "float32", "--threads", "1", "--max-model-len", "512")
DRAFTING = ("--drafter", "ngram", "--draft-tokens", "4", "--no-draft-adapt")
FEW = {"logit_bias": {str(token): 9.0 for token in range(40, 48)}, "frequency_penalty": 0.05}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 7},
    "penalties": {"temperature": 0.7, "seed": 1, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    "likeliest": {"temperature": 0, "logprobs": True, "top_logprobs": 3},
    "bias": {"temperature": 0, "logit_bias": {"40": 5.0, "41": 5.0}, "min_tokens": 30},
    "several": {"temperature": 1.0, "seed": 3, "n": 3},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[RunningServer]:
    with RunningServer(model, *FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def drafting(model: Path) -> Iterator[RunningServer]:
    with RunningServer(model, *FLAGS, *DRAFTING) as server:
        yield server


def ask(server: RunningServer, **body: Any) -> dict[str, Any]:
    message = {"role": "user", "content": "ab ab ab ab ab"}
    request = {"model": "tiny", "messages": [message], "max_tokens": 100, **body}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=request, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def without_usage(answer: dict[str, Any]) -> list[Any]:
    return answer["choices"]


@pytest.mark.parametrize("kind", ASKED)
def test_the_answer_is_the_same(plain: RunningServer, drafting: RunningServer, kind: str) -> None:
    expected, answer = ask(plain, **ASKED[kind]), ask(drafting, **ASKED[kind])
    assert answer["choices"] == expected["choices"]
    drafted, not_drafted = answer["usage"], expected["usage"]
    assert drafted["completion_tokens"] == not_drafted["completion_tokens"]
    assert not any(not_drafted["completion_tokens_details"].values())


def test_a_stop_string_in_the_middle_of_accepted_drafts(
    plain: RunningServer, drafting: RunningServer
) -> None:
    whole = ask(drafting, temperature=0, **FEW)
    text = whole["choices"][0]["message"]["content"]
    accepted = whole["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert accepted > 40, "of few words the text is a circle, and prompt lookup follows it"
    for place in range(60, 70):
        body = {
            "temperature": 0,
            "stop": [text[place : place + 3]],
            "logprobs": True,
            "return_token_ids": True,
        }
        expected, answer = ask(plain, **body), ask(drafting, **body)
        assert answer["choices"] == expected["choices"]
        assert answer["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
        details = answer["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] <= answer["usage"]["completion_tokens"]


def test_a_stream_has_the_same_text(plain: RunningServer, drafting: RunningServer) -> None:
    body = {"model": "tiny", "prompt": "xyz xyz xyz", "max_tokens": 80, "temperature": 0, "stream": True}
    texts = []
    for server in (plain, drafting):
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).text
        texts.append("".join(re.findall(r'"text":"((?:[^"\\]|\\.)*)"', answer)))
    assert texts[0] == texts[1] != ""


def test_the_figures_come_with_their_k(drafting: RunningServer) -> None:
    ask(drafting, temperature=0)
    info = httpx.get(f"{drafting.url}/server_info").json()
    assert info["startup_report"]["drafter"] == "ngram: always 4 drafts, keyed verification"
    drafts = info["engine"]["drafts"]
    assert (drafts["drafter"], drafts["draft_tokens"], drafts["reason"]) == ("ngram", 4, "--no-draft-adapt")
    assert 1.0 < drafts["acceptance_length"] <= 5.0
    assert drafts["num_accepted"] <= drafts["num_drafted"]
    assert len(drafts["acceptance_by_place"]) == len(drafts["conditional_acceptance_by_place"]) == 4
    metrics = httpx.get(f"{drafting.url}/metrics").text
    total = re.search(
        r'^firstlight:draft_accepted_tokens_total\{drafter="ngram",k="4"\} (\S+)$', metrics, re.M
    )
    assert total is not None
    assert float(total[1]) == drafts["num_accepted"]
    assert 'firstlight:draft_accepted_by_place_total{drafter="ngram",k="4",place="4"}' in metrics


def test_without_a_drafter_there_is_nothing_of_it(plain: RunningServer) -> None:
    info = httpx.get(f"{plain.url}/server_info").json()
    assert info["engine"]["drafts"] is None
    assert info["startup_report"]["drafter"] == "none"
    assert "firstlight:draft" not in httpx.get(f"{plain.url}/metrics").text


def test_the_offline_llm(model: Path) -> None:
    options = {"dtype": "float32", "threads": 1, "progress": False}
    one = LLM(str(model), **options)
    other = LLM(str(model), **options, drafter="ngram", draft_tokens=4, draft_adapt=False)
    few = {"logit_bias": dict.fromkeys(range(40, 48), 9.0), "frequency_penalty": 0.05}
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, **few)
    (whole,) = one.generate("ab ab ab", params)
    stops = [whole.text[place : place + 3] for place in range(60, 80)]
    many = [
        SamplingParams(temperature=0.0, max_tokens=100, logprobs=1, stop=(stop,), **few) for stop in stops
    ]
    expected = one.generate(["ab ab ab"] * len(many), many)
    answers = other.generate(["ab ab ab"] * len(many), many)
    assert sum(answer.num_accepted for answer in answers) > 100
    for answer, wanted in zip(answers, expected, strict=True):
        assert answer.token_ids == wanted.token_ids
        assert (answer.text, answer.logprobs) == (wanted.text, wanted.logprobs)
        assert len(answer.logprobs) == len(answer.token_ids)
