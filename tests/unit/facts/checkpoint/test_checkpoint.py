"""Opening good checkpoints: every architecture, both kinds, shards and split files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from firstlight.base.errors import ModelFileError
from firstlight.facts.checkpoint.checkpoint import Checkpoint, open_checkpoint
from support.checkpoints import (
    ARCHITECTURES,
    random_weights,
    tiny_description,
    write_gguf,
    write_hf_folder,
)


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


def test_opening_needs_no_torch(gguf_file: Path, folder: Path) -> None:
    script = (
        "import sys; from firstlight.facts.checkpoint.checkpoint import open_checkpoint\n"
        "for path in sys.argv[1:]: open_checkpoint(path)\n"
        "assert 'torch' not in sys.modules and 'gguf' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script, str(gguf_file), str(folder)], check=True)
