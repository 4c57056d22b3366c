"""A file of tiktoken ranks (one token a line: base64, space, rank) as byte-level BPE.

tiktoken joins the two neighbours whose joined bytes have the lowest rank, and takes a word that is a token as
it stands; as a list of merges that is every way to cut every token in two, lowest rank first. Invariant: a
token's id is its rank, and no rank below their number is missing.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from firstlight.base.errors import ModelFileError, why_unreadable
from firstlight.facts.checkpoint.fields import lfs_pointer
from firstlight.text.vocabulary import byte_alphabet

MAX_RANKS_BYTES = 64 * 1024 * 1024  # the largest published one has 4
_DAMAGED = "Download the file again; it may be incomplete."
_LFS = b"version https://git-lfs"


def read_ranks(path: Path) -> list[bytes]:
    """The tokens of the file by their ranks. Raises `ModelFileError` for anything else than that."""
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_RANKS_BYTES:
            raise ModelFileError(f"{path} has {size_bytes} bytes, more than ranks can have.", _DAMAGED)
        content = path.read_bytes()
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {why_unreadable(error)}", _DAMAGED) from error
    if content.startswith(_LFS):
        raise lfs_pointer(path)
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if line:
            token, rank = _read_line(line, f"{path}, line {number}")
            ranks[token] = rank
    return _ordered(ranks, path)


def write_ranks(path: Path, tokens: Sequence[bytes]) -> None:
    """Writes the tokens, each with its place as its rank."""
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    path.write_text("".join(lines), encoding="ascii")


def tokenizer_of_ranks(tokens: Sequence[bytes], added: Mapping[int, AddedToken], split: str) -> Tokenizer:
    """The tokenizer that splits by the pattern `split` and joins as tiktoken does. `added`: tokens beside the
    ranks, by their ids."""
    tokenizer = Tokenizer(_bpe(tokens, {token.content: index for index, token in added.items()}))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([token for token in added.values() if token.special])
    tokenizer.add_tokens([token for token in added.values() if not token.special])
    return tokenizer


def _bpe(tokens: Sequence[bytes], others: Mapping[str, int]) -> models.BPE:
    table = {byte: character for character, byte in byte_alphabet().items()}
    texts = [token.decode("latin-1").translate(table) for token in tokens]
    vocabulary = {text: rank for rank, text in enumerate(texts)}
    merges = [
        (text[:cut], text[cut:])
        for text in texts
        for cut in range(1, len(text))
        if text[:cut] in vocabulary and text[cut:] in vocabulary
    ]
    return models.BPE(vocab=vocabulary | dict(others), merges=merges, ignore_merges=True)


def _read_line(line: bytes, where: str) -> tuple[bytes, int]:
    parts = line.split()
    try:
        text, rank = parts
        token = base64.b64decode(text, validate=True)
        if not (token and rank.isdigit()):
            raise ValueError
        return token, int(rank)
    except (ValueError, binascii.Error):
        shown = line[:60].decode("ascii", errors="replace")
        raise ModelFileError(f"{where}: {shown!r} is not a token in base64 and its rank.", _DAMAGED) from None


def _ordered(ranks: Mapping[bytes, int], path: Path) -> list[bytes]:
    tokens = sorted(ranks, key=ranks.__getitem__)
    if [ranks[token] for token in tokens] != list(range(len(tokens))):
        raise ModelFileError(
            f"{path}: the ranks of its {len(tokens)} tokens are not the numbers from 0 to {len(tokens) - 1}.",
            _DAMAGED,
        )
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None:
        raise ModelFileError(f"{path}: the byte {missing:#04x} is not among its tokens.", _DAMAGED)
    return tokens
