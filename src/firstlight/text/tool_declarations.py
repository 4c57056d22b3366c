"""Definitions of functions as TypeScript-like text, as Kimi-K2.5 and later were taught to read them.

The publisher's own code for these declarations is never run. Invariant: the text is that of the published
encoder, or there is none and the template shows JSON, as there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INDENT = "  "
# What a comment says of a value beside its description, by its type.
_CONSTRAINTS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_IN_UNIONS = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_DEFINITIONS = "#/$defs/"
_ROOT = "parameters"


class _NoText(Exception):
    """A schema that this form cannot say."""


def sorted_keys(value: Any) -> Any:
    """A copy in which the keys of every object are in order."""
    if isinstance(value, Mapping):
        return {key: sorted_keys(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [sorted_keys(item) for item in value]
    return value


def typescript(tools: Sequence[Mapping[str, Any]]) -> str | None:
    """The declarations of `tools` (OpenAI's shape, keys in order); None where a schema cannot be said so."""
    try:
        functions = [_Function(tool["function"]).text() for tool in tools]
    except (_NoText, KeyError, TypeError, AttributeError):
        return None
    return "# Tools\n\n## functions\nnamespace functions {\n" + "\n".join(functions) + "\n}\n"


class _Function:
    """One function, with the definitions that its parameters refer to."""

    def __init__(self, function: Mapping[str, Any]) -> None:
        self._function = function
        self._definitions: dict[str, Any] = {}
        self._refers_to_itself = False

    def text(self) -> str:
        parameters = self._function.get("parameters") or {}
        body = self._object(parameters, "")
        parts: list[str] = []
        if self._refers_to_itself:
            lines = [
                self._property(name, item, parameters, _INDENT)
                for name, item in parameters.get("properties", {}).items()
            ]
            inside = "\n" + ",\n".join(lines) + "\n" if lines else ""
            parts.append(f"interface {_ROOT} {{{inside}}}")
            body = _ROOT
        num_known = len(self._definitions)
        parts += [self._interface(name, schema) for name, schema in list(self._definitions.items())]
        if len(self._definitions) != num_known:
            raise _NoText  # definitions inside of definitions
        description = self._function.get("description")
        name = self._function.get("name", "function")
        lines = ["\n".join(parts), _comment(description, "") if description else ""]
        return "\n".join([line for line in lines if line] + [f"type {name} = (_: {body}) => any;"])

    def _interface(self, name: str, schema: Any) -> str:
        description = schema.get("description", "")
        head = _comment(description, "") + "\n" if description else ""
        return f"{head}interface {name} {self._type(schema, '')}"

    def _type(self, schema: Any, indent: str) -> str:
        if isinstance(schema, bool):
            return "any" if schema else "null"
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join(self._type(item, indent) for item in schema["anyOf"])
        if "enum" in schema:
            return " | ".join(f'"{v}"' if isinstance(v, str) else json.dumps(v) for v in schema["enum"])
        if "type" not in schema:
            if schema:
                raise _NoText
            return "any"
        kind = schema["type"]
        if isinstance(kind, list):
            return " | ".join(_IN_UNIONS[item] for item in kind)
        if kind == "object":
            return self._object(schema, indent)
        if kind == "array":
            return self._array(schema, indent)
        return "number" if kind == "integer" else str(kind)

    def _object(self, schema: Mapping[str, Any], indent: str) -> str:
        self._definitions.update(schema.get("$defs", {}))
        inner = indent + _INDENT
        required = set(schema.get("required", ()))
        named = sorted(
            schema.get("properties", {}).items(), key=lambda item: (item[0] not in required, item[0])
        )
        lines = [self._property(name, item, schema, inner) for name, item in named]
        others = schema.get("additionalProperties")
        if others is not None:
            kind = (
                {True: "any", False: "never"}[others]
                if isinstance(others, bool)
                else self._type(others, inner)
            )
            lines.append(f"{inner}[k: string]: {kind}")
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}" if lines else "{}"

    def _property(self, name: str, schema: Any, owner: Mapping[str, Any], indent: str) -> str:
        mark = "" if name in owner.get("required", ()) else "?"
        comments = _comments(schema, indent)
        default = schema.get("default") if isinstance(schema, Mapping) else None
        if default is not None:
            comments += f"{indent}// Default: {json.dumps(default, ensure_ascii=False)}\n"
        return f"{comments}{indent}{name}{mark}: {self._type(schema, indent)}"

    def _array(self, schema: Mapping[str, Any], indent: str) -> str:
        items = schema.get("items")
        if not items:
            return "Array<any>"
        inner = indent + _INDENT
        comments = _comments(items, inner)
        if not comments:
            return f"Array<{self._type(items, indent)}>"
        return f"Array<\n{comments}{inner}{self._type(items, inner)}\n{indent}>"

    def _reference(self, reference: str) -> str:
        if reference == "#":
            self._refers_to_itself = True
            return _ROOT
        name = reference.removeprefix(_DEFINITIONS).rpartition("/")[2]
        if not reference.startswith(_DEFINITIONS) or name not in self._definitions:
            raise _NoText
        return name


def _comments(schema: Any, indent: str) -> str:
    """Lines before a value: its description, and what it is bound by."""
    if not isinstance(schema, Mapping):
        return ""
    description = schema.get("description", "")
    lines = [_comment(description, indent)] if description else []
    bounds = _bounds(schema)
    if bounds:
        lines.append(f"{indent}// {', '.join(bounds)}")
    return "".join(f"{line}\n" for line in lines)


def _bounds(schema: Mapping[str, Any]) -> list[str]:
    kind = schema.get("type")
    is_plain = isinstance(kind, str) and not {"$ref", "anyOf", "enum"} & schema.keys()
    names = _CONSTRAINTS.get(kind, ()) if is_plain and isinstance(kind, str) else ()
    return [f"{name}: {schema[name]}" for name in names if name in schema]


def _comment(text: str, indent: str) -> str:
    return "\n".join(f"{indent}// {line}" if line else "" for line in text.split("\n"))
