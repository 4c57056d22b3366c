"""A conversation in the OpenAI form, checked and made plain for a chat template.

Invariant: a template sees only messages with a role and what it can show; the rest (images, tool calls where
it has no place for them) was refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from firstlight.base.errors import RequestError

MAX_MESSAGES = 4096
MAX_CALLS = 512  # in one message
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
# Of one role only, with the name that the template has for them.
_OF_ROLE = {"tool_calls": "assistant", "reasoning_content": "assistant", "tool_call_id": "tool"}
_OTHER_NAMES = {"reasoning": "reasoning_content"}
_TEXT_FIELDS = ("name", "reasoning_content", "tool_call_id")
_REFUSED_FIELDS = {
    "function_call": "calls are sent as tool_calls",
    "audio": "only text is supported",
}
_IGNORED_FIELDS = ("refusal", "annotations", "cache_control")  # a refusal is read with the content
Shows = Callable[[str], bool]  # whether the template mentions a field


def plain_messages(messages: Sequence[Mapping[str, Any]], shows: Shows) -> list[dict[str, Any]]:
    """Messages for the template: "developer" becomes "system", text parts are joined by line breaks."""
    if not messages:
        raise RequestError("messages is empty; send at least one message.", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(
            f"There are {len(messages)} messages; at most {MAX_MESSAGES} are allowed.", param="messages"
        )
    plain = [_plain(message, f"messages.{index}", shows) for index, message in enumerate(messages)]
    _check_results(plain)
    return plain


def _check_results(messages: Sequence[Mapping[str, Any]]) -> None:
    """Results of tools are results of calls. An assistant's message without `tool_calls` may have calls in
    its content, as models of other families write them; and an empty id names nothing.
    """
    caller: Mapping[str, Any] | None = None
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            caller = message
        elif message["role"] == "tool":
            _check_result(message["tool_call_id"], caller, f"messages.{index}")


def _check_result(call_id: str, caller: Mapping[str, Any] | None, where: str) -> None:
    if caller is None:
        raise RequestError(
            f"{where} has the role 'tool', and no message of the role 'assistant' stands before it; send the "
            "message with the call, too.",
            param=where,
        )
    known = [call["id"] for call in caller.get("tool_calls", ())]
    if call_id and known and all(known) and call_id not in known:
        raise RequestError(
            f"{where}.tool_call_id is {call_id[:80]!r}, which is no call of the assistant's message before "
            f"it ({', '.join(known)[:200]}).",
            param=f"{where}.tool_call_id",
        )


def _plain(message: Mapping[str, Any], where: str, shows: Shows) -> dict[str, Any]:
    role = message.get("role")
    if role == "function":
        raise _refused(f"{where}.role", "results of functions are sent in the role 'tool'")
    if not isinstance(role, str) or role not in _ROLES:
        found = "missing" if role is None else repr(role)[:40]
        raise RequestError(
            f"{where}.role is {found}; it must be one of {', '.join(_ROLES)}.",
            param=f"{where}.role",
        )
    plain: dict[str, Any] = {"role": _ROLES[role]}
    content = message.get("content")
    if content is None and role == "assistant":  # an answer that was a refusal, as OpenAI's models give it
        content = message.get("refusal")
    if content is not None or not message.get("tool_calls"):
        plain["content"] = _content(content, where, role)
    for name, value in message.items():
        if name in ("role", "content", *_IGNORED_FIELDS) or value is None or value == []:
            continue
        if value == "" and name not in ("name", "tool_call_id"):
            continue
        name = _OTHER_NAMES.get(name, name)
        _check_field(role, name, value, where, shows)
        plain[name] = _calls(value, f"{where}.{name}") if name == "tool_calls" else value
    if role == "tool" and "tool_call_id" not in plain:
        raise RequestError(
            f"{where}.tool_call_id is missing; say which call this is the result of.",
            param=f"{where}.tool_call_id",
        )
    return plain


def _check_field(role: str, name: str, value: Any, where: str, shows: Shows) -> None:
    param = f"{where}.{name}"
    if name in _REFUSED_FIELDS:
        raise _refused(param, _REFUSED_FIELDS[name])
    if name in _OF_ROLE:
        if _OF_ROLE[name] != role:
            raise _refused(param, f"only messages of the role {_OF_ROLE[name]!r} have this field")
        if not shows(name):
            raise _refused(param, "the model's chat template has no place for it")
    elif name not in _TEXT_FIELDS:
        raise _refused(param, "messages have no such field")
    if name in _TEXT_FIELDS and not isinstance(value, str):
        raise RequestError(f"{param} must be a string.", param=param)


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        raise RequestError(f"{where} must be a list of at most {MAX_CALLS} calls.", param=where)
    return [_call(call, f"{where}.{index}") for index, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    """A call as templates know it. Its arguments stay the text that they are."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise RequestError(f"{where} must be a call of the type 'function'.", param=where)
    texts = {"id": call.get("id"), "name": function.get("name"), "arguments": function.get("arguments")}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise RequestError(f"{where}: its {name} must be a string.", param=where)
    called = {"name": texts["name"], "arguments": texts["arguments"]}
    return {"id": texts["id"], "type": "function", "function": called}


def _content(content: Any, where: str, role: str) -> str:
    param = f"{where}.content"
    if isinstance(content, str):
        return content
    if content is None:
        raise RequestError(f"{param} is missing; send a text.", param=param)
    if not isinstance(content, list) or not content:
        raise RequestError(f"{param} must be a text, or a list of text parts.", param=param)
    return "\n".join(_part(part, f"{param}.{index}", role) for index, part in enumerate(content))


def _part(part: Any, where: str, role: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        raise RequestError(f"{where} must be an object with a 'type'.", param=where)
    if kind == "refusal" and role != "assistant":
        raise _refused(f"{where}.type", "only messages of the role 'assistant' have refusals")
    if kind not in ("text", "refusal"):
        raise _refused(
            f"{where}.type",
            f"the model reads only text, not content of the type {kind[:40]!r} (images, audio, files)",
        )
    text = part.get(kind)
    if not isinstance(text, str):
        raise RequestError(f"{where}.{kind} must be a string.", param=f"{where}.{kind}")
    return text


def _refused(param: str, reason: str) -> RequestError:
    return RequestError(
        f"{param} cannot be used: {reason}. Leave it out.", param=param, code="unsupported_content"
    )
