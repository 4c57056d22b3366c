"""Every format against the gguf package, bit for bit, on random blocks."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from firstlight.facts.checkpoint.formats import GGML_TYPE_NAMES, SUPPORTED
from firstlight.quant.registry import BLOCK_FORMATS, FORMATS, NESTED_FORMATS, UNQUANTIZED, dequantize
from firstlight.quant.weight import Weight
from support import nested

# Formats of quantised safetensors are in `test_packings`.
IN_GGUF = [name for name in FORMATS if name in GGML_TYPE_NAMES.values()]
BLOCKS_IN_GGUF = [name for name in BLOCK_FORMATS if name in IN_GGUF]


def random_raw(name: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random bytes as blocks, with finite scales of every size (subnormal ones and zero among them)."""
    random = np.random.default_rng(seed)
    geometry = SUPPORTED[name]
    raw = random.integers(0, 256, (rows, geometry.row_bytes(columns)), dtype=np.uint8)
    if name in NESTED_FORMATS:
        at = 0 if name == "Q4_K" else 208
        end = 4 if name == "Q4_K" else 210
        blocks = raw.reshape(rows, -1, geometry.block_bytes)
        blocks[..., at + 1 : end : 2] &= 0xBF
    elif name in BLOCK_FORMATS:
        num_halves = 2 if name == "Q4_1" else 1
        blocks = raw.reshape(rows, -1, geometry.block_bytes)
        halves = random.integers(0, 1 << 16, (*blocks.shape[:2], num_halves), dtype=np.uint16)
        halves &= np.uint16(0xBFFF)  # clears the top exponent bit: no infinities, no NaN
        blocks[..., : 2 * num_halves] = halves.view(np.uint8)
    elif name != "F32":
        raw.view(np.uint16)[...] &= np.uint16(0xBFFF)
    else:
        raw.view(np.uint32)[...] &= np.uint32(0xBFFFFFFF)
    return raw


def weight_of(name: str, raw: np.ndarray, shape: tuple[int, ...]) -> Weight:
    return Weight(name, shape, torch.from_numpy(raw.copy()))


def test_the_registry_and_the_facts_know_the_same_formats() -> None:
    assert FORMATS.keys() == SUPPORTED.keys()
    for name, weight_format in FORMATS.items():
        assert weight_format.geometry is SUPPORTED[name]


@pytest.mark.parametrize("name", IN_GGUF)
@pytest.mark.parametrize("shape", [(1, 32), (7, 96), (64, 4160)])
def test_dequantize_equals_gguf_bit_for_bit(name: str, shape: tuple[int, int]) -> None:
    if name in NESTED_FORMATS:
        shape = (shape[0], -(-shape[1] // 256) * 256)
    raw = random_raw(name, *shape)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    values = dequantize(weight_of(name, raw, shape))
    assert values.dtype == torch.float32
    assert values.shape == shape
    assert values.is_contiguous()
    assert np.array_equal(values.numpy().view(np.uint32), expected.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("name", IN_GGUF)
def test_vectors(name: str) -> None:
    size = 256 if name in NESTED_FORMATS else 64
    raw = random_raw(name, 1, size)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    values = dequantize(weight_of(name, raw, (size,)))
    assert values.shape == (size,)
    assert np.array_equal(values.numpy(), expected.astype(np.float32).reshape(size))


@pytest.mark.parametrize("name", BLOCKS_IN_GGUF)
def test_affine_is_exact(name: str) -> None:
    raw = random_raw(name, 5, 128, seed=1)
    weight = weight_of(name, raw, (5, 128))
    affine = BLOCK_FORMATS[name].affine(weight)
    assert affine.codes.shape == (5, 128)
    assert affine.codes.dtype == (torch.int8 if name == "Q8_0" else torch.uint8)
    assert affine.scale.shape == affine.offset.shape == (5, 4)
    values = affine.codes.float().view(5, 4, 32) * affine.scale[..., None] + affine.offset[..., None]
    assert torch.equal(values.view(5, 128), dequantize(weight))


@pytest.mark.parametrize("name", BLOCKS_IN_GGUF)
def test_affine_codes_use_their_whole_range(name: str) -> None:
    codes = BLOCK_FORMATS[name].affine(weight_of(name, random_raw(name, 64, 320), (64, 320))).codes
    expected = (-128, 127) if name == "Q8_0" else (0, 15)
    assert (int(codes.min()), int(codes.max())) == expected


@pytest.mark.parametrize("name", NESTED_FORMATS)
def test_nested_is_exact(name: str) -> None:
    weight = weight_of(name, random_raw(name, 5, 512, seed=1), (5, 512))
    parts = NESTED_FORMATS[name].nested(weight)
    assert parts.codes.shape == (5, 512)
    assert parts.scale.shape == (5, 2)
    assert (int(parts.codes.min()), int(parts.codes.max())) == ((0, 15) if name == "Q4_K" else (-32, 31))
    each = parts.sub_scales.shape[1] // 2
    scale = parts.scale.repeat_interleave(each, 1) * parts.sub_scales
    values = parts.codes.view(5, 2 * each, -1).float() * scale[..., None]
    if parts.sub_minima is not None and parts.minimum_scale is not None:
        values -= (parts.minimum_scale.repeat_interleave(each, 1) * parts.sub_minima)[..., None]
    assert torch.equal(values.view(5, 512), dequantize(weight))


@pytest.mark.parametrize("name", NESTED_FORMATS)
def test_the_blocks_that_tests_make_are_near_their_values(name: str) -> None:
    values = np.random.default_rng(0).standard_normal((4, 512), np.float32)
    read = dequantize(weight_of(name, nested.quantize(values, name), (4, 512))).numpy()
    assert float(np.abs(read - values).max()) < (0.35 if name == "Q4_K" else 0.1)


@pytest.mark.parametrize("name", UNQUANTIZED)
def test_views_share_memory_and_copies_do_not(name: str) -> None:
    weight = weight_of(name, random_raw(name, 2, 4), (2, 4))
    view = UNQUANTIZED[name].view(weight)
    assert view.data_ptr() == weight.raw.data_ptr()
    assert view.shape == (2, 4)
    assert dequantize(weight).data_ptr() != weight.raw.data_ptr()


def test_sizes() -> None:
    weight = weight_of("Q4_1", random_raw("Q4_1", 3, 64), (3, 64))
    assert (weight.nbytes, weight.num_values) == (3 * 40, 3 * 64)
