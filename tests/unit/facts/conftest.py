"""Small checkpoints on disk, shared by the tests of this room."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.checkpoints import (
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
