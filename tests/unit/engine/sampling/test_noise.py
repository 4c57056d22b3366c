"""The noise of sampling: its distribution, its independence, and that Gumbel-max draws from the softmax.

Everything is a function of fixed seeds, so that no test here can fail by chance. The statistics are held
against limits that a fair source passes with probability 0.9999; the last tests show that an unfair one does
not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from firstlight.engine.sampling.noise import gumbel, gumbel_of_bits, stream_key

EULER = 0.5772156649
Z_LIMIT = 3.72  # one in ten thousand, one-sided


def keys(num: int, seed: int = 1) -> list[tuple[int, int]]:
    return [stream_key(seed, position) for position in range(num)]


def chi_square_limit(freedom: int) -> float:
    """The value that one in ten thousand exceeds (Wilson and Hilferty's approximation)."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + Z_LIMIT * math.sqrt(part)) ** 3


def chi_square(counts: torch.Tensor, shares: torch.Tensor) -> float:
    expected = shares.double() * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def uniform_of(noise: torch.Tensor) -> torch.Tensor:
    """Back to the uniform variable: the distribution function of the Gumbel distribution."""
    return torch.exp(-torch.exp(-noise.double()))


def test_extreme_words_give_finite_noise() -> None:
    words = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31), 2**30, 2**31 - 64, 2**31 - 200], dtype=torch.int32)
    noise = gumbel_of_bits(words)
    assert bool(torch.isfinite(noise).all())
    assert float(noise.max()) > 20  # the winning tail has the resolution of 31 bits
    assert float(noise.min()) > -4


def test_words_map_monotonically() -> None:
    words = torch.arange(0, 2**31 - 1, 1_000_003, dtype=torch.int64).to(torch.int32)
    noise = gumbel_of_bits(words)
    assert bool((noise[1:] <= noise[:-1]).all())


@pytest.mark.parametrize("layout", ["many tokens", "many positions", "many seeds"])
def test_moments_and_uniformity(layout: str) -> None:
    num = 200_000
    if layout == "many tokens":
        noise = gumbel([stream_key(5, 17)], torch.arange(num)).flatten()
    elif layout == "many positions":
        noise = gumbel(keys(num), torch.tensor([11])).flatten()
    else:
        noise = gumbel([stream_key(seed, 3) for seed in range(num)], torch.tensor([11])).flatten()
    mean, variance = float(noise.double().mean()), float(noise.double().var())
    assert abs(mean - EULER) < 4 * math.pi / math.sqrt(6 * num)
    assert abs(variance - math.pi**2 / 6) < 4 * math.sqrt(4.4 * (math.pi**2 / 6) ** 2 / num)
    cells = 256
    counts = torch.histc(uniform_of(noise).float(), cells, 0.0, 1.0).double()
    assert chi_square(counts, torch.full((cells,), 1 / cells)) < chi_square_limit(cells - 1)


NEIGHBOURS: dict[str, Callable[[int], tuple[torch.Tensor, torch.Tensor]]] = {
    "positions": lambda n: (
        gumbel(keys(n), torch.tensor([3])),
        gumbel([stream_key(1, position + 1) for position in range(n)], torch.tensor([3])),
    ),
    "tokens": lambda n: (
        gumbel([stream_key(1, 0)], torch.arange(n)),
        gumbel([stream_key(1, 0)], torch.arange(1, n + 1)),
    ),
    "seeds": lambda n: (
        gumbel([stream_key(seed, 9) for seed in range(n)], torch.tensor([3])),
        gumbel([stream_key(seed + 1, 9) for seed in range(n)], torch.tensor([3])),
    ),
    "seed and position exchanged": lambda n: (
        gumbel([stream_key(seed, 9 + seed % 97) for seed in range(n)], torch.tensor([3])),
        gumbel([stream_key(9 + seed % 97, seed) for seed in range(n)], torch.tensor([3])),
    ),
}


