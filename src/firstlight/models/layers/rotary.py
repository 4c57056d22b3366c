"""Rotary position embedding: cos and sin of every position, with the scaling of the Llama 3 family.

Built once by a model; the runner picks the rows of a step's positions. Pairs (2i, 2i+1) of a head turn
together: `linear.interleave_rows` brings checkpoints of the half-split convention into this order, exactly.
"""

from __future__ import annotations

import math

import torch

from firstlight.facts.description import ModelDescription, RopeScaling


def turn_table(description: ModelDescription, num_positions: int, device: torch.device) -> torch.Tensor:
    """float32 [positions, D/2, 2]: cos and sin for each position and pair."""
    d = description
    frequencies = rotary_frequencies(d.head_size, d.rope_theta, d.rope_scaling)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.stack((angles.cos(), angles.sin()), -1).to(device)


def rotary_frequencies(head_size: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """float32 [D/2]: radians that each pair turns by at each position."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
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
