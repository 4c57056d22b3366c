"""One turn of a conversation: what its prompt is, and how its answer is to be read.

Made for the chat and tokenize handlers. Invariant: the parsers begin in the state that the prompt has left
them in, and a request that needs parsers this server does not have is refused before anything runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from firstlight.base.errors import RequestError
from firstlight.serve.conversation import plain_messages
from firstlight.serve.parsing.answer import AnswerParser
from firstlight.serve.prompts import chat_tokens
from firstlight.serve.server import Server
from firstlight.serve.tools import offered_tools

# Variables of chat templates that switch reasoning, by the names that families gave them.
_SWITCHES = ("thinking", "enable_thinking")


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
