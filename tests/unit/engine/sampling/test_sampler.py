"""The sampler against plain numpy, parameter by parameter and combined; batches; what is not a number."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from firstlight.engine.messages import TokenLogprobs
from firstlight.engine.sampling.sampler import NUM_CANDIDATES, Sampler
from firstlight.engine.scheduler.sequence import NO_TOKEN, Sequence
from support.sampling import END, adjusted, choose, kept_tokens, log_shares, sequence

VOCABULARY = 200
PROMPT = [5, 9, 9, 17, 60]
OUTPUT = [9, 21, 21, 21, 4]
SINGLE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "greedy": {"temperature": 0.0},
    "temperature low": {"temperature": 0.3},
    "temperature high": {"temperature": 2.5},
    "top_k 1": {"top_k": 1},
    "top_k": {"top_k": 7},
    "top_k beyond the vocabulary": {"top_k": 100_000},
    "top_p": {"top_p": 0.6},
    "top_p tiny": {"top_p": 1e-9},
    "min_p": {"min_p": 0.1},
    "min_p 1": {"min_p": 1.0},
    "repetition": {"repetition_penalty": 1.7},
    "repetition, rewarding": {"repetition_penalty": 0.6},
    "frequency": {"frequency_penalty": 0.9},
    "presence": {"presence_penalty": 1.5},
    "presence, rewarding": {"presence_penalty": -2.0},
    "bias": {"logit_bias": {7: 4.0, 21: -100.0, 40: 2.5}},
    "bias to one": {"logit_bias": {11: 100.0}},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": (8, 10)},
    "min_tokens reached": {"min_tokens": 5, "stop_token_ids": (8, 10)},
    "min_tokens reached, and a penalty": {"min_tokens": 5, "presence_penalty": 0.1},
}


def random_logits(
    num_rows: int, vocabulary: int = VOCABULARY, scale: float = 2.0, seed: int = 0
) -> torch.Tensor:
    return torch.randn(num_rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def rows_of(params: dict[str, Any], num: int = 48) -> list[Sequence]:
    """The same parameters with other seeds and positions."""
    return [sequence(PROMPT, OUTPUT, **{**params, "seed": seed}) for seed in range(num)]


def assert_as_numpy(logits: torch.Tensor, rows: list[Sequence]) -> list[int]:
    expected = [choose(row.double().numpy(), item) for row, item in zip(logits, rows, strict=True)]
    assert Sampler().sample(logits.clone(), rows).tokens == expected
    return expected


@pytest.mark.parametrize("name", SINGLE)
def test_each_parameter(name: str) -> None:
    rows = rows_of(SINGLE[name])
    logits = random_logits(len(rows))
    logits[:, END] += 6.0  # so that min_tokens has something to suppress
    assert_as_numpy(logits, rows)


COMBINED = list(itertools.product((0, 1, 3, 50), (1.0, 0.9, 0.3), (0.0, 0.02, 0.5), (0.2, 1.0, 1.7)))


@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_truncations_combined(scale: float) -> None:
    rows = []
    for number, (top_k, top_p, min_p, temperature) in enumerate(COMBINED * 3):
        params = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": temperature}
        rows.append(sequence(PROMPT, OUTPUT, **params, seed=number))
    assert_as_numpy(random_logits(len(rows), scale=scale, seed=3), rows)


def test_everything_combined() -> None:
    params = {
        "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2,
        "frequency_penalty": 0.4, "presence_penalty": 0.3, "logit_bias": {30: 1.0, 9: -1.0}, "min_tokens": 20,
    }  # fmt: skip
    rows = rows_of(params, 200)
    tokens = assert_as_numpy(random_logits(200, seed=4), rows)
    assert END not in tokens
    assert len(set(tokens)) > 30


LONG_TAILS: dict[str, dict[str, Any]] = {
    "top_p needs more than the candidates": {"top_p": 0.97},
    "top_k above the candidates": {"top_k": NUM_CANDIDATES + 700},
    "top_k above the candidates, small top_p": {"top_k": NUM_CANDIDATES + 700, "top_p": 0.05},
    "top_k at the candidates": {"top_k": NUM_CANDIDATES},
    "min_p keeps all": {"min_p": 1e-6},
    "min_p within the candidates": {"min_p": 0.9},
}


@pytest.mark.parametrize("name", LONG_TAILS)
def test_flat_distributions_over_a_large_vocabulary(name: str) -> None:
    vocabulary = 4 * NUM_CANDIDATES + 13
    rows = rows_of(LONG_TAILS[name], 12)
    logits = random_logits(12, vocabulary, scale=0.3, seed=5)
    assert_as_numpy(logits, rows)


def test_truncated_draws_follow_the_truncated_distribution() -> None:
    num = 20_000
    params = {"temperature": 0.9, "top_k": 12, "top_p": 0.85}
    rows = [sequence(PROMPT, OUTPUT, **params, seed=seed) for seed in range(num)]
    logits = random_logits(1, scale=1.0, seed=6)
    kept = kept_tokens(adjusted(logits[0].double().numpy(), rows[0]), rows[0].params)
    tokens = Sampler().sample(logits.repeat(num, 1), rows).tokens
    counts = np.bincount(tokens, minlength=VOCABULARY)
    shares = np.exp(logits[0].double().numpy()[kept] / 0.9)
    expected = shares / shares.sum() * num
    assert counts.sum() == counts[kept].sum() == num
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 40  # 11 degrees of freedom at most


def test_a_seed_gives_other_tokens_at_other_positions() -> None:
    logits = random_logits(1, 1000, scale=0.1).repeat(60, 1)
    rows = [sequence(PROMPT, [1] * number, seed=5) for number in range(60)]
    assert len(set(Sampler().sample(logits, rows).tokens)) > 40


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-30, 1e-42, 1e-300])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = random_logits(8, seed=8) - 40.0  # negative: a quotient that overflows would lose its order
    rows = rows_of({"temperature": temperature}, 4) + rows_of({"temperature": temperature, "top_p": 0.9}, 4)
    assert Sampler().sample(logits.clone(), rows).tokens == logits.argmax(-1).tolist()


# --- log-probabilities ---


def test_logprobs_are_those_of_the_adjusted_distribution_before_temperature() -> None:
    params = {
        "temperature": 0.4,
        "top_k": 3,
        "logit_bias": {30: 3.0},
        "repetition_penalty": 1.3,
        "logprobs": 5,
    }
    rows = rows_of(params, 20)
    logits = random_logits(20, seed=9)
    sampled = Sampler().sample(logits.clone(), rows)
    assert sampled.logprobs.keys() == set(range(20))
    for row, item in enumerate(rows):
        values = log_shares(adjusted(logits[row].double().numpy(), item))
        got, token = sampled.logprobs[row], sampled.tokens[row]
        assert got.token_id == token
        assert got.logprob == pytest.approx(values[token], abs=1e-5)
        assert got.rank == 1 + int((values > values[token]).sum())
        best = np.argsort(-values)[:5]
        assert [entry[0] for entry in got.top] == best.tolist()
        assert [entry[1] for entry in got.top] == pytest.approx(values[best], abs=1e-5)


def test_logprobs_only_where_asked_for_and_none_of_the_top_if_zero() -> None:
    rows = [sequence(PROMPT, [], logprobs=None), sequence(PROMPT, [], logprobs=0)]
    sampled = Sampler().sample(random_logits(2), rows)
    assert sampled.logprobs.keys() == {1}
    assert sampled.logprobs[1].top == []


def test_more_top_logprobs_than_the_vocabulary_has() -> None:
    sampled = Sampler().sample(random_logits(1, 6), [sequence([1], [], logprobs=20)])
    assert len(sampled.logprobs[0].top) == 6


# --- batches ---


def mixed_rows() -> list[Sequence]:
    kinds = [
        *SINGLE.values(),
        {"top_p": 0.97, "top_k": 1500},
        {"top_p": 0.999},
        {"min_p": 1e-7},
        {"top_k": 40},
    ]
    return [
        sequence(PROMPT, OUTPUT, **{**kind, "seed": 3 + n, "logprobs": 2}) for n, kind in enumerate(kinds * 2)
    ]


def outcome(logits: torch.Tensor, rows: list[Sequence]) -> list[tuple[int, TokenLogprobs]]:
    sampled = Sampler().sample(logits.clone(), rows)
    return [(token, sampled.logprobs[row]) for row, token in enumerate(sampled.tokens)]


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("vocabulary", [1003, pytest.param(49152, marks=pytest.mark.slow)])
def test_a_row_s_outcome_does_not_depend_on_its_batch(vocabulary: int, num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        rows = mixed_rows()
        logits = random_logits(len(rows), vocabulary, seed=10)
        together = outcome(logits, rows)
        alone = [outcome(logits[row : row + 1], [item])[0] for row, item in enumerate(rows)]
        assert alone == together
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()
        shuffled = outcome(logits[order], [rows[row] for row in order])
        assert shuffled == [together[row] for row in order]
    finally:
        torch.set_num_threads(before)


def test_shares_do_not_depend_on_the_batch_bit_for_bit() -> None:
    """Where top-p cuts: a sum in another order would move the cut once in a long while."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        logits = random_logits(24, 49152, seed=12)
        together = logits.log_softmax(-1)
        assert all(torch.equal(logits[row : row + 1].log_softmax(-1)[0], together[row]) for row in range(24))
    finally:
        torch.set_num_threads(before)


# --- what is not a number ---


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_p": 0.9}])
def test_bad_logits_are_reported_for_their_row_alone(bad: float, params: dict[str, Any]) -> None:
    logits = random_logits(5, seed=11)
    rows = rows_of({**params, "logprobs": 1}, 5)
    good = Sampler().sample(logits.clone(), rows)
    logits[2, 50] = bad
    sampled = Sampler().sample(logits, rows)
    assert sampled.tokens[2] == NO_TOKEN
    assert 2 not in sampled.logprobs
    assert [sampled.tokens[row] for row in (0, 1, 3, 4)] == [good.tokens[row] for row in (0, 1, 3, 4)]


def test_a_row_without_any_possible_token_is_reported() -> None:
    logits = torch.full((2, 10), -torch.inf)
    logits[1, 4] = 0.0
    assert Sampler().sample(logits, [sequence([1], []), sequence([1], [])]).tokens == [NO_TOKEN, 4]


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((300, 10), -torch.inf)
    logits[:, 4:6] = 0.0
    rows = [sequence([1], [], seed=seed, top_p=1.0 if seed % 2 else 0.999) for seed in range(300)]
    assert set(Sampler().sample(logits, rows).tokens) == {4, 5}
