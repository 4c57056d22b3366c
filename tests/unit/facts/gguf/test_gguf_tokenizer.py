"""Special tokens and the template of a GGUF file, and files that lack them."""

from __future__ import annotations

from pathlib import Path

import pytest

from firstlight.base.errors import ModelFileError
from firstlight.facts.gguf.gguf_header import GgufFile, read_gguf
from firstlight.facts.gguf.gguf_tokenizer import chat_template, pad_token_id, tokenizer_config
from support.checkpoints import random_weights, tiny_description, write_gguf


def read_without(tmp_path: Path, *keys: str) -> GgufFile:
    description = tiny_description()
    path = write_gguf(
        tmp_path / "m.gguf",
        description,
        random_weights(description),
        edit=lambda writer: [writer.kv_data[0].pop(key) for key in keys],
    )
    return read_gguf(path)


def test_special_tokens_and_template(tmp_path: Path) -> None:
    file = read_without(tmp_path)
    config = tokenizer_config(file, 256)
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == ("<s>", "</s>", "<pad>")
    assert config["chat_template"] == chat_template(file)
    assert pad_token_id(file) == 0


def test_what_is_absent_is_left_out(tmp_path: Path) -> None:
    keys = ("tokenizer.ggml.padding_token_id", "tokenizer.ggml.bos_token_id", "tokenizer.chat_template")
    file = read_without(tmp_path, *keys)
    config = tokenizer_config(file, 256)
    assert not {"bos_token", "pad_token", "chat_template"} & config.keys()
    assert pad_token_id(file) is None
    assert chat_template(file) is None


def test_no_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.tokens is missing"):
        tokenizer_config(read_without(tmp_path, "tokenizer.ggml.tokens"), 256)
