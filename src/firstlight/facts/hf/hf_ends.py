"""Tokens that end an answer of a Kimi model, beside those that config.json and generation_config.json name.

The published files name one in each place, while the model writes two of them: [EOS] (eos_token of the
tokenizer) and <|im_end|>. Invariant: other families' ends are left as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from firstlight.facts.checkpoint.fields import read_json_object
from firstlight.facts.description import ModelDescription

TOKENIZER_FILE = "tokenizer_config.json"
TOKENIZER_CLASS = "TikTokenTokenizer"
_END_OF_TURN = "<|im_end|>"


def with_tokenizers_ends(description: ModelDescription, folder: Path) -> ModelDescription:
    """The description with the ends that the tokenizer's own configuration gives an id to."""
    path = folder / TOKENIZER_FILE
    config = read_json_object(path) if path.is_file() else {}
    added = config.get("added_tokens_decoder")
    if config.get("tokenizer_class") != TOKENIZER_CLASS or not isinstance(added, Mapping):
        return description
    eos = config.get("eos_token")
    ends = {_END_OF_TURN, eos.get("content") if isinstance(eos, Mapping) else eos}
    found = tuple(
        int(index)
        for index, token in added.items()
        if index.isdecimal() and isinstance(token, Mapping) and token.get("content") in ends
    )
    known = tuple(index for index in found if index < description.vocab_size)
    return replace(description, eos_token_ids=tuple(dict.fromkeys((*description.eos_token_ids, *known))))
