"""The requests: their fields, types and limits, validated by pydantic at the edge.

Parsed by `parse`, which every handler calls first. Field order is the order in /docs. Invariant: a request
that left `parse` has right types and no field that we do not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from firstlight.base.errors import RequestError
from firstlight.serve.refusals import without_neutral

_MAX_SHOWN_CHARS = 200
_MAX_COUNT = 2**31 - 1
# How pydantic's names for a wrong type end; its other faults are values out of range.
_NOT_EMPTY: dict[str, Any] = {"minItems": 1, "minLength": 1}  # for /openapi.json; our words for it are better
_TYPE_FAULTS = ("_type", "_parsing", "int_from_float")


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = Field(None, description="Name of the served model; the only one if left out.")


class StreamOptions(BaseModel):
    """What a stream carries beside the text."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = Field(False, description="A last chunk without choices carries the usage.")
    continuous_usage_stats: bool = Field(False, description="Every chunk carries the usage so far.")
    include_obfuscation: bool = Field(False, description="Accepted; chunks are never padded.")


class GenerationRequest(_Request):
    """What chat and plain completions have in common."""

    max_tokens: int | None = Field(None, ge=1, le=_MAX_COUNT, description="Most tokens of an answer.")
    temperature: float | None = Field(None, description="0 is greedy. The model's own default, else 1.")
    top_p: float | None = Field(None, description="Keep the likeliest tokens with this mass.")
    top_k: int | None = Field(None, description="Keep this many tokens; 0 or -1 keeps all.")
    min_p: float | None = Field(None, description="Keep tokens at least this likely against the best.")
    frequency_penalty: float = Field(0.0, description="Against tokens by how often they came.")
    presence_penalty: float = Field(0.0, description="Against tokens that came at all.")
    repetition_penalty: float | None = Field(None, description="Divides the scores of seen tokens.")
    logit_bias: dict[str, float] = Field({}, description="Added to the scores, by token id.")
    seed: int | None = Field(None, description="Makes sampling reproducible, whatever else runs.")
    n: int = Field(1, ge=1, description="Answers for each prompt.")
    stop: str | list[str] = Field([], description="Strings that end the answer.")
    stop_token_ids: list[int] = Field([], description="Token ids that end the answer.")
    include_stop_str_in_output: bool = Field(False, description="Keep what ended the answer.")
    min_tokens: int = Field(0, ge=0, description="No end and no stop before this many tokens.")
    ignore_eos: bool = Field(False, description="Go on after the model's end token.")
    skip_special_tokens: bool = Field(True, description="Leave special tokens out of the text.")
    spaces_between_special_tokens: bool = Field(True, description="Accepted; no spaces are ever added.")
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1, description="Lower runs first.")
    stream: bool = Field(False, description="Send the answer as server-sent events while it is made.")
    stream_options: StreamOptions | None = None
    return_token_ids: bool = Field(False, description="Token ids of prompt and answer beside the text.")
    add_special_tokens: bool | None = Field(
        None, description="Put the model's begin token before the prompt. Default: true, in chats false."
    )


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions"""

    messages: list[dict[str, Any]] = Field(
        description="The conversation: role and content.", json_schema_extra={"minItems": 1}
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, le=_MAX_COUNT, description="Newer name of max_tokens."
    )
    logprobs: bool = Field(False, description="Log-probabilities of the answer's tokens.")
    top_logprobs: int | None = Field(None, ge=0, description="And of the likeliest ones at each place.")
    add_generation_prompt: bool | None = Field(
        None,
        description="Ask the template for the start of an answer. Default: true, but not with "
        "continue_final_message.",
    )
    continue_final_message: bool = Field(False, description="Go on inside the last message.")
    chat_template_kwargs: dict[str, Any] = Field({}, description="Variables for the chat template.")
    tools: list[Any] = Field([], description="Functions that the model may call.")
    tool_choice: Any = Field(None, description="auto, or none: the model is not shown the tools.")
    thinking: Any = Field(
        None, description="true, false, or {type: enabled} or {type: disabled}, for models that think."
    )
    reasoning_effort: str | None = Field(None, description="none: the same as thinking: false.")
    parallel_tool_calls: bool = Field(True, description="false: the answer ends with its first call.")
    include_reasoning: bool = Field(True, description="false: leave out what the model thinks.")


class CompletionRequest(GenerationRequest):
    """POST /v1/completions"""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(
        description="A text, token ids, or several of either.", json_schema_extra=_NOT_EMPTY
    )
    max_tokens: int | None = Field(
        None, ge=0, le=_MAX_COUNT, description="Most tokens of an answer; 16 if left out, 0 with echo only."
    )
    echo: bool = Field(False, description="Put the prompt before the answer.")
    logprobs: int | None = Field(None, ge=0, description="Log-probabilities of this many tokens a place.")


class TokenizeRequest(_Request):
    """POST /v1/tokenize: of a prompt, or of a conversation as a chat request would see it."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = Field(None, description="Default: true, with messages false.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field({})
    tools: list[Any] = Field([], description="Functions that the model may call.")
    tool_choice: Any = Field(None, description="auto, or none: the model is not shown the tools.")
    thinking: Any = Field(
        None, description="true, false, or {type: enabled} or {type: disabled}, for models that think."
    )
    reasoning_effort: str | None = Field(None, description="none: the same as thinking: false.")
    return_token_strs: bool = Field(False, description="The text of each token beside its id.")


