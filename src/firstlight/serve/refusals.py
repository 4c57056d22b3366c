"""Parameters of the OpenAI API and its dialects that are refused or have no effect here, with the reason.

Read by `serve.protocol` before a request is validated. Invariant: a parameter that would change the answer
is never silently ignored: it is supported, has its neutral value, or the request is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from firstlight.base.errors import RequestError

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
