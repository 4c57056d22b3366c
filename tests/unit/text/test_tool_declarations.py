"""Definitions of functions as TypeScript-like text: what the published encoder writes for them."""

from __future__ import annotations

from typing import Any

import pytest

from firstlight.text.tool_declarations import sorted_keys, typescript


def declared(parameters: dict[str, Any], description: str | None = None) -> str | None:
    function = {"name": "f", "parameters": parameters} | ({"description": description} if description else {})
    text = typescript(sorted_keys([{"type": "function", "function": function}]))
    head, tail = "# Tools\n\n## functions\nnamespace functions {\n", "\n}\n"
    if text is None:
        return None
    assert text.startswith(head)
    assert text.endswith(tail)
    return text.removeprefix(head).removesuffix(tail)


def of_one(schema: Any) -> str | None:
    """A function with one parameter."""
    return declared({"type": "object", "properties": {"a": schema}, "required": ["a"]})


def test_a_whole_function() -> None:
    """Required parameters first, each kind by name; comments say what types cannot."""
    schema = {
        "type": "object",
        "properties": {
            "unit": {"type": "string", "enum": ["c", "f"], "default": "c", "description": "Unit."},
            "city": {"type": "string", "description": "Which city,\n\nin English.", "minLength": 1},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
            "at": {
                "type": "object",
                "properties": {"lat": {"type": "number"}},
                "additionalProperties": False,
            },
        },
        "required": ["days", "city"],
    }
    assert declared(schema, "Weather.\nNow.") == (
        "// Weather.\n// Now.\n"
        "type f = (_: {\n"
        "  // Which city,\n\n  // in English.\n  // minLength: 1\n  city: string,\n"
        "  // maximum: 7, minimum: 1\n  days: number,\n"
        "  at?: {\n    lat?: number,\n    [k: string]: never\n  },\n"
        '  // Unit.\n  // Default: "c"\n  unit?: "c" | "f"\n'
        "}) => any;"
    )


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string"}, "string"),
        ({"type": "null"}, "null"),
        ({}, "any"),
        (True, "any"),
        (False, "null"),
        ({"type": ["string", "null", "array", "object"]}, "string | null | Array<any> | {}"),
        ({"enum": ["a", 1, None, True]}, '"a" | 1 | null | true'),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "number | null"),
        ({"type": "array"}, "Array<any>"),
        ({"type": "array", "items": {"type": "integer"}}, "Array<number>"),
        ({"type": "object"}, "{}"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "{\n    [k: string]: number\n  }"),
    ],
    ids=str,
)
def test_types(schema: Any, text: str) -> None:
    assert of_one(schema) == f"type f = (_: {{\n  a: {text}\n}}) => any;"


def test_items_with_a_comment_have_lines_of_their_own() -> None:
    schema = {"type": "array", "maxItems": 3, "items": {"type": "string", "description": "One."}}
    assert of_one(schema) == (
        "type f = (_: {\n  // maxItems: 3\n  a: Array<\n    // One.\n    string\n  >\n}) => any;"
    )


def test_definitions_become_interfaces() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/D"}},
        "$defs": {"D": {"type": "object", "description": "A D.", "properties": {"b": {"$ref": "#/$defs/D"}}}},
    }
    assert declared(schema) == ("// A D.\ninterface D {\n  b?: D\n}\ntype f = (_: {\n  a?: D\n}) => any;")


def test_parameters_that_refer_to_themselves() -> None:
    schema = {"type": "object", "properties": {"next": {"$ref": "#"}, "a": {"type": "string"}}}
    assert declared(schema) == (
        "interface parameters {\n  a?: string,\n  next?: parameters\n}\ntype f = (_: parameters) => any;"
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"title": "x"},
        {"$ref": "#/definitions/x"},
        {"$ref": "#/$defs/x"},
        {"type": ["what"]},
        {"type": "array", "items": [5]},
    ],
    ids=str,
)
def test_what_cannot_be_said_is_left_to_the_template(schema: Any) -> None:
    """Which shows JSON then, as it does where the published encoder fails."""
    assert of_one(schema) is None
