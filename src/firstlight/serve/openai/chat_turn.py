"""One turn of a conversation: what its prompt is, and how its answer is to be read.

Made for the chat and tokenize handlers. Invariant: the parsers begin in the state that the prompt has left
them in, and a request that needs parsers this server does not have is refused before anything runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from firstlight.base.errors import RequestError
from firstlight.serve.openai.conversation import plain_messages
from firstlight.serve.openai.prompts import chat_tokens
from firstlight.serve.parsing.answer import AnswerParser
from firstlight.serve.server import Server

# Variables of chat templates that switch reasoning, by the names that families gave them.
_SWITCHES = ("thinking", "enable_thinking")
MAX_TOOLS = 128
MAX_DEPTH = 64  # of objects and lists in a definition
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FIELDS = ("name", "description", "parameters")
_WITHOUT_EFFECT = ("cache_control",)  # what is cached is decided here


class Turn(Protocol):
    """What requests about a conversation have in common."""

    add_special_tokens: bool | None
    add_generation_prompt: bool | None
    continue_final_message: bool
    chat_template_kwargs: dict[str, Any]
    tools: list[Any]
    tool_choice: Any
    thinking: Any
    reasoning_effort: str | None


@dataclass(frozen=True)
class ChatPrompt:
    """The token ids, and what the parsers of the answers need to know of them."""

    token_ids: list[int]
    is_reasoning_open: bool
    tool_names: frozenset[str]
    num_calls: int  # in the conversation so far


async def chat_prompt(server: Server, turn: Turn, messages: Sequence[Mapping[str, Any]]) -> ChatPrompt:
    """The prompt of the conversation's next answer."""
    if turn.add_generation_prompt and turn.continue_final_message:
        raise RequestError(
            "continue_final_message goes on inside the last message, so add_generation_prompt must be false.",
            param="continue_final_message",
        )
    plain = plain_messages(messages, server.text.shows)
    tools = offered_tools(turn.tools, turn.tool_choice)
    if tools:
        _require_tools(server)
    flags = {
        "add_generation_prompt": not turn.continue_final_message
        if turn.add_generation_prompt is None
        else turn.add_generation_prompt,
        "continue_final_message": turn.continue_final_message,
        "kwargs": _template_kwargs(server, turn),
        "tools": tools,
    }
    prompt, ids = await chat_tokens(server, plain, flags, bool(turn.add_special_tokens))
    return ChatPrompt(
        ids,
        _is_open(server, prompt, plain, turn.continue_final_message),
        frozenset(tool["function"]["name"] for tool in tools),
        sum(len(message.get("tool_calls", ())) for message in plain),
    )


def answer_parser(server: Server, prompt: ChatPrompt, *, one_call: bool) -> AnswerParser | None:
    """A parser for one answer to the prompt; None where its text is all content."""
    reads, thinks = server.parsers.tools, server.parsers.reasoning
    if not prompt.tool_names:
        reads = None
    if reads is None and thinks is None:
        return None
    ends = () if reads is None else reads.call_begins
    return AnswerParser(
        None if thinks is None else thinks.reasoning(is_open=prompt.is_reasoning_open, ends=ends),
        None if reads is None else reads.tools(prompt.tool_names, prompt.num_calls),
        one_call=one_call,
    )


def _require_tools(server: Server) -> None:
    if server.parsers.tools is None:
        reason = "how this model writes its calls is not known here; --tool-call-parser says it at the start"
    elif not server.text.shows("tools"):
        reason = "the model's chat template does not show tools; --chat-template replaces it at the start"
    else:
        return
    raise RequestError(
        f"The parameter 'tools' cannot be used: {reason}. Leave it out.",
        param="tools",
        code="unsupported_parameter",
    )


def _template_kwargs(server: Server, turn: Turn) -> dict[str, Any]:
    """The client's variables, with the switch of the reasoning where a parameter sets it."""
    kwargs = {name: value for name, value in turn.chat_template_kwargs.items() if value is not None}
    _check_switches(kwargs)
    wanted = _wants_thinking(turn)
    if wanted is None:
        return kwargs
    family = server.parsers.reasoning
    if family is None or not server.text.shows(family.thinking_variable):
        if wanted:
            raise RequestError(
                "The parameter 'thinking' cannot be used: this model's chat template has no switch for it. "
                "Leave it out.",
                param="thinking",
                code="unsupported_parameter",
            )
        return kwargs
    if kwargs.setdefault(family.thinking_variable, wanted) is not wanted:
        raise RequestError(
            f"chat_template_kwargs.{family.thinking_variable} contradicts another parameter; send one.",
            param="chat_template_kwargs",
        )
    return kwargs


def _check_switches(kwargs: Mapping[str, Any]) -> None:
    """A template would take any text for true, "false" too."""
    for name in _SWITCHES:
        if not isinstance(kwargs.get(name, False), bool):
            raise RequestError(
                f"chat_template_kwargs.{name} must be true or false.", param=f"chat_template_kwargs.{name}"
            )


