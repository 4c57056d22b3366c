"""The offline `LLM` over a tiny model: order, stop strings, parameters, and prompts that are refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from firstlight import LLM, SamplingParams
from firstlight.base.errors import ModelFileError, RequestError, UsageError
from support.checkpoints import random_weights, tiny_description, write_hf_folder
from support.damaged import damage_token
from support.serving import write_chat_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = write_chat_model(tmp_path_factory.mktemp("model") / "tiny")
    return LLM(str(folder), dtype="float32", threads=1, progress=False)


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["one", "a much longer prompt than the first", [5, 6, 7]]
    together = llm.generate(prompts, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert together[2].prompt_token_ids == [5, 6, 7]
    assert all(c.finish_reason == "length" and len(c.token_ids) == 12 for c in together)


def test_one_parameter_set_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, seed=n, ignore_eos=True) for n in (1, 5)]
    assert [len(c.token_ids) for c in llm.generate(["x", "y"], params)] == [1, 5]
    with pytest.raises(UsageError, match="2 sampling parameters for 1 prompts"):
        llm.generate(["x"], params)


def test_a_seed_repeats_and_unseeded_requests_differ(llm: LLM) -> None:
    seeded = SamplingParams(temperature=2.0, seed=3, max_tokens=16, ignore_eos=True)
    first, second = llm.generate(["same", "same"], seeded)
    assert first.token_ids == second.token_ids
    free = SamplingParams(temperature=2.0, max_tokens=16, ignore_eos=True)
    first, second = llm.generate(["same", "same"], free)
    assert first.token_ids != second.token_ids


def test_a_stop_string_cuts_the_text_and_frees_the_pages(llm: LLM) -> None:
    whole = llm.generate("hello", GREEDY)[0].text
    stop = whole[4:6]
    cut = llm.generate(
        ["hello", "other"], [SamplingParams(temperature=0.0, stop=(stop,), max_tokens=12), GREEDY]
    )
    assert cut[0].text == whole[: whole.index(stop)]
    assert cut[0].finish_reason == "stop"
    assert cut[1].finish_reason == "length"
    assert llm._core.scheduler.stats().pages_used == 0


def test_one_bad_prompt_costs_the_others_nothing(tmp_path: Path) -> None:
    folder = write_chat_model(tmp_path / "tiny")
    sound = LLM(str(folder), dtype="float32", threads=1, progress=False)
    expected = sound.generate([[20, 21], [30, 31]], GREEDY)
    said = {token for one in expected for token in one.token_ids}
    bad = next(token for token in range(100, 200) if token not in said)
    llm = LLM(str(damage_token(folder, bad)), dtype="float32", threads=1, progress=False)
    first, second, third = llm.generate([[20, 21], [40, bad], [30, 31]], GREEDY)
    assert [first.token_ids, third.token_ids] == [one.token_ids for one in expected]
    assert (second.finish_reason, second.token_ids) == ("error", [])
    assert second.error is not None
    assert "the tensor model.embed_tokens.weight holds 64 NaN" in second.error
    llm.require_answers([first, third])
    with pytest.raises(ModelFileError, match="embed_tokens"):
        llm.require_answers([first, second, third])


def test_logprobs_and_cached_tokens(llm: LLM) -> None:
    prompt = list(range(1, 40))
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, ignore_eos=True)
    llm.generate([prompt], params)
    again = llm.generate([prompt], params)[0]
    assert [entry.token_id for entry in again.logprobs] == again.token_ids
    assert all(len(entry.top) == 2 and entry.rank == 1 for entry in again.logprobs)
    assert again.num_cached_tokens == 32


def test_chat_uses_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    one = llm.chat(messages, GREEDY)
    two = llm.chat([messages, messages], GREEDY)
    assert [c.token_ids for c in two] == [one[0].token_ids] * 2


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([[]], "is empty"), ([[10**6]], "Token ids must lie in"), ([[1] * 5000], "at most")],
)
def test_a_prompt_that_cannot_run_is_refused_before_anything_runs(
    llm: LLM, prompt: list[list[int]], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, GREEDY)


def test_an_unknown_option_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no option 'max_modle_len'"):
        LLM(str(tmp_path), max_modle_len=5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"thread": 1}, "LLM takes no option 'thread'"),
        ({"threads": "2"}, "threads in LLM is '2', but must be a whole number"),
        ({"kv_dtype": "float8"}, "must be one of"),
        ({"memory_fraction": 2.0}, "must be at most"),
        ({"tensor_parallel": 2}, "LLM runs in one process"),
    ],
)
def test_an_engine_option_is_checked_as_in_a_file(options: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        LLM(None, progress=False, **options)


def test_tokens_that_only_the_tokenizer_knows_are_refused(tmp_path: Path) -> None:
    folder = write_chat_model(tmp_path / "tiny")
    description = tiny_description(vocab_size=80, max_position=512, eos_token_ids=(2,))
    write_hf_folder(folder, description, random_weights(description))
    llm = LLM(str(folder), dtype="float32", threads=1, progress=False)
    with pytest.raises(RequestError, match=re.escape("[0, 80)")):
        llm.generate("zzz", GREEDY)
    assert len(llm.generate([[5, 6]], GREEDY)[0].token_ids) == 12
