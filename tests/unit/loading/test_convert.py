"""Conversion without transformers: exact values, small files, all or nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from firstlight.base.errors import ModelFileError, ResourceError, UnsupportedError, UsageError
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.loading import convert, new_folder
from firstlight.loading.convert import convert_gguf
from firstlight.loading.plan import Wanted
from firstlight.loading.reader import read_tensors
from firstlight.quant.registry import dequantize
from support.checkpoints import (
    ARCHITECTURES,
    mixed_formats,
    random_weights,
    tiny_description,
    write_gguf,
    write_hf_folder,
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    description = tiny_description(tie_embeddings=True)
    return write_gguf(tmp_path / "m.gguf", description, random_weights(description), format_of=mixed_formats)


def values_of(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(path)
    wanted = [Wanted.whole(tensor.name, tensor.shape) for tensor in checkpoint.tensors.values()]
    values: dict[str, torch.Tensor] = {}
    read_tensors(checkpoint, wanted, lambda item, weight: values.update({item.name: dequantize(weight)}))
    return values


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_folder_opens_as_the_same_model(tmp_path: Path, architecture: str) -> None:
    description = tiny_description(architecture, tie_embeddings=True)
    path = write_gguf(tmp_path / "m.gguf", description, random_weights(description), format_of=mixed_formats)
    report = convert_gguf(path, tmp_path / "out", "{}", dtype="f32")
    checkpoint = open_checkpoint(report.folder)
    assert checkpoint.description == description
    assert checkpoint.total_bytes == report.weight_bytes
    before, after = values_of(path), values_of(report.folder)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], values) for name, values in before.items())


@pytest.mark.parametrize(("dtype", "torch_type"), convert.DTYPES.items())
def test_types(tmp_path: Path, source: Path, dtype: str, torch_type: torch.dtype) -> None:
    convert_gguf(source, tmp_path / "out", "{}", dtype=dtype)
    expected = values_of(source)
    for name, values in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(values, expected[name].to(torch_type))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert f"torch.{config['torch_dtype']}" == str(torch_type)


def test_small_files(tmp_path: Path, source: Path) -> None:
    report = convert_gguf(source, tmp_path / "out", '{"tokenizer": "x"}')
    names = {path.name for path in report.folder.iterdir()}
    assert names == set(report.files)
    assert (report.folder / "tokenizer.json").read_text() == '{"tokenizer": "x"}'
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert (report.folder / "chat_template.jinja").read_text() == template
    assert json.loads((report.folder / "tokenizer_config.json").read_text()) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 256,
        "clean_up_tokenization_spaces": False,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": template,
    }
    generation = json.loads((report.folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def test_large_models_are_sharded(tmp_path: Path, source: Path) -> None:
    report = convert_gguf(source, tmp_path / "out", "{}", max_shard_bytes=20_000)
    assert "model.safetensors.index.json" in report.files
    assert len([name for name in report.files if "-of-" in name]) > 2
    assert values_of(report.folder).keys() == values_of(source).keys()


def test_progress(tmp_path: Path, source: Path) -> None:
    seen: list[tuple[int, int]] = []
    convert_gguf(source, tmp_path / "out", "{}", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == open_checkpoint(source).total_bytes


def test_an_existing_target_is_left_alone(tmp_path: Path, source: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="exists already"):
        convert_gguf(source, tmp_path / "out", "{}")
    assert list((tmp_path / "out").iterdir()) == []


def test_other_sources_and_types_are_refused(tmp_path: Path, source: Path) -> None:
    description = tiny_description()
    folder = write_hf_folder(tmp_path / "hf", description, random_weights(description))
    with pytest.raises(UsageError, match="is a Hugging Face folder already"):
        convert_gguf(folder, tmp_path / "out", "{}")
    with pytest.raises(UsageError, match="'q4' is unknown"):
        convert_gguf(source, tmp_path / "out", "{}", dtype="q4")


def test_nothing_is_left_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    description = tiny_description()
    weights = random_weights(description)
    path = write_gguf(tmp_path / "m.gguf", description, weights)
    last = max(open_checkpoint(path).tensors.values(), key=lambda facts: facts.offset)
    real = convert.make_plan

    def truncating(*arguments: object) -> object:
        with path.open("r+b") as file:
            file.truncate(last.offset + 1)
        return real(*arguments)

    monkeypatch.setattr(convert, "make_plan", truncating)
    with pytest.raises(ModelFileError, match="ended at byte"):
        convert_gguf(path, tmp_path / "out", "{}")
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.gguf"]


def test_values_too_large_for_f16(tmp_path: Path) -> None:
    description = tiny_description()
    weights = random_weights(description)
    weights["model.norm.weight"] = np.full(64, 1e6, dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", description, weights)
    with pytest.raises(UnsupportedError, match=r"model\.norm\.weight are too large"):
        convert_gguf(path, tmp_path / "out", "{}", dtype="f16")
    convert_gguf(path, tmp_path / "out", "{}", dtype="bf16")


def test_a_full_disk_is_noticed_before_writing(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_folder, "DISK_RESERVE_BYTES", 1 << 60)
    with pytest.raises(ResourceError, match="the converted model needs"):
        convert_gguf(source, tmp_path / "deep" / "out", "{}")
    assert not (tmp_path / "deep").exists()
