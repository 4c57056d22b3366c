"""Opening bad checkpoints: every one is one clear error that names the file."""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType

from firstlight.base.errors import FirstlightError, ModelFileError, UnsupportedError
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from support.checkpoints import (
    random_weights,
    tiny_description,
    write_gguf,
)


def expect(path: Path, kind: type[FirstlightError], message: str) -> FirstlightError:
    with pytest.raises(kind, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value), "the message names the file"
    return caught.value


def test_missing_file(tmp_path: Path) -> None:
    expect(tmp_path / "nothing.gguf", ModelFileError, "does not exist")


def test_empty_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    expect(tmp_path / "m.gguf", ModelFileError, "is empty")


@pytest.mark.parametrize(
    "content", [b"hello", b"\x00" * 100, b"#!/bin/sh\n", b"GGU", b"\x7fELF" + bytes(100)]
)
def test_not_a_model(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.txt").write_bytes(content)
    expect(tmp_path / "m.txt", ModelFileError, "is not a model")


def test_a_device_is_not_a_model() -> None:
    expect(Path("/dev/null"), ModelFileError, "neither a file nor a folder")


def test_git_lfs_pointers(tmp_path: Path, folder: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    (tmp_path / "m.gguf").write_bytes(pointer)
    expect(tmp_path / "m.gguf", ModelFileError, "Git LFS pointer")
    (folder / "model.safetensors").write_bytes(pointer)
    expect(folder, ModelFileError, "Git LFS pointer")
    (folder / "config.json").write_bytes(pointer)
    expect(folder, ModelFileError, "Git LFS pointer")


def test_pickles_are_refused_and_never_opened(tmp_path: Path, folder: Path) -> None:
    class Bomb:
        def __reduce__(self) -> object:
            return (os.mkdir, (str(tmp_path / "ran"),))

    for name in ("pytorch_model.bin", "model.pt", "no_suffix", "model.safetensors.txt"):
        path = tmp_path / name
        path.write_bytes(pickle.dumps(Bomb()))
        expect(path, ModelFileError, "pickle.*runs whatever code")
    torch.save({"weight": torch.zeros(2)}, tmp_path / "zipped")
    expect(tmp_path / "zipped", ModelFileError, "pickle")
    (folder / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").rename(folder / "pytorch_model.bin")
    expect(folder, ModelFileError, "pickle")
    (folder / "config.json").unlink()
    expect(folder, ModelFileError, "pickle")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin",
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model.bin.index.json",
        "x.pt",
        "x.pth",
    ],
)
@pytest.mark.parametrize("config", ["{}", '{"model_type": "llama"}', "not JSON", None])
def test_a_folder_with_pickles_only_is_refused_for_that(
    tmp_path: Path, name: str, config: str | None
) -> None:
    """Whatever else is wrong with it: to complete config.json would not help."""
    (tmp_path / name).write_bytes(pickle.dumps({}))
    (tmp_path / "training_args.bin").write_bytes(pickle.dumps({}))
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    expect(tmp_path, ModelFileError, f"{re.escape(name)} is a pickle checkpoint.*refused")


def test_what_a_training_leaves_beside_the_weights_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "training_args.bin").write_bytes(pickle.dumps({}))
    (tmp_path / "config.json").write_text("{}")
    expect(tmp_path, ModelFileError, "model_type is missing")


def test_one_safetensors_file_asks_for_its_folder(folder: Path) -> None:
    error = expect(folder / "model.safetensors", ModelFileError, "one safetensors file")
    assert str(folder) in error.hint


