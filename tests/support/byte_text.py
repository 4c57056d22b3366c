"""A text model of 256 bytes and a few special tokens: every text has as many tokens as bytes.

For tests that need real tokenizing without a model file. Token id = byte value; the special ones follow.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from firstlight.text.model import TextModel
from firstlight.text.vocabulary import byte_alphabet

START, END, OTHER = 256, 257, 258
SPECIALS = ("<|start|>", "<|end|>", "<|other|>")
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}{{ mood or '' }}"
)


def byte_tokenizer() -> Tokenizer:
    vocabulary = {**byte_alphabet(), **{text: 256 + i for i, text in enumerate(SPECIALS)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return tokenizer


def byte_text(template: str | None = TEMPLATE) -> TextModel:
    return TextModel(byte_tokenizer(), {"eos_token": "<|end|>"}, template, "test")


def tokens(text: str) -> list[int]:
    """The token ids of a text."""
    return list(text.encode())
