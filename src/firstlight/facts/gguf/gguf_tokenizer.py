"""What a GGUF file says about its tokenizer beside the vocabulary: special tokens and the chat template.

Invariant: a special token is named by its text, and an id outside the vocabulary is an error.
"""

from __future__ import annotations

from typing import Any

from firstlight.base.errors import ModelFileError
from firstlight.facts.checkpoint.fields import Fields
from firstlight.facts.checkpoint.remedies import DOWNLOAD_AGAIN
from firstlight.facts.gguf.gguf_header import GgufFile

_TEMPLATE = "tokenizer.chat_template"
_ROLES = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def chat_template(file: GgufFile) -> str | None:
    """The default chat template, if the file has one."""
    value = file.metadata.get(_TEMPLATE)
    return value if isinstance(value, str) and value else None


def pad_token_id(file: GgufFile) -> int | None:
    """The id of the padding token, if there is one."""
    return _special_ids(file).get("pad_token")


def tokenizer_config(file: GgufFile, max_position: int) -> dict[str, Any]:
    """The content of tokenizer_config.json beside a tokenizer.json that says how text is split."""
    tokens = _tokens(file)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_position,
        "clean_up_tokenization_spaces": False,
    }
    config |= {role: tokens[token] for role, token in _special_ids(file).items()}
    template = chat_template(file)
    return config | ({"chat_template": template} if template is not None else {})


def _special_ids(file: GgufFile) -> dict[str, int]:
    fields, size = Fields(file.metadata, file.path), len(_tokens(file))
    found = {role: fields.token_ids(key, size) for role, key in _ROLES.items()}
    return {role: ids[0] for role, ids in found.items() if ids}


def _tokens(file: GgufFile) -> list[str]:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise ModelFileError(
            f"{file.path}: the metadata tokenizer.ggml.tokens is missing or not a list of strings.",
            DOWNLOAD_AGAIN,
        )
    return tokens
