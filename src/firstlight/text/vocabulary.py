"""Bytes and specials of single tokens, as the tokenizer's own decoder sees them.

Two families of decoders: "bytes" (byte-level BPE: every token is a run of bytes) and "pieces" (SentencePiece:
words with U+2581 for a space, and single bytes as <0x..>). Invariant: in the family "bytes", the text of a
sequence is the lossy UTF-8 decoding of its tokens' bytes, joined.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer

from firstlight.base.errors import UnsupportedError

_SPACE = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The printable characters that byte-level BPE writes for the 256 bytes, by character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_ALPHABET = byte_alphabet()
_AT_RANDOM = ("dropout", "alpha", "nbest_size")  # of BPE, and of Unigram


def take_whole(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, which cuts, fills up and varies no text: these are settings of somebody's training.

    A tokenizer.json may hold a `truncation`, a `padding`, and models that split at random.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for name in _AT_RANDOM:
        if getattr(tokenizer.model, name, None) is not None:
            setattr(tokenizer.model, name, None)
    return tokenizer


class Vocabulary:
    """Bytes of tokens by id, computed when first asked for. Shared by all streams of a process."""

    def __init__(self, tokenizer: Tokenizer, where: str) -> None:
        self._tokenizer = tokenizer
        kinds, self.strips_first_space = _decoder_facts(tokenizer, where)
        self.is_byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text; empty for an id that the tokenizer does not know."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._make(token_id)
        return known

    def is_byte_piece(self, token_id: int) -> bool:
        """Whether a SentencePiece token stands for one byte of a character, such as <0xE4>."""
        token = self._tokenizer.id_to_token(token_id) if self._byte_fallback else None
        return token is not None and _BYTE_PIECE.fullmatch(token) is not None

    def _make(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            try:
                return bytes(map(_ALPHABET.__getitem__, token))
            except KeyError:  # an added token with characters outside of the byte alphabet
                return token.encode()
        match = _BYTE_PIECE.fullmatch(token) if self._byte_fallback else None
        return bytes([int(match[1], 16)]) if match else token.replace(_SPACE, " ").encode()


def _decoder_facts(tokenizer: Tokenizer, where: str) -> tuple[set[str], bool]:
    """The kinds of decoders in use, and whether the first space of a text is dropped."""
    state: dict[str, Any] = {}
    if tokenizer.decoder is not None:
        state = json.loads(tokenizer.decoder.__getstate__())
    parts = state.get("decoders", [state])
    kinds = {str(part.get("type")) for part in parts}
    if not (kinds <= {"ByteLevel"} or kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}):
        raise UnsupportedError(
            f"{where}: the tokenizer's decoder ({', '.join(sorted(kinds))}) is not supported.",
            "Supported are byte-level BPE and SentencePiece tokenizers.",
        )
    strips = any(
        (part.get("type") == "Strip" and part.get("start") == 1)
        or (part.get("type") == "Metaspace" and part.get("prepend_scheme") != "never")
        for part in parts
    )
    return kinds, strips
