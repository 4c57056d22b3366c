"""Our drafter judged by the real vLLM and llama.cpp: the same target, weights and prompts. `make judges`.

All serve the default model in bfloat16, from one Hugging Face folder or a GGUF file made of it by llama.cpp's
own converter, and draft with the same drafter, always three drafts. Texts of different arithmetic part sooner
or later, so the acceptance lengths are compared over the prompts whose answers are the same. Invariant: the
counts are each engine's own.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from firstlight.drafter import words
from firstlight.text.model import TextModel
from support import serving
from support.foreign import NAME, READY_S, REPOSITORY, llama_by_hand, to_gguf, until, vllm_by_hand
from support.serving import RunningServer

pytestmark = pytest.mark.timeout(1800)

DRAFTER = REPOSITORY / "drafters" / "smollm2-135m-instruct-eagle3"
K = 3
NUM_TOKENS = 64
MAX_APART = 0.05


@dataclass(frozen=True)
class Judged:
    """One answer, and what came of its drafts."""

    text: str
    num_rounds: float
    num_accepted: float


Ask = Callable[[list[int]], Judged]


def counting(url: str, counts: Callable[[str], tuple[float, float]]) -> Ask:
    """One request after the other, so that the counts of rounds and accepted drafts between are its own."""

    def ask(prompt: list[int]) -> Judged:
        before = counts(url)
        text = complete(url, prompt)["choices"][0]["text"]
        after = counts(url)
        return Judged(text, after[0] - before[0], after[1] - before[1])

    return ask


def complete(url: str, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"model": NAME, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, **more}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def counts_of_vllm(url: str) -> tuple[float, float]:
    said = httpx.get(f"{url}/metrics", timeout=10).text

    def total(name: str) -> float:
        return sum(float(value) for value in re.findall(rf"^{name}{{.*}} (\S+)$", said, re.MULTILINE))

    return (
        total("vllm:spec_decode_num_drafts_total"),
        total("vllm:spec_decode_num_accepted_tokens_total"),
    )


def counts_of_ours(url: str) -> tuple[float, float]:
    drafts = httpx.get(f"{url}/server_info", timeout=10).json()["engine"]["drafts"]
    return drafts["num_verified"], drafts["num_accepted"]


def acceptance_length(judged: list[Judged]) -> float:
    return 1 + sum(one.num_accepted for one in judged) / max(1.0, sum(one.num_rounds for one in judged))


@contextlib.contextmanager
def ours(model: Path) -> Iterator[Ask]:
    flags = ("--drafter", str(DRAFTER), "--draft-tokens", str(K), "--no-draft-adapt", "--served-name", NAME)
    with RunningServer(model, *flags, "--max-model-len", "512") as server:
        yield counting(server.url, counts_of_ours)


@contextlib.contextmanager
def vllm(model: Path, folder: Path) -> Iterator[Ask]:
    drafts = {"method": "eagle3", "model": str(DRAFTER), "num_speculative_tokens": K}
    flags = ("--speculative-config", json.dumps(drafts))
    with vllm_by_hand(model, folder, *flags) as (process, url):
        until(lambda: ready(process, url, folder / "vllm.log"), READY_S)
        yield counting(url, counts_of_vllm)


@contextlib.contextmanager
def llama(model: Path, folder: Path) -> Iterator[Ask]:
    """Its answer says how many drafts there were; each round has K."""
    target, drafter = folder / "target.gguf", folder / "drafter.gguf"
    to_gguf(model, target)
    to_gguf(DRAFTER, drafter, "--target-model-dir", str(model))

    def ask(prompt: list[int]) -> Judged:
        said = complete(url, prompt, cache_prompt=False)
        timings = said["timings"]
        return Judged(said["choices"][0]["text"], timings["draft_n"] / K, timings["draft_n_accepted"])

    drafts = ("-md", str(drafter), "--spec-type", "draft-eagle3", "--spec-draft-n-max", str(K))
    with llama_by_hand(target, folder, *drafts) as (process, url):
        until(lambda: ready(process, url, folder / "llama.log"), READY_S)
        yield ask


def ready(process: subprocess.Popen[bytes], url: str, log: Path) -> bool:
    assert process.poll() is None, log.read_text(errors="replace")[-4000:]
    return httpx.get(f"{url}/health", timeout=5).status_code == 200


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[list[int]]:
    text = TextModel.load(model)
    chats: list[list[dict[str, Any]]] = [[{"role": "user", "content": question}] for question in words.CHAT]
    return [text.encode(text.render_chat(chat), add_special_tokens=False) for chat in chats]


@pytest.fixture(scope="module")
def mine(model: Path, prompts: list[list[int]]) -> Iterator[list[Judged]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "READY_DEADLINE_S", READY_S)
        with ours(model) as ask:
            yield [ask(prompt) for prompt in prompts]


@pytest.mark.parametrize("judge", [vllm, llama])
def test_a_judge_accepts_as_many_drafts_as_we_do(
    model: Path,
    tmp_path: Path,
    prompts: list[list[int]],
    mine: list[Judged],
    judge: Callable[[Path, Path], contextlib.AbstractContextManager[Ask]],
) -> None:
    with judge(model, tmp_path) as ask:
        theirs = [ask(prompt) for prompt in prompts]
    both = list(zip(mine, theirs, strict=True))
    same = [pair for pair in both if pair[0].text == pair[1].text]
    for name, pairs in (("the same answers", same), ("all answers", both)):
        lengths = [acceptance_length([pair[side] for pair in pairs]) for side in (0, 1)]
        print(
            f"{name}, {len(pairs)} of {len(both)}: ours {lengths[0]:.3f}, "
            f"{judge.__name__} {lengths[1]:.3f} (k = {K})"
        )
    assert len(same) >= 5, "too few answers are the same to compare"
    here, there = (acceptance_length([pair[side] for pair in same]) for side in (0, 1))
    assert here == pytest.approx(there, rel=MAX_APART)
