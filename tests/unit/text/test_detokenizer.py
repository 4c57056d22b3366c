"""Streams of text equal the decoding of the whole, however the tokens fall."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from firstlight.base.errors import UnsupportedError
from firstlight.text.detokenizer import StreamDecoder
from firstlight.text.vocabulary import Vocabulary
from support.byte_text import SPECIALS, byte_text, byte_tokenizer

BYTE_TOKENIZER = byte_tokenizer()
BYTES = Vocabulary(BYTE_TOKENIZER, "test")
WORDS = ["\u2581", "\u2581Hello", "lo", "\u2581\u2581x", "你", "é", "<s>"]


def piece_tokenizer(*, strips: bool = True) -> Tokenizer:
    words = {word: index for index, word in enumerate(WORDS)}
    pieces = {f"<0x{byte:02X}>": len(WORDS) + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab={**words, **pieces}, merges=[], byte_fallback=True))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strips else parts)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    return tokenizer


PIECE_TOKENIZER = piece_tokenizer()
PIECES = Vocabulary(PIECE_TOKENIZER, "test")


def streamed(decoder: StreamDecoder, ids: list[int]) -> str:
    return "".join([*(decoder.push_one(token) for token in ids), decoder.flush()])


@given(st.lists(st.integers(0, 260)), st.booleans())
def test_bytes_in_any_order_decode_as_a_whole(ids: list[int], skips: bool) -> None:
    decoder = StreamDecoder(BYTES, skip_special_tokens=skips)
    assert streamed(decoder, ids) == BYTE_TOKENIZER.decode(ids, skip_special_tokens=skips)


@given(st.text())
def test_text_comes_back_from_its_bytes(text: str) -> None:
    model = byte_text(None)
    expected = text
    for special in SPECIALS:
        expected = expected.replace(special, "")
    assert model.decode(model.encode(text)) == expected


@given(st.lists(st.integers(0, len(WORDS)) | st.text(min_size=1, max_size=3)))
def test_pieces_decode_as_a_whole(parts: list[int | str]) -> None:
    """Words and whole characters written as byte pieces."""
    ids: list[int] = []
    for part in parts:
        ids += [part] if isinstance(part, int) else [len(WORDS) + byte for byte in part.encode()]
    assert streamed(StreamDecoder(PIECES), ids) == PIECE_TOKENIZER.decode(ids)


@given(st.lists(st.integers(0, len(WORDS) + 255)))
def test_pieces_with_invalid_bytes_never_break(ids: list[int]) -> None:
    streamed(StreamDecoder(PIECES), ids).encode()


def test_an_unfinished_character_is_held_and_replaced_at_the_end() -> None:
    decoder = StreamDecoder(BYTES)
    assert [decoder.push_one(byte) for byte in "é".encode()] == ["", "é"]
    assert decoder.push("你".encode()[:2]) == ""
    assert decoder.flush() == "\ufffd"


def test_an_unfinished_byte_piece_is_replaced_before_the_next_word() -> None:
    decoder = StreamDecoder(PIECES)
    assert decoder.push([len(WORDS) + 0xE4]) == ""
    assert decoder.push([1]) == "\ufffd Hello"


def test_the_first_space_belongs_to_a_continued_text() -> None:
    assert StreamDecoder(PIECES).push([1]) == "Hello"
    assert StreamDecoder(PIECES, after_text=True).push([1]) == " Hello"
    never = Vocabulary(piece_tokenizer(strips=False), "test")
    assert StreamDecoder(never).push([1]) == " Hello"


def test_bytes_of_tokens() -> None:
    assert BYTES.token_bytes(0xE9) == b"\xe9"
    assert BYTES.token_bytes(10**6) == b""
    assert PIECES.token_bytes(len(WORDS) + 0xE9) == b"\xe9"
    assert PIECES.token_bytes(1) == b" Hello"


def test_an_unknown_decoder_is_refused_by_name() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedError, match="WordPiece"):
        Vocabulary(tokenizer, "test")
