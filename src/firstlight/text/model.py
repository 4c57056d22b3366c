"""The text side of a model: tokenizer, special tokens and chat template, from a GGUF file or a folder.

Invariant: what it answers never changes after `load`, and it may be used from several threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from firstlight.base.errors import RequestError, as_sentence
from firstlight.facts.gguf.gguf_header import read_gguf
from firstlight.facts.gguf.gguf_tokenizer import chat_template, tokenizer_config
from firstlight.text import folder
from firstlight.text.detokenizer import StreamDecoder
from firstlight.text.gguf_tokenizer import build_tokenizer
from firstlight.text.guard import ControlTokenGuard, RenderedChat
from firstlight.text.template import ChatTemplate, TemplateFault
from firstlight.text.tool_declarations import sorted_keys, typescript
from firstlight.text.vocabulary import Vocabulary, take_whole

# What a client's chat_template_kwargs may not set: they have fields of their own.
RESERVED_VARIABLES = ("messages", "tools", "tools_ts_str", "documents") + (
    "add_generation_prompt",
    "continue_final_message",
)


class TextModel:
    """Text to token ids and back, and conversations to prompts."""

    def __init__(
        self, tokenizer: Tokenizer, special_tokens: Mapping[str, str], template: str | None, where: str
    ) -> None:
        self._tokenizer = take_whole(tokenizer)
        self._special_tokens = dict(special_tokens)
        self._template = ChatTemplate(template, where) if template is not None else None
        self._vocabulary = Vocabulary(tokenizer, where)
        self._guard = ControlTokenGuard(tokenizer)
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")

    @classmethod
    def load(
        cls,
        path: str | Path,
        chat_template_file: str | Path | None = None,
        *,
        trust_remote_code: bool = False,
    ) -> TextModel:
        """Reads a GGUF file or a Hugging Face folder; `chat_template_file` replaces the model's template.

        `trust_remote_code`: run the folder's own code where its tokenizer cannot be read without.
        """
        path = Path(path)
        template: str | None
        if path.is_dir():
            config = folder.read_config(path)
            tokenizer = folder.read_tokenizer(path, config, trust_remote_code=trust_remote_code)
            specials = folder.special_tokens(config)
            template, where = folder.read_template(path, config)
        else:
            header = read_gguf(path)
            tokenizer = build_tokenizer(header.metadata, str(path))
            specials = folder.special_tokens(tokenizer_config(header, max_position=0))
            template, where = chat_template(header), f"{path} (tokenizer.chat_template)"
        if chat_template_file is not None:
            where = str(chat_template_file)
            template = folder.read_template_file(Path(where))
        return cls(tokenizer, specials, template, where)

    def check_template(self) -> None:
        """A `ModelFileError` if there is a chat template that cannot render one plain user message.

        For a server, which would blame every client; a model may be converted or measured without one.
        """
        if self._template is not None:
            self._template.check(self._special_tokens)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return self._template is not None

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template."""
        return self._template.source if self._template else None

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The texts of the tokens with a role, such as "eos_token"."""
        return self._special_tokens

    def tokenizer_json(self) -> str:
        """The content of a tokenizer.json that makes this tokenizer again."""
        text: str = self._tokenizer.to_str(pretty=False)
        return text

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; `add_special_tokens` puts what the model wants around it.

        The text of a special token becomes that token, but not where a user wrote it in a rendered chat.
        """
        if isinstance(text, RenderedChat):
            return self._guard.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Ids that the tokenizer does not know add nothing."""
        stream = self.stream(skip_special_tokens=skip_special_tokens)
        return stream.push(token_ids) + stream.flush()

    def stream(
        self,
        *,
        skip_special_tokens: bool = True,
        after_text: bool = False,
        shown_ids: frozenset[int] = frozenset(),
    ) -> StreamDecoder:
        """A decoder for one sequence, token by token. `shown_ids`: special tokens that are not skipped."""
        return StreamDecoder(
            self._vocabulary,
            skip_special_tokens=skip_special_tokens,
            after_text=after_text,
            shown_ids=shown_ids,
        )

    def token_id(self, text: str) -> int | None:
        """The id of the token that is written so in the tokenizer's own files, special ones among them."""
        index: int | None = self._tokenizer.token_to_id(text)
        return index

    def shows(self, name: str) -> bool:
        """Whether the chat template mentions a field of messages or a variable of this name."""
        return self._template is not None and name in self._template.source

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the text; they need not be whole characters."""
        return self._vocabulary.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """A token on its own; bytes that are no whole character stand as escapes, such as \\xf0\\x9f."""
        return self._vocabulary.token_bytes(token_id).decode("utf-8", errors="backslashreplace")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The prompt of a conversation. Raises `RequestError` when it cannot be rendered.

        `tools` are definitions of functions, for templates that show them; the others drop them.
        Special tokens that users wrote stay text when the prompt is given to `encode` as it is.
        """
        if self._template is None:
            raise RequestError(
                "This model has no chat template; use /v1/completions, or start the server with "
                "--chat-template FILE.",
                code="no_chat_template",
            )
        for name in kwargs or ():
            if name in RESERVED_VARIABLES or name.startswith("_"):
                raise RequestError(
                    f"chat_template_kwargs must not set {name!r}; leave it out.", param="chat_template_kwargs"
                )
        flags = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        guard, chat, variables = self._guard, list(messages), {**(kwargs or {})}
        if tools:
            variables |= self._declared(tools)
        if not guard.finds(chat, variables):
            return self._render(self._template, chat, variables, flags)
        mark = guard.new_mark(chat, variables)
        text = self._render(self._template, guard.marked(chat, mark), guard.marked(variables, mark), flags)
        return RenderedChat(text, mark)

    def _declared(self, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The template's variables for `tools`: as they are, or as Kimi-K2.5's own code prepares them."""
        if not self.shows("tools_ts_str"):
            return {"tools": list(tools)}
        ordered = sorted_keys(tools)
        text = typescript(ordered)
        return {"tools": ordered} | ({} if text is None else {"tools_ts_str": text})

    def _render(
        self,
        template: ChatTemplate,
        messages: list[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        flags: Mapping[str, bool],
    ) -> str:
        try:
            return template.render(messages, {**self._special_tokens, **kwargs}, **flags)
        except TemplateFault as fault:
            if not kwargs:
                raise
            template.render(messages, self._special_tokens, **flags)
            raise RequestError(
                "The model's chat template fails with these tools or chat_template_kwargs, and not without: "
                f"{as_sentence(fault.reason)} Leave them out, or give what the template expects.",
                param="chat_template_kwargs",
            ) from fault

    def _special_id(self, role: str) -> int | None:
        text = self._special_tokens.get(role)
        return self.token_id(text) if text is not None else None
