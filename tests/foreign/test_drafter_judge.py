"""A drafter of ours judged by the real vLLM: the same target, weights and prompts. Run by `make test-vllm`.

Both sides serve the default model as a Hugging Face folder in bfloat16, and both draft with the same folder,
always three drafts. Texts of different arithmetic part sooner or later, so the acceptance lengths are
compared over the prompts whose answers are the same tokens. Invariant: the counts are each engine's own.
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
from support.foreign import NAME, READY_S, REPOSITORY, until, vllm_by_hand
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


Counts = Callable[[], tuple[float, float]]


def answers(url: str, prompts: list[list[int]], counts: Counts) -> list[Judged]:
    """One after the other, so that the counts between are each answer's own."""
    found = []
    for prompt in prompts:
        before = counts()
        body = {"model": NAME, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
        assert reply.status_code == 200, reply.text
        after = counts()
        text = reply.json()["choices"][0]["text"]
        found.append(Judged(text, after[0] - before[0], after[1] - before[1]))
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
def vllm(model: Path, folder: Path) -> Iterator[str]:
    drafts = {"method": "eagle3", "model": str(DRAFTER), "num_speculative_tokens": K}
    flags = ("--speculative-config", json.dumps(drafts))
    with vllm_by_hand(model, folder, *flags) as (process, url):
        until(lambda: ready(process, url, folder / "vllm.log"), READY_S)
        yield url


def ready(process: subprocess.Popen[bytes], url: str, log: Path) -> bool:
    assert process.poll() is None, log.read_text(errors="replace")[-4000:]
    return httpx.get(f"{url}/health", timeout=5).status_code == 200


def test_vllm_accepts_as_many_drafts_as_we_do(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "READY_DEADLINE_S", READY_S)
    text = TextModel.load(model)
    chats: list[list[dict[str, Any]]] = [[{"role": "user", "content": question}] for question in words.CHAT]
    prompts = [text.encode(text.render_chat(chat), add_special_tokens=False) for chat in chats]
    with vllm(model, tmp_path) as url:
        theirs = answers(url, prompts, lambda: counts_of_vllm(url))
    flags = ("--drafter", str(DRAFTER), "--draft-tokens", str(K), "--no-draft-adapt", "--served-name", NAME)
    with RunningServer(model, *flags, "--max-model-len", "512") as server:
        ours = answers(server.url, prompts, lambda: counts_of_ours(server.url))
    both = list(zip(ours, theirs, strict=True))
    same = [pair for pair in both if pair[0].text == pair[1].text]
    for name, pairs in (("the same answers", same), ("all answers", both)):
        lengths = [acceptance_length([pair[side] for pair in pairs]) for side in (0, 1)]
        print(f"{name}, {len(pairs)} of {len(both)}: ours {lengths[0]:.3f}, vLLM {lengths[1]:.3f} (k = {K})")
    assert len(same) >= 5, "too few answers are the same to compare"
    mine, its = (acceptance_length([pair[side] for pair in same]) for side in (0, 1))
    assert mine == pytest.approx(its, rel=MAX_APART)