def _wants_thinking(turn: Turn) -> bool | None:
    effort = turn.reasoning_effort
    if effort not in (None, "none"):
        raise RequestError(
            "The parameter 'reasoning_effort' can only be 'none': how long a model thinks cannot be set. "
            "Leave it out.",
            param="reasoning_effort",
            code="unsupported_parameter",
        )
    wanted = turn.thinking
    if isinstance(wanted, Mapping) and wanted:
        wanted = {"enabled": True, "disabled": False}.get(wanted.get("type", ""), wanted)
    if wanted in (None, {}):
        return False if effort == "none" else None
    if not isinstance(wanted, bool):
        raise RequestError(
            "thinking must be true, false, or {'type': 'enabled'} or {'type': 'disabled'}.", param="thinking"
        )
    if wanted and effort == "none":
        raise RequestError("thinking and reasoning_effort contradict each other; send one.", param="thinking")
    return wanted


def _is_open(server: Server, prompt: str, messages: list[dict[str, Any]], continues: bool) -> bool:
    """Whether the answer begins inside of reasoning."""
    family = server.parsers.reasoning
    if family is None:
        return False
    if continues:
        content = messages[-1].get("content", "")
        return bool(content.rfind(family.thinks_after) > content.rfind(family.thinks_until))
    return prompt.rstrip().endswith(family.thinks_after)


# What a chat request says of tools: which functions there are, and whether the model may call them. What
# leaves here can be shown to the model and enforced; a choice that could not be is refused by name.


def offered_tools(tools: Sequence[Any], choice: Any) -> list[dict[str, Any]]:
    """The definitions that the template is to show; none where the choice is "none"."""
    _check_choice(choice, has_tools=bool(tools))
    if len(tools) > MAX_TOOLS:
        raise RequestError(
            f"There are {len(tools)} tools; at most {MAX_TOOLS} are allowed. Send fewer.", param="tools"
        )
    plain = [_definition(tool, f"tools.{index}") for index, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in plain]
    if len(set(names)) != len(names):
        raise RequestError("Two tools have the same name; give each its own.", param="tools")
    return [] if choice == "none" else plain


def _check_choice(choice: Any, *, has_tools: bool) -> None:
    if choice in (None, "none", "auto"):
        return
    is_known = choice == "required" or (
        isinstance(choice, Mapping) and choice.get("type") in ("function", "allowed_tools", "custom")
    )
    if not is_known:
        raise RequestError(
            f"tool_choice is {json.dumps(choice)[:100]}; it must be 'none' or 'auto'.", param="tool_choice"
        )
    if not has_tools:
        raise RequestError("tool_choice needs tools; send them, or leave it out.", param="tool_choice")
    raise RequestError(
        "tool_choice can be 'none' or 'auto'. A certain call, or any call at all, cannot be enforced, as "
        "structured output is not supported yet. Offer only the tools that may be called, and say in a "
        "message what is wanted.",
        param="tool_choice",
        code="unsupported_parameter",
    )


def _definition(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise RequestError(f"{where} must be an object of the type 'function'.", param=where)
    function = tool.get("function")
    _only(tool, ("type", "function", *_WITHOUT_EFFECT), where)
    where = f"{where}.function"
    if not isinstance(function, Mapping):
        raise RequestError(f"{where} is missing; describe the function.", param=where)
    _only(function, (*_FIELDS, "strict", *_WITHOUT_EFFECT), where)
    if function.get("strict"):
        raise RequestError(
            f"{where}.strict cannot be true: arguments are not forced into a schema, as structured output is "
            "not supported yet. Leave it out.",
            param=f"{where}.strict",
            code="unsupported_parameter",
        )
    _check_function(function, where)
    given = {name: value for name, value in function.items() if name in _FIELDS and value is not None}
    return {"type": "function", "function": given}


def _check_function(function: Mapping[str, Any], where: str) -> None:
    name = function.get("name")
    if name is None:
        raise RequestError(f"{where}.name is missing; give the function a name.", param=f"{where}.name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}.name is {json.dumps(name)[:80]}; names have 1 to 64 letters, digits, '_', '-' or '.'.",
            param=f"{where}.name",
        )
    if not isinstance(function.get("description"), str | None):
        raise RequestError(f"{where}.description must be a string.", param=f"{where}.description")
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping | None):
        raise RequestError(f"{where}.parameters must be a JSON schema.", param=f"{where}.parameters")
    if _is_deeper(parameters, MAX_DEPTH):
        raise RequestError(
            f"{where}.parameters is nested more than {MAX_DEPTH} deep; make it flatter.",
            param=f"{where}.parameters",
        )


def _only(value: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    for name in value:
        if name not in names:
            raise RequestError(
                f"{where} has no field {str(name)[:80]!r}; leave it out.",
                param=where,
                code="unsupported_parameter",
            )


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether objects and lists lie inside each other more than `levels` times."""
    inside = [value]
    for _ in range(levels + 1):
        inside = [
            item
            for outer in inside
            if isinstance(outer, Mapping | list)
            for item in (outer.values() if isinstance(outer, Mapping) else outer)
        ]
        if not inside:
            return False
    return True
