"""What users write cannot become a control token: "<|im_end|>" inside a message stays text.

Before the template runs, a mark is put inside each special token's text that stands in a message or a
variable; what comes out of the template with a mark was written by a user, what has none by the template.
Invariants: without such text nothing here runs but a search for a few short strings; and with it, everything
else gets the token ids that it would get anyway.

Not covered: a template that joins a message's pieces to a special token which was not there before.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer

from firstlight.base.errors import RequestError

_PRIVATE_USE = (0x100000, 0x10FFFD)  # Unicode's last plane, which no text needs
_MAX_TRIES = 64


class RenderedChat(str):
    """The prompt of a conversation in which users wrote special tokens; `marked` has `mark` inside those."""

    marked: str
    mark: str

    def __new__(cls, marked: str, mark: str) -> RenderedChat:
        """As a string it is the prompt without its marks."""
        chat = super().__new__(cls, marked.replace(mark, ""))
        chat.marked, chat.mark = marked, mark
        return chat


class ControlTokenGuard:
    """The special tokens of one tokenizer, and how to keep users from writing them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder().values()
        self._tokenizer = tokenizer
        self._texts = _longest_first(token.content for token in added)
        # A mark needs a place inside; no known model has a control token of one character.
        self._special = _longest_first(t.content for t in added if _is_control(t) and len(t.content) > 1)
        self._heads = {text[:2] for text in self._special}
        self._written = re.compile("|".join(map(re.escape, self._special)))
        self._lock = threading.Lock()
        self._renamed: _Renamed | None = None

    def finds(self, *values: Any) -> bool:
        """Whether a string in these values (lists and mappings, too) holds a special token's text."""
        return any(
            any(head in text for head in self._heads) and self._written.search(text) is not None
            for text in _strings(values)
        )

    def new_mark(self, *values: Any) -> str:
        """A character that stands nowhere in these values."""
        taken = {*"".join(self._texts)}.union(*_strings(values))
        for _ in range(_MAX_TRIES):
            mark = chr(_PRIVATE_USE[0] + secrets.randbelow(_PRIVATE_USE[1] - _PRIVATE_USE[0]))
            if mark not in taken:
                return mark
        raise RequestError(
            "Messages hold special tokens of the model and nearly all private-use characters of Unicode, "
            "so that they cannot be told apart; leave either out.",
            param="messages",
        )

    def marked(self, value: Any, mark: str) -> Any:
        """A copy of `value` with a mark inside each special token's text."""
        if isinstance(value, str):
            return self._written.sub(lambda found: found[0][0] + mark + found[0][1:], value)
        if isinstance(value, Mapping):
            return {self.marked(key, mark): self.marked(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.marked(item, mark) for item in value]
        return value

    def encode(self, chat: RenderedChat, *, add_special_tokens: bool) -> list[int]:
        """Token ids in which only the template's own special tokens are control tokens."""
        with self._lock:
            if self._renamed is None:  # a few hundred milliseconds, and only where it is needed at all
                self._renamed = _Renamed(self._tokenizer, self._texts, self._special)
        return self._renamed.encode(chat, add_special_tokens=add_special_tokens)


class _Renamed:
    """The same tokenizer, but its special tokens have names that nobody can guess.

    So it treats the text of a special token as it treats every other text, and the rest, spaces around
    special tokens and the beginning of the text included, as the tokenizer itself does.
    """

    def __init__(self, tokenizer: Tokenizer, texts: list[str], special: list[str]) -> None:
        secret = secrets.token_hex(8)
        end = chr(_PRIVATE_USE[1])
        self._names = {text: f"{end}{secret}{number}{end}" for number, text in enumerate(special)}
        self._pattern = re.compile("|".join(map(re.escape, texts)))
        content = msgspec.json.decode(tokenizer.to_str())
        for token in content["added_tokens"]:
            token["content"] = self._names.get(token["content"], token["content"])
        _rename(content["model"], self._names)
        self._tokenizer: Tokenizer = Tokenizer.from_str(msgspec.json.encode(content).decode())

    def encode(self, chat: RenderedChat, *, add_special_tokens: bool) -> list[int]:
        """A mark splits what a user wrote, so the pattern finds only what the template wrote."""
        named = self._pattern.sub(lambda found: self._names.get(found[0], found[0]), chat.marked)
        plain = named.replace(chat.mark, "")
        ids: list[int] = self._tokenizer.encode(plain, add_special_tokens=add_special_tokens).ids
        return ids


def _is_control(token: AddedToken) -> bool:
    """Special, or marked as such by its form: tools' markup is not "special" in some tokenizers, so that
    parsers see it. Tags such as <think> are left alone, as templates look for them in messages."""
    return token.special or (token.content.startswith("<|") and token.content.endswith("|>"))


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """In the vocabulary, which keeps the ids; pairs that would merge to a special token are left out."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # with scores
        model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    else:
        model["vocab"] = {names.get(text, text): index for text, index in vocabulary.items()}
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        pairs = (pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"])
        model["merges"] = [pair for pair in pairs if not names.keys() & {*pair, "".join(pair)}]


def _longest_first(texts: Iterator[str]) -> list[str]:
    """So that of several which begin at one place a pattern takes the longest, as tokenizers do."""
    return sorted({text for text in texts if text}, key=len, reverse=True)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
