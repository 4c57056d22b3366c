"""Kimi's tokenizer from its own files: tiktoken.model and the special tokens of tokenizer_config.json.

The folder's tokenization_kimi.py, which other engines run, is read as text at most: its constants stand here.
Invariant: token ids are those of that code, or the folder is refused because it splits or numbers otherwise.

One difference, by intent: that code cuts runs of more than 25,000 characters without a space before it
splits them, and texts every 400,000 characters, to spare an old tiktoken; here nothing is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from firstlight.base.errors import ModelFileError, UnsupportedError
from firstlight.facts.checkpoint.fields import MAX_SIZE
from firstlight.facts.hf.hf_ends import TOKENIZER_CLASS
from firstlight.text.tiktoken_ranks import read_ranks, tokenizer_of_ranks

RANKS_FILE = "tiktoken.model"
NUM_RESERVED = 256  # ids after the ranks; those without a name are <|reserved_token_ID|>
# Runs of Han first; then words in which Han has no place, as they stand in the published code.
SPLIT = (
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
# Code that was published with this split: Kimi-K2 and later, and Moonlight.
_KNOWN_CODE = ("tokenization_kimi", "tokenization_moonshot")
_MAX_CODE_BYTES = 1024 * 1024
_CHECK = "Download tiktoken.model and tokenizer_config.json of one and the same model again."


def is_kimi(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether the folder has this tokenizer: its ranks, and in its configuration the class or its code."""
    if not (folder / RANKS_FILE).is_file():
        return False
    code = tokenizer_code(config)
    if code is not None:
        return code.partition(".")[0] in _KNOWN_CODE
    return config.get("tokenizer_class") in (TOKENIZER_CLASS, None)


def tokenizer_code(config: Mapping[str, Any]) -> str | None:
    """The class that tokenizer_config.json wants from the folder's own code (auto_map), as "module.Class"."""
    auto_map = config.get("auto_map")
    named = auto_map.get("AutoTokenizer") if isinstance(auto_map, Mapping) else auto_map
    if isinstance(named, list):  # the plain one, the fast one
        named = next((name for name in named if isinstance(name, str)), None)
    return named.rpartition("--")[2] if isinstance(named, str) else None  # "org/name--module.Class"


def knows_split(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether the code that came with the ranks, where it is there at all, holds the pattern of `SPLIT`."""
    path = _code_file(folder, config)
    if not path.is_file() or path.stat().st_size > _MAX_CODE_BYTES:
        return True
    text = path.read_text(encoding="utf-8", errors="replace")
    return all(part in text for part in SPLIT)


def read_kimi(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of the folder, for which `is_kimi` holds."""
    if not knows_split(folder, config):
        raise UnsupportedError(
            f"{_code_file(folder, config)} splits text otherwise than the Kimi tokenizers that are known "
            "here, so that its token ids would be wrong.",
            "If you trust that code, start with --trust-remote-code: it is run then.",
        )
    tokens = read_ranks(folder / RANKS_FILE)
    return tokenizer_of_ranks(tokens, _added_tokens(config, len(tokens), folder), "|".join(SPLIT))


def _added_tokens(config: Mapping[str, Any], num_ranks: int, folder: Path) -> dict[int, AddedToken]:
    """The tokens after the ranks by their ids: the named ones, and names for the others."""
    where = folder / "tokenizer_config.json"
    listed = config.get("added_tokens_decoder", {})
    if not isinstance(listed, Mapping):
        raise ModelFileError(f"{where}: added_tokens_decoder is not an object.", _CHECK)
    added = {
        index: AddedToken(f"<|reserved_token_{index}|>", normalized=False, special=True)
        for index in range(num_ranks, num_ranks + NUM_RESERVED)
    }
    for key, token in listed.items():
        content = token.get("content") if isinstance(token, Mapping) else None
        if not key.isdecimal() or not isinstance(content, str) or not content:
            raise ModelFileError(f"{where}: added_tokens_decoder.{key} is not a token.", _CHECK)
        index = int(key)
        if not num_ranks <= index < MAX_SIZE:
            raise ModelFileError(
                f"{where}: {content!r} has the id {key}, but {RANKS_FILE} has {num_ranks} tokens, so that "
                f"special ones begin at {num_ranks}.",
                _CHECK,
            )
        added[index] = AddedToken(content, normalized=False, special=token.get("special", True) is not False)
    if len({token.content for token in added.values()}) != len(added):
        raise ModelFileError(f"{where}: two tokens of added_tokens_decoder have the same text.", _CHECK)
    return added


def _code_file(folder: Path, config: Mapping[str, Any]) -> Path:
    return folder / f"{(tokenizer_code(config) or _KNOWN_CODE[0]).partition('.')[0]}.py"
