"""Tokenizers as GGUF metadata: byte-level BPE with a few merges, and SentencePiece with a few words.

For tests of `text`. Each has special tokens, and byte-level BPE a user-defined one, too.
"""

from __future__ import annotations

from firstlight.text.vocabulary import byte_alphabet

CONTROL, USER_DEFINED, NORMAL, BYTE, UNKNOWN = 3, 4, 1, 6, 2
LETTERS = list(byte_alphabet())
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "1 2", "12 3", "Ġ Ġ", "Ċ Ċ", "' s", "à ¤"]


def byte_level_metadata(pre: str) -> dict[str, object]:
    merged = [merge.replace(" ", "") for merge in MERGES]
    tokens = [*LETTERS, *merged, "<|a|>", "<|b|>", "<think>"]
    kinds = [NORMAL] * (len(tokens) - 3) + [CONTROL, CONTROL, USER_DEFINED]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": len(tokens) - 3,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
    }


def sentence_piece_metadata() -> dict[str, object]:
    words = [
        "\u2581",
        "h",
        "e",
        "l",
        "o",
        "w",
        "r",
        "d",
        "he",
        "ll",
        "hell",
        "hello",
        "\u2581hello",
        "\u2581w",
    ]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words)],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(words))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
