"""A Kimi in small is served like any model: its chat, its prefix cache, and drafts that change no token."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch

from firstlight import LLM, SamplingParams
from firstlight.models.random_model import Unpacked, write_random_model
from firstlight.models.small_kimi import WRAPPER, kimi_of_hidden
from support.serving import RunningServer, byte_tokenizer, write_tokenizer

pytestmark = pytest.mark.timeout(300)
MESSAGES = [{"role": "user", "content": "Why is the sky blue, blue, blue, blue, blue, blue, blue?"}]
ASKED = {"messages": MESSAGES, "temperature": 0, "max_tokens": 40, "logit_bias": {"2": -100}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "kimi"
    tokenizer = byte_tokenizer()
    description = kimi_of_hidden(
        64, vocab_size=tokenizer.get_vocab_size(), num_layers=3, num_experts=8, end_ids=(2,)
    )
    write_random_model(folder, description, Unpacked(torch.bfloat16), wrapper=WRAPPER)
    write_tokenizer(folder, tokenizer)
    return folder


def test_it_answers_with_drafts_what_it_answers_alone(model: Path) -> None:
    flags = ("--threads", "1", "--dtype", "float32", "--drafter", "ngram", "--no-draft-adapt")
    with RunningServer(model, *flags) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        info = client.get("/server_info").json()
        assert "kimi_k2" in str(info)
        first, again = (client.post("/v1/chat/completions", json=ASKED).json() for _ in range(2))
    assert first["choices"][0]["message"] == again["choices"][0]["message"]
    assert first["usage"]["completion_tokens"] == 40
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 30
    alone = LLM(str(model), dtype="float32", threads=1, progress=False)
    params = SamplingParams(temperature=0, max_tokens=40, logit_bias={2: -100.0})
    (answer,) = alone.chat([MESSAGES], params)
    assert answer.text == first["choices"][0]["message"]["content"]
