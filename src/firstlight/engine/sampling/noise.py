"""Gumbel noise as a function of (seed, position, token id): the source of all randomness in sampling.

Adding this noise to log-probabilities and taking the largest is a draw from the distribution (Gumbel-max).
Because the noise depends on nothing else, a seeded request gives the same tokens in any batch, after any
preemption, and with or without speculation.
"""

from __future__ import annotations

import torch

_MASK_64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
# Multipliers of the 32-bit finaliser "lowbias32" (Chris Wellons, "Prospecting for hash functions", 2018).
_MULTIPLY_1, _MULTIPLY_2 = 0x7FEB352D, 0x846CA68B


def stream_key(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit keys for one position of a seeded sequence (SplitMix64 over seed and position)."""
    state = _split_mix(_split_mix(seed & _MASK_64) ^ (position * _GOLDEN & _MASK_64))
    return state & 0xFFFFFFFF, state >> 32


def gumbel(keys: list[tuple[int, int]], token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32 [S, C], for S keys and the token ids [C] or [S, C]."""
    device = token_ids.device
    low, high = torch.tensor([[_signed(word) for word in key] for key in keys], dtype=torch.int32).unbind(1)
    bits = _mix(token_ids.to(torch.int32) ^ low.to(device)[:, None])
    return gumbel_of_bits(_mix(bits ^ high.to(device)[:, None]))


def gumbel_of_bits(bits: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel values of uniform 32-bit words (int32; the sign bit is not used); always finite."""
    uniform = (bits & 0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31)
    # The exponential variable is made from 1 - uniform: so its small values, which win, have all 31 bits.
    # Rounding may have made a 1, which would be an infinite exponential.
    exponential = uniform.clamp_(max=1.0 - 2.0**-24).neg_().log1p_().neg_()
    return exponential.log_().neg_()


def _mix(x: torch.Tensor) -> torch.Tensor:
    # int32 products wrap, and the mask makes the arithmetic shift a logical one.
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * _signed(_MULTIPLY_1)
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _signed(_MULTIPLY_2)
    return x ^ ((x >> 16) & 0xFFFF)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def _split_mix(state: int) -> int:
    state = (state + _GOLDEN) & _MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return state ^ (state >> 31)