@pytest.mark.parametrize("kind", NEIGHBOURS)
def test_neighbours_are_independent(kind: str) -> None:
    num, cells = 100_000, 16
    one, other = (uniform_of(noise).flatten() for noise in NEIGHBOURS[kind](num))
    joint = (one * cells).long().clamp(max=cells - 1) * cells + (other * cells).long().clamp(max=cells - 1)
    counts = torch.bincount(joint, minlength=cells * cells).double()
    assert chi_square(counts, torch.full((cells * cells,), 1 / cells**2)) < chi_square_limit(cells**2 - 1)


def test_keys_of_all_seeds_and_positions_differ() -> None:
    seeds = [0, 1, 2, 17, 2**31, 2**32, 2**62, 2**63 - 1, -1, -(2**63 - 1)]
    made = {stream_key(seed, position) for seed in seeds for position in range(2000)}
    assert len(made) == len(seeds) * 2000
    assert all(0 <= word < 2**32 for key in made for word in key)


@pytest.mark.parametrize("vocabulary", [64, 1000, 49152, 50257])
def test_noise_does_not_depend_on_the_batch(vocabulary: int) -> None:
    batch = [stream_key(seed, 5) for seed in range(9)]
    tokens = torch.arange(vocabulary)
    together = gumbel(batch, tokens)
    some = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(0))[:333]
    for row in (0, 4, 8):
        alone = gumbel([batch[row]], tokens)
        assert torch.equal(alone[0], together[row])
        assert torch.equal(gumbel([batch[row]], some)[0], together[row][some])
        assert torch.equal(gumbel(batch[row:], tokens)[0], together[row])


def test_noise_of_candidates_of_each_row() -> None:
    """[S, C] token ids: the form that truncated sampling uses."""
    batch = keys(4)
    tokens = torch.stack([torch.randperm(5000)[:100] for _ in batch])
    whole = gumbel(batch, torch.arange(5000))
    assert torch.equal(gumbel(batch, tokens), whole.gather(1, tokens))


# --- the draw ---

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.5, -4.0, 0.5, 1.7])
NUM_DRAWS = 200_000


def draw_counts(draw: Callable[[torch.Tensor], torch.Tensor], seed: int = 7) -> torch.Tensor:
    tokens = torch.arange(100, 100 + len(LOGITS))
    chosen = draw(gumbel(keys(NUM_DRAWS, seed), tokens))
    return torch.bincount(chosen, minlength=len(LOGITS)).double()


def is_fair(counts: torch.Tensor) -> bool:
    shares = torch.softmax(LOGITS.double(), -1)
    return chi_square(counts, shares) < chi_square_limit(len(LOGITS) - 1)


@pytest.mark.parametrize("seed", [7, 0, -3, 2**62])
def test_the_largest_of_logits_and_noise_is_a_draw_from_the_softmax(seed: int) -> None:
    assert is_fair(draw_counts(lambda noise: (LOGITS + noise).argmax(-1), seed))


def test_a_rare_token_among_many_comes_as_often_as_it_should() -> None:
    """Its share is 3e-4 beside 300 tokens: the upper tail of the noise decides."""
    rest, share, num = 300, 3e-4, 100_000
    logits = torch.zeros(rest + 1)
    logits[rest] = math.log(rest * share / (1 - share))
    wins = 0
    for block in range(0, num, 5000):
        noise = gumbel([stream_key(1, block + i) for i in range(5000)], torch.arange(rest + 1))
        wins += int(((logits + noise).argmax(-1) == rest).sum())
    assert abs(wins - num * share) < 4 * math.sqrt(num * share)


BIASED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "logits a little too flat": lambda noise: (0.97 * LOGITS + noise).argmax(-1),
    "a token favoured by 4 percent": lambda noise: (LOGITS + torch.eye(8)[0] * 0.04 + noise).argmax(-1),
    "noise a little too small": lambda noise: (LOGITS + 0.97 * noise).argmax(-1),
    "the rarest token never comes": lambda noise: (LOGITS + noise)[:, [0, 1, 2, 3, 4, 6, 7]].argmax(-1),
    "the same noise for all tokens": lambda noise: (LOGITS + noise[:, :1]).argmax(-1),
}


@pytest.mark.parametrize("kind", BIASED)
def test_a_biased_sampler_is_found(kind: str) -> None:
    assert not is_fair(draw_counts(BIASED[kind]))
