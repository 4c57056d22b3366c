"""Tokens to text, as they come: constant work a token, never a broken character.

One `StreamDecoder` a sequence, made by `TextModel.stream`; used by the api process and by `LLM`. Invariant:
the pieces it returns, joined, are what decoding the whole sequence at once gives. (One exception, by
intent: SentencePiece throws away a whole run of byte tokens when one of its bytes is invalid; here the
characters before the invalid byte stand, as they were sent already.)
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from firstlight.text.vocabulary import Vocabulary

_REPLACEMENT = "\ufffd"
_Utf8 = codecs.getincrementaldecoder("utf-8")


class StreamDecoder:
    """The text of one sequence, token by token.

    `after_text`: the sequence continues a text, so its first space is part of it (SentencePiece only).
    `shown_ids`: special tokens that are not skipped.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        skip_special_tokens: bool = True,
        after_text: bool = False,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._vocabulary = vocabulary
        self._skip_ids = vocabulary.special_ids - shown_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = _Utf8(errors="replace")
        self._pending = b""  # bytes of an unfinished character, SentencePiece only
        self._drop_space = vocabulary.strips_first_space and not after_text

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; may be empty."""
        return "".join(map(self.push_one, token_ids))

    def push_one(self, token_id: int) -> str:
        """The text that one token completes; empty for a special token that is skipped."""
        if token_id in self._skip_ids:
            return ""
        token = self._vocabulary.token_bytes(token_id)
        if self._vocabulary.is_byte_level:
            return self._utf8.decode(token)
        return self._without_first_space(self._push_piece(token_id, token))

    def flush(self) -> str:
        """What is left at the end: a replacement character for an unfinished one."""
        if self._vocabulary.is_byte_level:
            return self._utf8.decode(b"", final=True)
        return self._without_first_space(self._end_of_bytes())

    def _push_piece(self, token_id: int, token: bytes) -> str:
        if not self._vocabulary.is_byte_piece(token_id):
            return self._end_of_bytes() + token.decode()
        self._pending += token
        try:
            text = self._pending.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return ""
            return self._end_of_bytes()
        self._pending = b""
        return text

    def _end_of_bytes(self) -> str:
        replaced = _REPLACEMENT * len(self._pending)
        self._pending = b""
        return replaced

    def _without_first_space(self, text: str) -> str:
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text
