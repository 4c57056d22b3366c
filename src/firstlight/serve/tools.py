"""What a chat request says of tools: which functions there are, and whether the model may call them.

Called by `serve.chat_turn` before the template sees any of it. Invariant: what leaves here can be shown to
the model and enforced; a choice that could not be is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from firstlight.base.errors import RequestError

MAX_TOOLS = 128
MAX_DEPTH = 64  # of objects and lists in a definition
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FIELDS = ("name", "description", "parameters")
_WITHOUT_EFFECT = ("cache_control",)  # what is cached is decided here


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
