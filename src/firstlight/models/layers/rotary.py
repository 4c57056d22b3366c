"""Rotary position embedding: cos and sin of every position, with the scalings of Llama 3 and of yarn.

Pairs (2i, 2i+1) of a head turn together: `linear.interleave_rows` brings checkpoints of the half-split
convention into this order, exactly.
"""

from __future__ import annotations

import math

import torch

from firstlight.facts.description import ModelDescription, RopeScaling


def turn_table(description: ModelDescription, num_positions: int, device: torch.device) -> torch.Tensor:
    """float32 [positions, D/2, 2]: cos and sin for each position and pair."""
    d = description
    frequencies = rotary_frequencies(d.turned_size, d.rope_theta, d.rope_scaling)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    table = torch.stack((angles.cos(), angles.sin()), -1)
    return (table * d.rope_scaling.turn_factor).to(device)


def rotary_frequencies(size: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """float32 [D/2]: radians that each pair turns by at each position; `size` (D) values of a head turn."""
    frequencies = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    if scaling.kind == "yarn":
        return _yarn(frequencies, theta, scaling)
    return _scaled(frequencies, scaling)


def _scaled(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    if scaling.kind == "factors":
        return frequencies / torch.tensor(scaling.factors)
    assert scaling.kind == "none", f"rope scaling {scaling.kind!r} should have been refused"
    return frequencies


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated.

    Source: the rope_scaling of Meta's Llama 3.1 release, type "llama3".
    """
    original = scaling.original_max_position
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def _yarn(frequencies: torch.Tensor, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Pairs that turn often within the original positions are kept, slow ones stretched by `factor`.

    Source: Peng et al., YaRN (arXiv 2309.00071), and DeepSeek's code, which rounds the bounds to whole pairs.
    """
    num_pairs = len(frequencies)

    def pair_that_turns(times: float) -> float:
        return num_pairs * math.log(scaling.original_max_position / (times * 2 * math.pi)) / math.log(theta)

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    width = high - low or 0.001  # without a distance, a step
    stretched = ((torch.arange(num_pairs, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return frequencies / scaling.factor * stretched + frequencies * (1 - stretched)
