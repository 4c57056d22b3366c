"""`firstlight serve --drafter …` answers what `firstlight serve` answers, and says what its drafts did.

Over HTTP, on a tiny model: stop strings, log-probabilities, streams, several answers, usage, figures. The
offline `LLM` with the same drafter is asked the same.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from firstlight import LLM, SamplingParams
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.models.eagle3_file import save_eagle3
from support.eagle3 import tiny_eagle3
from support.serving import RunningServer, write_chat_model

pytestmark = pytest.mark.timeout(300)
PORTION = ("--draft-tokens", "4", "--no-draft-adapt")
FLAGS = ("--dtype", "float32", "--threads", "1", "--max-model-len", "512")
DRAFTING = ("--drafter", "ngram", *PORTION)
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


@pytest.fixture(scope="module")
def eagle3(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random EAGLE-3 drafter for the tiny model."""
    folder = tmp_path_factory.mktemp("drafter")
    description = open_checkpoint(model).description
    sizes = {"vocab_size": description.vocab_size, "max_position": 512, "state_layers": (0, 1, 2)}
    save_eagle3(folder, tiny_eagle3(**sizes), torch.float32)
    return folder


@dataclass(frozen=True)
class Weighted:
    """A kind of drafter with weights, and how its drafts of a step are said and labelled."""

    name: str
    words: str = "4"
    labels: str = 'nodes="4",top_k="1"'
    flags: tuple[str, ...] = ()


TREE = ("--draft-top-k", "2", "--draft-nodes", "7")
WEIGHTED = {
    "eagle3": Weighted("eagle3"),
    "draft-model": Weighted("draft-model"),
    "tree": Weighted("eagle3", "7 in a tree of 4 x 2", 'nodes="7",top_k="2"', TREE),
}


@pytest.fixture(scope="module", params=WEIGHTED)
def with_model(
    model: Path, eagle3: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[RunningServer, Weighted]]:
    """A server whose drafter has weights: an EAGLE-3 drafter, the very model, or EAGLE-3 in trees."""
    kind = WEIGHTED[request.param]
    drafter = eagle3 if kind.name == "eagle3" else model
    with RunningServer(model, *FLAGS, "--drafter", str(drafter), *PORTION, *kind.flags) as server:
        yield server, kind


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


def test_drafters_with_weights(plain: RunningServer, with_model: tuple[RunningServer, Weighted]) -> None:
    """The answers are the same, and the start says what was read, what it takes and how often it is right."""
    server, kept = with_model
    name = kept.name
    for kind in ASKED:
        expected, answer = ask(plain, **ASKED[kind]), ask(server, **ASKED[kind])
        assert answer["choices"] == expected["choices"]
    info = httpx.get(f"{server.url}/server_info").json()
    report, drafts = info["startup_report"], info["engine"]["drafts"]
    assert report["drafter"] == f"{name}: always {kept.words} drafts, keyed verification"
    assert report["drafter_notes"]
    trial = report["drafter_trial"]
    assert trial["draft_tokens"] == 4
    assert drafts["num_drafted"] > 100
    assert drafts["by_length"].keys() == {"below 256"}
    assert drafts["by_prefix_hit"].keys() <= {"no", "yes"}
    if name == "draft-model" and trial["num_tokens"]:  # the target itself is always right; time may be short
        assert trial["accepted_per_drafted"] in (1.0, None)
    metrics = httpx.get(f"{server.url}/metrics").text
    metric = "firstlight:draft_accepted_tokens_by"
    assert f'{metric}_length_total{{drafter="{name}",k="4",length="below 256",{kept.labels}}}' in metrics
    assert f'{metric}_prefix_hit_total{{drafter="{name}",hit="no",k="4",{kept.labels}}}' in metrics


def test_a_drafter_that_is_not_there_ends_the_start(model: Path, eagle3: Path, tmp_path: Path) -> None:
    for folder, code, words in ((tmp_path / "gone", 2, "no such folder"), (tmp_path, 3, "no config.json")):
        command = [sys.executable, "-m", "firstlight", "serve", str(model), *FLAGS, "--port", "0"]
        ended = subprocess.run(
            [*command, "--drafter", str(folder)], capture_output=True, text=True, timeout=120, check=False
        )
        assert ended.returncode == code, ended.stderr
        assert words in ended.stdout + ended.stderr


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
    labels = 'drafter="ngram",k="4",nodes="4"'
    total = re.search(
        rf'^firstlight:draft_accepted_tokens_total\{{{labels},top_k="1"\}} (\S+)$', metrics, re.MULTILINE
    )
    assert total is not None
    assert float(total[1]) == drafts["num_accepted"]
    assert f'firstlight:draft_accepted_by_place_total{{{labels},place="4",top_k="1"}}' in metrics


def test_without_a_drafter_there_is_nothing_of_it(plain: RunningServer) -> None:
    info = httpx.get(f"{plain.url}/server_info").json()
    assert info["engine"]["drafts"] is None
    assert info["startup_report"]["drafter"] == "none"
    assert "firstlight:draft" not in httpx.get(f"{plain.url}/metrics").text


@pytest.mark.parametrize("kind", ["eagle3", "the model itself"])
def test_the_offline_llm_with_weights(model: Path, eagle3: Path, kind: str) -> None:
    options = {"dtype": "float32", "threads": 1, "progress": False}
    drafter = str(eagle3 if kind == "eagle3" else model)
    one, other = LLM(str(model), **options), LLM(str(model), **options, drafter=drafter, draft_adapt=False)
    params = SamplingParams(temperature=1.0, max_tokens=60, seed=3)
    expected, answers = one.generate(["ab ab", "x"], params), other.generate(["ab ab", "x"], params)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert sum(answer.num_drafted for answer in answers) > 60
    assert other.report["drafter_trial"]["draft_tokens"] == 3


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
