"""Reading: every byte to its tensor, once, in file order; slices join to the whole; files that change."""

from __future__ import annotations

import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType

from firstlight.base.errors import ModelFileError
from firstlight.facts.checkpoint.checkpoint import Checkpoint, open_checkpoint
from firstlight.loading import reader
from firstlight.loading.plan import Wanted, split_evenly
from firstlight.loading.reader import read_tensors
from firstlight.quant.registry import dequantize
from firstlight.quant.weight import Weight
from support.checkpoints import (
    ARCHITECTURES,
    Weights,
    mixed_formats,
    quantise,
    random_weights,
    tiny_description,
    write_gguf,
    write_hf_folder,
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def whole(checkpoint: Checkpoint) -> list[Wanted]:
    return [Wanted.whole(tensor.name, tensor.shape) for tensor in checkpoint.tensors.values()]


def read(checkpoint: Checkpoint, wanted: list[Wanted] | None = None) -> dict[str, Weight]:
    weights: dict[str, Weight] = {}

    def deliver(item: Wanted, weight: Weight) -> None:
        assert item.name not in weights
        assert weight.shape == item.slice_shape
        assert weight.raw.is_contiguous()
        weights[item.name] = weight

    read_tensors(checkpoint, whole(checkpoint) if wanted is None else wanted, deliver)
    return weights


def as_stored(values: np.ndarray, kind: GgmlType) -> np.ndarray:
    """Values after a round trip through a format of the gguf package."""
    return gguf.quants.dequantize(quantise(values, kind), kind).astype(np.float32)


def assert_equal(found: dict[str, Weight], expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(dequantize(found[name]).numpy(), values), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gguf_weights_come_back_in_hugging_face_order(tmp_path: Path, architecture: str) -> None:
    bias = {"attention_bias": True, "output_bias": True} if architecture == "llama" else {}
    description = tiny_description(architecture, **bias)
    weights = random_weights(description)
    path = write_gguf(tmp_path / "m.gguf", description, weights, format_of=mixed_formats)
    expected = {name: as_stored(values, mixed_formats(name)) for name, values in weights.items()}
    assert_equal(read(open_checkpoint(path)), expected)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_every_gguf_format(tmp_path: Path, kind: str) -> None:
    description = tiny_description()
    weights = random_weights(description)

    def format_of(name: str) -> GgmlType:
        return GgmlType[kind] if weights[name].ndim == 2 else GgmlType.F32

    path = write_gguf(tmp_path / "m.gguf", description, weights, format_of=format_of)
    expected = {name: as_stored(values, format_of(name)) for name, values in weights.items()}
    assert_equal(read(open_checkpoint(path)), expected)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("num_shards", [1, 4])
def test_folders(tmp_path: Path, dtype: str, num_shards: int) -> None:
    description = tiny_description("qwen3")
    weights = random_weights(description)
    folder = write_hf_folder(tmp_path / "m", description, weights, dtype=dtype, num_shards=num_shards)
    expected = {name: as_stored(values, GgmlType[dtype]) for name, values in weights.items()}
    assert_equal(read(open_checkpoint(folder)), expected)


def test_uneven_slices_of_all_ranks_join_to_the_whole(tmp_path: Path) -> None:
    description = tiny_description(num_heads=6, num_kv_heads=3, head_size=32, attention_bias=True)
    path = write_gguf(tmp_path / "m.gguf", description, random_weights(description), format_of=mixed_formats)
    checkpoint = open_checkpoint(path)
    full = {name: dequantize(weight) for name, weight in read(checkpoint).items()}
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in full}
    for rank in range(2):
        wanted = [_share(name, tuple(values.shape), rank) for name, values in full.items()]
        for name, weight in read(checkpoint, wanted).items():
            parts[name].append(dequantize(weight))
    for name, values in full.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            assert torch.equal(torch.cat(parts[name], dim=1), values), name
        elif "proj" in name:
            assert torch.equal(torch.cat(parts[name]), values), name
    assert parts["model.layers.0.self_attn.k_proj.weight"][0].shape == (64, 64)
    assert parts["model.layers.0.self_attn.k_proj.weight"][1].shape == (32, 64)


def _share(name: str, shape: tuple[int, ...], rank: int) -> Wanted:
    if "q_proj" in name:
        return Wanted.row_slice(name, shape, *split_evenly(shape[0], 64, rank, 2))
    if "k_proj" in name or "v_proj" in name:
        return Wanted.row_slice(name, shape, *split_evenly(shape[0], 32, rank, 2))
    if "o_proj" in name:
        return Wanted.column_slice(name, shape, *split_evenly(shape[1], 64, rank, 2))
    if "down_proj" in name:
        return Wanted.column_slice(name, shape, *split_evenly(shape[1], 32, rank, 2))
    if "gate_proj" in name or "up_proj" in name:
        return Wanted.row_slice(name, shape, *split_evenly(shape[0], 32, rank, 2))
    return Wanted.whole(name, shape)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    description = tiny_description()
    path = write_gguf(tmp_path / "m.gguf", description, random_weights(description), format_of=mixed_formats)
    return open_checkpoint(path)


@pytest.mark.parametrize(
    ("batch_bytes", "read_bytes", "gap_bytes", "buffers"),
    [
        (1, 1 << 20, 0, 512),
        (4096, 100, 64, 512),
        (1 << 20, 777, 1 << 16, 6),
        (1 << 20, 1 << 20, 1 << 16, 512),
    ],
)
def test_sizes_of_reads_change_nothing(
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    batch_bytes: int,
    read_bytes: int,
    gap_bytes: int,
    buffers: int,
) -> None:
    expected = {name: dequantize(weight) for name, weight in read(checkpoint).items()}
    monkeypatch.setattr(reader, "BATCH_BYTES", batch_bytes)
    monkeypatch.setattr(reader, "READ_BYTES", read_bytes)
    monkeypatch.setattr(reader, "MAX_GAP_BYTES", gap_bytes)
    monkeypatch.setattr(reader, "MAX_BUFFERS", buffers)
    for name, weight in read(checkpoint).items():
        assert torch.equal(dequantize(weight), expected[name])


def test_short_reads_are_continued(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {name: dequantize(weight) for name, weight in read(checkpoint).items()}
    real = reader.os.preadv

    def stingy(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return real(descriptor, [buffers[0][:13]], offset)

    monkeypatch.setattr(reader.os, "preadv", stingy)
    for name, weight in read(checkpoint).items():
        assert torch.equal(dequantize(weight), expected[name])


def test_progress_and_report_count_bytes(checkpoint: Checkpoint) -> None:
    seen: list[tuple[int, int]] = []
    delivered: list[str] = []

    def progress(done: int, total: int) -> None:
        assert len(delivered) == len(seen), "the first call comes before any read; then bytes were delivered"
        seen.append((done, total))

    report = read_tensors(
        checkpoint, whole(checkpoint), lambda item, _: delivered.append(item.name), progress
    )
    assert seen[0] == (0, checkpoint.total_bytes)
    assert seen[-1] == (checkpoint.total_bytes, checkpoint.total_bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert report.resident_bytes == report.read_bytes == checkpoint.total_bytes
    assert report.num_tensors == len(checkpoint.tensors)
    assert report.unused == ()


def test_each_byte_is_read_once_and_other_ranks_rows_not_at_all(tmp_path: Path) -> None:
    description = tiny_description(vocab_size=8192)
    folder = write_hf_folder(tmp_path / "m", description, random_weights(description))
    checkpoint = open_checkpoint(folder)
    wanted = [
        Wanted.row_slice(item.name, item.shape, 0, 4096) if item.shape[0] == 8192 else item
        for item in whole(checkpoint)
    ]
    report = read_tensors(checkpoint, wanted, lambda *_: None)
    assert report.read_bytes == report.resident_bytes == checkpoint.total_bytes - 2 * 4096 * 64 * 4


def test_delivery_is_in_file_order_on_the_calling_thread(checkpoint: Checkpoint) -> None:
    offsets: list[int] = []

    def deliver(item: Wanted, _: Weight) -> None:
        assert threading.current_thread() is threading.main_thread()
        offsets.append(checkpoint.tensors[item.name].offset)

    read_tensors(checkpoint, whole(checkpoint)[::-1], deliver)
    assert offsets == sorted(offsets)


def test_reading_goes_on_while_the_consumer_works(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "BATCH_BYTES", 1)
    second_batch_read = threading.Event()
    real, calls = reader.os.preadv, []

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) == 2:
            second_batch_read.set()
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(reader.os, "preadv", counting)
    read_tensors(checkpoint, whole(checkpoint), lambda *_: _require(second_batch_read.wait(timeout=10)))


def test_memory_of_reading_ahead_is_bounded(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "BATCH_BYTES", 1)
    real, num_read, num_delivered = reader.os.preadv, [0], [0]

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        num_read[0] += 1
        assert num_read[0] - num_delivered[0] <= reader.BATCHES_AHEAD + 1
        return real(descriptor, buffers, offset)

    def deliver(*_: object) -> None:
        num_delivered[0] += 1

    monkeypatch.setattr(reader.os, "preadv", counting)
    read_tensors(checkpoint, whole(checkpoint), deliver)


def _require(condition: bool) -> None:
    assert condition


def test_an_error_of_the_consumer_passes_through_and_ends_the_thread(checkpoint: Checkpoint) -> None:
    def deliver(*_: object) -> None:
        raise RuntimeError("the consumer failed")

    with pytest.raises(RuntimeError, match="the consumer failed"):
        read_tensors(checkpoint, whole(checkpoint), deliver)
    assert not any(thread.name == "firstlight-reader" for thread in threading.enumerate())


def test_a_file_that_shrank_since_it_was_opened(checkpoint: Checkpoint) -> None:
    path = Path(checkpoint.path)
    last = max(checkpoint.tensors.values(), key=lambda facts: facts.offset)
    with path.open("r+b") as file:
        file.truncate(last.offset + 1)
    delivered: list[str] = []
    with pytest.raises(
        ModelFileError, match=rf"m\.gguf ended at byte .* while the tensor {last.name} was read"
    ):
        read_tensors(checkpoint, whole(checkpoint), lambda item, _: delivered.append(item.name))
    assert last.name not in delivered


def test_a_file_that_vanished_since_it_was_opened(checkpoint: Checkpoint) -> None:
    Path(checkpoint.path).unlink()
    with pytest.raises(ModelFileError, match=r"m\.gguf cannot be read: No such file"):
        read_tensors(checkpoint, whole(checkpoint), lambda *_: None)


def test_a_bad_plan_reads_nothing(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader.os, "preadv", None)
    with pytest.raises(ModelFileError, match="is missing"):
        read_tensors(checkpoint, [*whole(checkpoint), Wanted.whole("nothing", (1,))], lambda *_: None)
