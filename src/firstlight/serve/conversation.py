"""A conversation in the OpenAI form, checked and made plain for a chat template.

Called by the chat and tokenize handlers. Invariant: a template sees only messages with a role and text; what
it could not show (images, tool calls) was refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from firstlight.base.errors import RequestError

MAX_MESSAGES = 4096
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXT_FIELDS = ("name",)
_REFUSED_FIELDS = {
    "tool_calls": "tool calls are not supported yet",
    "tool_call_id": "tool calls are not supported yet",
    "function_call": "tool calls are not supported yet",
    "audio": "only text is supported",
    "reasoning": "reasoning is not supported yet",
    "reasoning_content": "reasoning is not supported yet",
}
_IGNORED_FIELDS = ("refusal", "annotations")


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages for the template: "developer" becomes "system", text parts are joined by line breaks."""
    if not messages:
        raise RequestError("messages is empty; send at least one message.", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(
            f"There are {len(messages)} messages; at most {MAX_MESSAGES} are allowed.", param="messages"
        )
    return [_plain(message, f"messages.{index}") for index, message in enumerate(messages)]


def _plain(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if role in ("tool", "function"):
        raise _refused(
            f"{where}.role", f"the role {role!r} belongs to tool calls, which are not supported yet"
        )
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(
            f"{where}.role is {str(role)[:40]!r}; it must be one of {', '.join(_ROLES)}.",
            param=f"{where}.role",
        )
    plain: dict[str, Any] = {"role": _ROLES[role], "content": _content(message.get("content"), where)}
    for name, value in message.items():
        if name in ("role", "content", *_IGNORED_FIELDS) or value is None:
            continue
        if name in _REFUSED_FIELDS:
            if value in ([], ""):
                continue
            raise _refused(f"{where}.{name}", _REFUSED_FIELDS[name])
        if name not in _TEXT_FIELDS:
            raise _refused(f"{where}.{name}", "messages have no such field")
        if not isinstance(value, str):
            raise RequestError(f"{where}.{name} must be a string.", param=f"{where}.{name}")
        plain[name] = value
    return plain


def _content(content: Any, where: str) -> str:
    param = f"{where}.content"
    if isinstance(content, str):
        return content
    if content is None:
        raise RequestError(f"{param} is missing; send a text.", param=param)
    if not isinstance(content, list) or not content:
        raise RequestError(f"{param} must be a text, or a list of text parts.", param=param)
    return "\n".join(_part(part, f"{param}.{index}") for index, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        raise RequestError(f"{where} must be an object with a 'type'.", param=where)
    if kind != "text":
        raise _refused(
            f"{where}.type",
            f"the model reads only text, not content of the type {kind[:40]!r} (images, audio, files)",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text must be a string.", param=f"{where}.text")
    return text


def _refused(param: str, reason: str) -> RequestError:
    return RequestError(
        f"{param} cannot be used: {reason}. Leave it out.", param=param, code="unsupported_content"
    )
