"""The requests: their fields, types and limits, validated by pydantic at the edge.

Parsed by `parse`, which every handler calls first. Field order is the order in /docs. Invariant: a request
that left `parse` has right types and no field that we do not know.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from firstlight.base.errors import RequestError

_MAX_SHOWN_CHARS = 200
_MAX_COUNT = 2**31 - 1
# How pydantic's names for a wrong type end; its other faults are values out of range.
_NOT_EMPTY: dict[str, Any] = {"minItems": 1, "minLength": 1}  # for /openapi.json; our words for it are better
_TYPE_FAULTS = ("_type", "_parsing", "int_from_float")
# Accepted and without effect on the answer; docs/api.md lists them.
IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",  # a plain completion has no tool calls
        "stream_interval",
    }
)

_NO_TOOLS = "only chats have tools, and they have them as tools"
_NO_REASONING = "only chats control reasoning, by thinking and include_reasoning"
_NO_STRUCTURE = "structured output is not supported yet"
_NO_PROMPT_LOGPROBS = "log-probabilities of the prompt are not supported yet"
_NO_BEAMS = "beam search is not supported"


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


# Parameters of the OpenAI API and its dialects that are refused or have no effect here, with the reason. A
# parameter that would change the answer is never silently ignored: it is supported, has its neutral value,
# or the request is refused by name.


def _empty(value: Any) -> bool:
    return value in ([], {}, "", False, 0) and not isinstance(value, float)


def _is(*neutral: Any) -> Callable[[Any], bool]:
    return lambda value: any(value == item and type(value) is type(item) for item in neutral)


def _plain_text(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("type") == "text" and len(value) == 1


# name: (does this value change nothing?, why any other is refused)
REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "tools": (_empty, _NO_TOOLS),
    "tool_choice": (_is("none", "auto"), _NO_TOOLS),
    "functions": (_empty, _NO_TOOLS),
    "function_call": (_is("none", "auto"), _NO_TOOLS),
    "response_format": (_plain_text, _NO_STRUCTURE),
    "structured_outputs": (_empty, _NO_STRUCTURE),
    "guided_json": (_empty, _NO_STRUCTURE),
    "guided_regex": (_empty, _NO_STRUCTURE),
    "guided_choice": (_empty, _NO_STRUCTURE),
    "guided_grammar": (_empty, _NO_STRUCTURE),
    "modalities": (_is(["text"]), "only text is generated"),
    "audio": (_empty, "only text is generated"),
    "prediction": (_empty, "predicted outputs are not supported"),
    "web_search_options": (_empty, "there is no web search here"),
    "reasoning_effort": (_is("none"), _NO_REASONING),
    "reasoning": (_empty, _NO_REASONING),
    "include_reasoning": (_empty, _NO_REASONING),
    "thinking": (_empty, _NO_REASONING),
    "verbosity": (_is("medium"), "verbosity is not supported"),
    "prompt_logprobs": (lambda value: False, _NO_PROMPT_LOGPROBS),
    "logits_processors": (_empty, "custom logit processors are not supported"),
    "logit_processors": (_empty, "custom logit processors are not supported"),
    "suffix": (_is(""), "completion with a suffix (fill in the middle) is not supported"),
    "best_of": (_is(1), "best_of is not supported; use n and choose among the answers"),
    "use_beam_search": (_empty, _NO_BEAMS),
    "length_penalty": (_is(1, 1.0), _NO_BEAMS),
    "documents": (_empty, "documents are not supported; put their text into a message"),
    "chat_template": (
        lambda value: False,
        "a template in a request is not accepted; start the server with --chat-template FILE",
    ),
    "truncate_prompt_tokens": (lambda value: False, "prompts are never cut; shorten it before sending"),
    "prompt_embeds": (_empty, "prompts as embeddings are not supported"),
    "allowed_token_ids": (_empty, "restricting the tokens is not supported; use logit_bias"),
    "bad_words": (_empty, "bad_words is not supported; use logit_bias"),
}


def without_neutral(body: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The body without nulls, ignored parameters, and refused ones at the value that changes nothing.

    `known`: parameters of this endpoint, which are neither ignored nor refused here. Raises `RequestError`
    naming the first parameter that would change the answer.
    """
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or (name in IGNORED and name not in known):
            continue
        if name in known or name not in REFUSED:
            kept[name] = value
            continue
        changes_nothing, reason = REFUSED[name]
        if not changes_nothing(value):
            raise RequestError(
                f"The parameter {name!r} cannot be used: {reason}. Leave it out.",
                param=name,
                code="unsupported_parameter",
            )
    return kept