def test_a_folder_without_config(tmp_path: Path, gguf_file: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    expect(empty, ModelFileError, "no config.json")
    error = expect(gguf_file.parent, ModelFileError, "holds GGUF files")
    assert str(gguf_file) in error.hint


@pytest.mark.parametrize("text", ["", "{", "[1]", "nul", '{"a": ' * 100_000, "\ud800"])
def test_damaged_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    expect(folder, ModelFileError, r"config\.json")


def test_missing_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    expect(sharded, ModelFileError, "1 of 3 shards are missing: model-00002-of-00003")


def test_missing_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    expect(sharded, ModelFileError, "3 safetensors files .* but no model.safetensors.index.json")
    for number in (2, 3):
        (sharded / f"model-0000{number}-of-00003.safetensors").unlink()
    expect(sharded, ModelFileError, "no model.safetensors.index.json")


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    expect(folder, ModelFileError, "no safetensors files")


@pytest.mark.parametrize(
    "shard", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", 5, "x.bin", None]
)
def test_an_index_cannot_leave_its_folder(sharded: Path, shard: object) -> None:
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    expect(sharded, ModelFileError, "is not the name of a shard")


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {}}])
def test_an_empty_index(sharded: Path, index: object) -> None:
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    expect(sharded, ModelFileError, "weight_map")


def test_a_tensor_missing_from_its_shard(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra"] = "model-00001-of-00003.safetensors"
    path.write_text(json.dumps(index))
    expect(sharded, ModelFileError, "model.extra is missing")


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    first, second = (sharded / f"model-0000{number}-of-00003.safetensors" for number in (1, 2))
    first.write_bytes(second.read_bytes())
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    kept = {name: shard for name, shard in index["weight_map"].items() if shard != first.name}
    name = next(name for name, shard in kept.items() if shard == second.name)
    path.write_text(json.dumps({"weight_map": kept | {name: first.name}}))
    expect(sharded, ModelFileError, "is also in")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32, torch.float64])
def test_unsupported_safetensors_types(folder: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import save_file

    save_file({"model.norm.weight": torch.zeros(64).to(dtype)}, folder / "model.safetensors")
    expect(folder, UnsupportedError, "model.norm.weight has the type")


def test_an_ignorable_tensor_may_have_any_type(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8, dtype=torch.float64)
    save_file(tensors, folder / "model.safetensors")
    assert "inv_freq" not in "".join(open_checkpoint(folder).tensors)


@pytest.mark.parametrize("kept", [0.0001, 0.3, 0.9, 0.999])
def test_truncated_files(folder: Path, gguf_file: Path, kept: float) -> None:
    for path, target in ((folder / "model.safetensors", folder), (gguf_file, gguf_file)):
        content = path.read_bytes()
        path.write_bytes(content[: max(4, int(len(content) * kept))])
        expect(target, ModelFileError, "truncated|ends|past the end")


def test_unsupported_gguf_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    error = expect(tmp_path / "m.gguf", UnsupportedError, "'mamba'")
    assert "qwen3" in error.hint


@pytest.mark.parametrize("kind", [GgmlType.Q5_0, GgmlType.Q5_1])
def test_unsupported_gguf_formats(tmp_path: Path, kind: GgmlType) -> None:
    description = tiny_description(hidden_size=256)
    path = write_gguf(
        tmp_path / "m.gguf",
        description,
        random_weights(description),
        format_of=lambda name: kind if name.endswith("0.mlp.up_proj.weight") else GgmlType.F32,
    )
    error = expect(path, UnsupportedError, rf"blk\.0\.ffn_up\.weight is stored as {kind.name}")
    assert "Q4_1" in error.hint


def test_an_unknown_gguf_tensor(tmp_path: Path) -> None:
    description = tiny_description()
    path = write_gguf(
        tmp_path / "m.gguf",
        description,
        random_weights(description),
        edit=lambda writer: writer.add_tensor("blk.0.ffn_gate_inp.weight", np.zeros((4, 64), np.float32)),
    )
    expect(path, UnsupportedError, "blk.0.ffn_gate_inp.weight")


def test_gguf_tensors_that_share_bytes(gguf_file: Path) -> None:
    content = bytearray(gguf_file.read_bytes())
    name = b"blk.0.attn_v.weight"
    place = content.index(name) + len(name) + 4 + 2 * 8 + 4  # dimensions, their sizes, the type
    (offset,) = struct.unpack_from("<Q", content, place)
    struct.pack_into("<Q", content, place, offset - 32)
    gguf_file.write_bytes(content)
    expect(gguf_file, ModelFileError, "share bytes")
