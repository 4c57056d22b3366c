"""Opening checkpoints: good ones of every architecture, and every bad input with its own clear error."""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.base.errors import FirstlightError, ModelFileError, UnsupportedError
from firstlight.facts.checkpoint import Checkpoint, open_checkpoint
from firstlight.facts.hf_config import describe_hf
from firstlight.facts.hf_config_writer import hf_config
from support.checkpoints import (
    ARCHITECTURES,
    mixed_formats,
    random_weights,
    tiny_description,
    write_gguf,
    write_hf_folder,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    description = tiny_description()
    return write_hf_folder(tmp_path / "model", description, random_weights(description))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    description = tiny_description()
    return write_hf_folder(tmp_path / "sharded", description, random_weights(description), num_shards=3)


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    description = tiny_description(tie_embeddings=True)
    return write_gguf(tmp_path / "m.gguf", description, random_weights(description), format_of=mixed_formats)


def bytes_of(checkpoint: Checkpoint, name: str) -> bytes:
    facts = checkpoint.tensors[name]
    with open(facts.path, "rb") as file:
        return os.pread(file.fileno(), facts.nbytes, facts.offset)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_tells_its_description(tmp_path: Path, architecture: str, tied: bool) -> None:
    description = tiny_description(architecture, tie_embeddings=tied)
    path = write_gguf(tmp_path / "m.gguf", description, random_weights(description))
    checkpoint = open_checkpoint(path)
    assert checkpoint.kind == "gguf"
    assert checkpoint.description == description
    assert checkpoint.tensors.keys() == random_weights(description).keys()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_tells_its_description(tmp_path: Path, architecture: str, tied: bool) -> None:
    description = tiny_description(architecture, tie_embeddings=tied)
    folder = write_hf_folder(tmp_path / "m", description, random_weights(description), dtype="BF16")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.kind == "safetensors"
    assert checkpoint.description == description
    assert checkpoint.formats.keys() == {"BF16"}


def test_tensor_facts_point_at_the_bytes_of_a_gguf_file(gguf_file: Path) -> None:
    checkpoint = open_checkpoint(gguf_file)
    for tensor in gguf.GGUFReader(gguf_file).tensors:
        facts = next(f for f in checkpoint.tensors.values() if f.offset == tensor.data_offset)
        assert facts.nbytes == tensor.n_bytes
        assert facts.format == tensor.tensor_type.name
        assert list(facts.shape) == tensor.shape.tolist()[::-1]
    assert checkpoint.total_bytes == sum(int(t.n_bytes) for t in gguf.GGUFReader(gguf_file).tensors)
    permuted = {name for name, facts in checkpoint.tensors.items() if facts.rope_permuted}
    assert permuted == {n for n in checkpoint.tensors if "q_proj" in n or "k_proj" in n}


def test_only_llama_gguf_files_have_interleaved_heads(tmp_path: Path) -> None:
    description = tiny_description("qwen2")
    path = write_gguf(tmp_path / "m.gguf", description, random_weights(description))
    assert not any(facts.rope_permuted for facts in open_checkpoint(path).tensors.values())


def test_shards_are_joined(sharded: Path) -> None:
    weights = random_weights(tiny_description())
    checkpoint = open_checkpoint(sharded)
    assert checkpoint.tensors.keys() == weights.keys()
    assert len({facts.path for facts in checkpoint.tensors.values()}) == 3
    for name, values in weights.items():
        assert bytes_of(checkpoint, name) == values.tobytes()


def test_split_gguf_files_are_joined(tmp_path: Path) -> None:
    description = tiny_description()
    weights = random_weights(description)
    paths = [tmp_path / f"m-{number:05d}-of-00002.gguf" for number in (1, 2)]
    for number, path in enumerate(paths):
        part = {name: weights[name] for name in list(weights)[number::2]}
        write_gguf(path, description, part, edit=lambda writer: writer.add_uint16("split.count", 2))
    checkpoint = open_checkpoint(paths[0])
    assert checkpoint.tensors.keys() == weights.keys()
    with pytest.raises(ModelFileError, match="not the first"):
        open_checkpoint(paths[1])
    paths[1].unlink()
    with pytest.raises(ModelFileError, match="00002-of-00002.gguf is missing"):
        open_checkpoint(paths[0])
    paths[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelFileError, match="does not say which"):
        open_checkpoint(tmp_path / "renamed.gguf")


def test_generation_defaults(folder: Path, tmp_path: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [5, 2]}')
    checkpoint = open_checkpoint(folder)
    assert checkpoint.generation_defaults["temperature"] == 0.6
    assert checkpoint.description.eos_token_ids == (5, 2)
    description = tiny_description()
    path = write_gguf(
        tmp_path / "m.gguf",
        description,
        random_weights(description),
        edit=lambda writer: writer.add_float32("general.sampling.temp", 0.7),
    )
    assert open_checkpoint(path).generation_defaults == {"temperature": 0.7}


# Bad input


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


def test_opening_needs_no_torch(gguf_file: Path, folder: Path) -> None:
    script = (
        "import sys; from firstlight.facts.checkpoint import open_checkpoint\n"
        "for path in sys.argv[1:]: open_checkpoint(path)\n"
        "assert 'torch' not in sys.modules and 'gguf' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script, str(gguf_file), str(folder)], check=True)


# Random damage


@pytest.fixture(scope="module")
def intact_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    description = tiny_description("qwen3", num_layers=1)
    path = tmp_path_factory.mktemp("damage") / "m.gguf"
    return write_gguf(path, description, random_weights(description), format_of=mixed_formats)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_damaged_gguf_header_opens_or_is_one_clear_error(intact_gguf: Path, data: st.DataObject) -> None:
    content = bytearray(intact_gguf.read_bytes())
    end = content.index(b"output_norm.weight") + 60
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(4, end))] = data.draw(st.integers(0, 255))
    path = intact_gguf.with_name("damaged.gguf")
    path.write_bytes(content)
    try:
        checkpoint = open_checkpoint(path)
    except FirstlightError:
        return
    assert all(facts.offset + facts.nbytes <= len(content) for facts in checkpoint.tensors.values())


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(architecture=st.sampled_from(ARCHITECTURES), data=st.data())
def test_any_value_in_any_field_of_a_config_is_handled(architecture: str, data: st.DataObject) -> None:
    config = hf_config(tiny_description(architecture), "float32")
    names = [
        *config,
        "rope_parameters",
        "quantization_config",
        "layer_types",
        "use_sliding_window",
        "num_experts",
    ]
    config[data.draw(st.sampled_from(names))] = data.draw(anything)
    rope = {
        name: data.draw(anything) for name in data.draw(st.sets(st.sampled_from(ROPE_FIELDS), max_size=3))
    }
    try:
        description = describe_hf(config | ({"rope_scaling": rope} if rope else {}), {"eos_token_id": 2})
    except FirstlightError:
        return
    assert description.num_heads % description.num_kv_heads == 0


ROPE_FIELDS = ("rope_type", "type", "factor", "rope_theta", "low_freq_factor", "partial_rotary_factor")
