"""A tokenizer made by code that came with the model, through transformers. Only with --trust-remote-code.

Invariant: nothing of the folder is run unless a person asked for it; and what its code makes becomes a
`tokenizers.Tokenizer` like every other, with the same token ids for texts of all kinds, or is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from firstlight.base.errors import ModelFileError, UnsupportedError
from firstlight.text.tiktoken_ranks import tokenizer_of_ranks
from firstlight.text.vocabulary import take_whole

_OTHERWISE = "Use a copy of the model that has a tokenizer.json."
_PROBES = (
    "Hello, world! It's 2026-11-30 and 1234567 isn't 1,234,567.",
    "def f(x):\n    return {'a': x[0] ** 2}  # \u00e9\u00e8\u00fc\n\n\n\tprint(\"...\")\r\n",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u6df7\u5408mixed\u6587\u672cABC\u3001\u65e5\u672c\u8a9e\u306e\u30c6\u30b9",
    "  two  spaces\u00a0and \U0001f600\U0001f468\u200d\U0001f469 \u0430\u0431\u0432 \ud55c\uad6d camelCase",
)


def run_tokenizer_code(folder: Path) -> Tokenizer:
    """What transformers' AutoTokenizer makes of the folder. Raises `UnsupportedError` where it cannot be
    used, `ModelFileError` where the code fails."""
    # Imported here: an extra of its own weight, and only for who asked for it.
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UnsupportedError(
            f"--trust-remote-code needs transformers, which is not installed here ({error}).",
            "Run `pip install transformers`, or use a copy of the model that has a tokenizer.json.",
        ) from error
    try:
        made = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        expected = [made.encode(text, add_special_tokens=False) for text in _PROBES]
    except Exception as error:
        raise ModelFileError(
            f"{folder}: its own tokenizer code failed: {type(error).__name__}: {error}", _OTHERWISE
        ) from error
    tokenizer = _of_tiktoken(made) or getattr(made, "backend_tokenizer", None)
    if not isinstance(tokenizer, Tokenizer):
        raise UnsupportedError(
            f"{folder}: its own code makes a {type(made).__name__}, which is neither a fast tokenizer nor "
            "one of tiktoken.",
            _OTHERWISE,
        )
    take_whole(tokenizer)
    if [tokenizer.encode(text, add_special_tokens=False).ids for text in _PROBES] != expected:
        raise UnsupportedError(
            f"{folder}: its own code does more with a text than what can be taken over from it.", _OTHERWISE
        )
    return tokenizer


def _of_tiktoken(made: Any) -> Tokenizer | None:
    """The same as what a `tiktoken.Encoding` in an attribute of the code's object does, if there is one."""
    for held in vars(made).values():
        ranks, split = getattr(held, "_mergeable_ranks", None), getattr(held, "_pat_str", None)
        if not isinstance(ranks, dict) or not isinstance(split, str):
            continue
        tokens = sorted(ranks, key=ranks.__getitem__)
        if [ranks[token] for token in tokens] != list(range(len(tokens))):
            return None
        shown = set(getattr(made, "all_special_tokens", ()))
        added = {
            index: AddedToken(text, normalized=False, special=text in shown)
            for text, index in held._special_tokens.items()
        }
        return tokenizer_of_ranks(tokens, added, split)
    return None