class DetokenizeRequest(_Request):
    """POST /v1/detokenize"""

    tokens: list[int]
    skip_special_tokens: bool = False


class ProfileRequest(_Request):
    """POST /v1/profile."""

    steps: int = Field(64, ge=1, le=2000, description="Decode steps that are recorded.")
    timeout_s: float = Field(30.0, gt=0.0, le=300.0, description="After that, what there is of them.")


Parsed = TypeVar("Parsed", bound=_Request)


def parse(kind: type[Parsed], body: Mapping[str, Any]) -> Parsed:
    """The request in `body`; a `RequestError` names the first field that is wrong."""
    try:
        return kind.model_validate(without_neutral(body, kind.model_fields))
    except ValidationError as error:
        raise _first_fault(error) from None


def _first_fault(error: ValidationError) -> RequestError:
    # Of the branches of a union, the one that got furthest into the value says most.
    faults = error.errors(include_url=False, include_context=False)
    fault = max(faults, key=lambda item: (len(_path(item["loc"])), item["type"] != "missing"))
    name = ".".join(map(str, _path(fault["loc"])))
    if fault["type"] == "extra_forbidden":
        return RequestError(
            f"The parameter {name!r} is not supported. Leave it out; /docs lists what this endpoint takes.",
            param=name,
            code="unsupported_parameter",
        )
    if fault["type"] == "missing":
        return RequestError(
            f"The parameter {name!r} is missing.", param=name, code="missing_required_parameter"
        )
    shown = repr(fault["input"])
    if len(shown) > _MAX_SHOWN_CHARS:
        shown = shown[:_MAX_SHOWN_CHARS] + "…"
    message = str(fault["msg"]).replace("Input should", "it should")
    code = "invalid_type" if fault["type"].endswith(_TYPE_FAULTS) else "invalid_value"
    return RequestError(f"The parameter {name!r} is {shown}, but {message}", param=name, code=code)


def _path(location: tuple[int | str, ...]) -> list[int | str]:
    """The place in the request, without the names that pydantic gives to the branches of a union."""
    inner = [part for part in location[1:] if isinstance(part, int) or _is_field(part)]
    return [*location[:1], *inner]


def _is_field(part: str) -> bool:
    return part.isidentifier() and part not in _BRANCHES


_BRANCHES = frozenset({"str", "int", "float", "bool"})
