"""Chat templates: sandboxed Jinja with the functions that Hugging Face templates expect, and a budget.

A template is a program from the model file; messages and `chat_template_kwargs` come from clients. Invariant:
rendering ends: loops and macro calls are counted, time and output are limited, and multiplication cannot make
large values.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from firstlight.base.errors import ModelFileError, RequestError, as_sentence

MAX_OUTPUT_CHARS = 16 * 1024 * 1024
MAX_LOOP_STEPS = 2_000_000
MAX_SECONDS = 10.0
_MAX_REASON_CHARS = 500
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{4,}|\*)")
_BUDGET = "_firstlight_budget"
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_REMEDY = "Give a working template with --chat-template FILE."
# What a template may raise of itself; anything else is a bug of ours.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
# What compiling one may raise: Python itself refuses too deep nesting.
_COMPILE_ERRORS = (jinja2.TemplateError, SyntaxError, RecursionError, MemoryError, ValueError)


class TemplateFault(RequestError):
    """The template failed by itself: the operator's to mend, not the client's."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"The model's chat template failed on these messages: {as_sentence(reason)} This is a fault of "
            "the template, not of the request; who runs the server can replace it with --chat-template FILE.",
            code="chat_template_failed",
            status=500,
            kind="server_error",
        )
        self.reason = reason


class ChatTemplate:
    """One compiled template. Safe to use from several threads. `where` says in errors whose it is."""

    def __init__(self, source: str, where: str) -> None:
        self.source = source
        self._where = where
        environment = _environment()
        try:
            tree = environment.parse(source)
            _count_steps(tree)
            self._template: jinja2.Template = environment.from_string(tree)
        except _COMPILE_ERRORS as error:
            line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise ModelFileError(
                f"{where}: the chat template is not valid Jinja: {_reason(error)}{line}", _REMEDY
            ) from error

    def check(self, variables: Mapping[str, Any]) -> None:
        """Renders one plain user message; a `ModelFileError` if the template cannot do even that."""
        chat = [{"role": "user", "content": "Hello"}]
        try:
            self._collect(_context(chat, variables, add_generation_prompt=True))
        except _TEMPLATE_ERRORS as error:
            raise ModelFileError(
                f"{self._where}: the chat template cannot render a plain user message: {_reason(error)}",
                _REMEDY,
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        """The prompt of a conversation.

        Raises `RequestError` for messages that the template refuses, `TemplateFault` where it breaks.

        `variables` are the special tokens and the client's `chat_template_kwargs`. With
        `continue_final_message` the prompt ends inside the last message, as its author left it.
        """
        # Templates test for a key, so an explicit null would be rendered as "None".
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        content = _open_final_message(chat, self.source) if continue_final_message else ""
        try:
            text = self._collect(_context(chat, variables, add_generation_prompt=add_generation_prompt))
        except _Refusal as error:
            raise RequestError(
                f"The model's chat template refused the messages: {as_sentence(_reason(error))} Check their "
                "roles, order and content; /docs and the model's own card say what it takes.",
                param="messages",
                code="invalid_messages",
            ) from error
        except _TEMPLATE_ERRORS as error:
            raise TemplateFault(_reason(error)) from error
        return _close_final_message(text, content) if continue_final_message else text

    def _collect(self, context: Mapping[str, Any]) -> str:
        parts: list[str] = []
        size = 0
        for part in self._template.generate(context):
            size += len(part)
            if size > MAX_OUTPUT_CHARS:
                raise _over_budget(f"more than {MAX_OUTPUT_CHARS} characters of output")
            parts.append(part)
        return "".join(parts)


def _context(
    chat: list[dict[str, Any]], variables: Mapping[str, Any], *, add_generation_prompt: bool
) -> dict[str, Any]:
    return {
        **variables,
        "messages": chat,
        "tools": variables.get("tools"),
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        _BUDGET: _Budget(),
    }


def _reason(error: BaseException) -> str:
    text = str(error)[:_MAX_REASON_CHARS] or "no reason was given"
    return text if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {text}"


def _open_final_message(chat: list[dict[str, Any]], source: str) -> str:
    """Marks the end of the last message's content, so that the prompt can be cut there."""
    content = chat[-1].get("content") if chat else None
    if not isinstance(content, str):
        raise RequestError(
            "continue_final_message needs a last message with text content; add one or leave it out.",
            param="continue_final_message",
        )
    if "content" not in source:
        raise RequestError(
            "continue_final_message cannot be used: the model's chat template does not render 'content'.",
            param="continue_final_message",
        )
    chat[-1]["content"] = content + _CONTINUE_TAG
    return content


def _close_final_message(text: str, content: str) -> str:
    tag = _CONTINUE_TAG.strip()
    cut = text.rfind(tag)
    if cut < 0 or content.strip() not in text:
        raise RequestError(
            "continue_final_message cannot be used: the model's chat template changes the last message.",
            param="continue_final_message",
        )
    if text[cut : cut + len(_CONTINUE_TAG)] == _CONTINUE_TAG:
        return text[:cut]
    return text[:cut].rstrip()  # the template trims messages, so the trailing space would not be there either


class _Budget:
    """Counts the steps of one rendering; called by the template itself at each loop turn and macro call."""

    def __init__(self) -> None:
        self._steps = 0
        self._deadline_s = time.monotonic() + MAX_SECONDS

    def __call__(self) -> str:
        self._steps += 1
        if self._steps > MAX_LOOP_STEPS:
            raise _over_budget(f"more than {MAX_LOOP_STEPS} loop steps")
        if self._steps % 1024 == 0 and time.monotonic() > self._deadline_s:
            raise _over_budget(f"more than {MAX_SECONDS:g} seconds")
        return ""


def _over_budget(what: str) -> jinja2.TemplateError:
    return jinja2.exceptions.SecurityError(f"it needs {what}")


def _count_steps(tree: nodes.Template) -> None:
    """Puts a call of the budget at the head of every loop body and macro."""
    counted = (nodes.For, nodes.Macro, nodes.CallBlock)
    for node in list(tree.find_all(counted)):
        assert isinstance(node, counted)
        call = nodes.Call(nodes.Name(_BUDGET, "load"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno or 1))


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with limits on the operators that make large values out of small ones."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise jinja2.exceptions.SecurityError("the operator ** is not allowed")
        if operator == "*":
            size = _repeated_size(left, right)
            if size > MAX_OUTPUT_CHARS:
                raise _over_budget(f"a value of {size} elements")
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        return super().call_binop(context, operator, left, right)


def _repeated_size(left: Any, right: Any) -> int:
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(count, int):
            return len(sequence) * max(count, 0)
    return 0


def _check_format(layout: str) -> None:
    if _WIDE_FORMAT.search(layout):
        raise _over_budget("a format with a width of 1000 or more")


def _format(layout: str, *values: Any, **named: Any) -> Any:
    """Jinja's filter `format`, with bounded widths."""
    _check_format(layout)
    return layout % (named or values)


class _GenerationBlocks(Extension):
    """{% generation %} marks what the assistant wrote, for training; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.filters["format"] = _format
    del environment.filters["center"]  # pads to any width that a caller names
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _now
    environment.globals.pop("lipsum", None)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML; a prompt must have the text as it is.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Refusal(jinja2.TemplateError):
    """The template's own word against messages, by raise_exception()."""


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _now(layout: str) -> str:
    return datetime.now().strftime(layout)
