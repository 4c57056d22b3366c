"""From a request's fields to the engine's `SamplingParams`, within the server's limits.

Invariant: what the engine would reject or misread (an id outside of the vocabulary, an impossible stop) is
refused here, with the parameter's name.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from firstlight.base.config import ServerSection
from firstlight.base.errors import RequestError
from firstlight.engine.params import MAX_SEED, SamplingParams
from firstlight.serve.openai.requests import GenerationRequest

# Taken from the model's generation_config.json where a request says nothing.
DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_params(
    request: GenerationRequest,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    defaults: Mapping[str, Any],
    limits: ServerSection,
    vocab_size: int,
) -> SamplingParams:
    """The parameters of the first answer. Raises `RequestError` for what is out of range."""
    _check_limits(request, limits, logprobs)
    given = {name: getattr(request, name) for name in DEFAULTED}
    chosen = {name: value if value is not None else defaults.get(name) for name, value in given.items()}
    if chosen["top_k"] == -1:
        chosen["top_k"] = 0
    return SamplingParams(
        **{name: value for name, value in chosen.items() if value is not None},
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        logit_bias=_logit_bias(request.logit_bias, vocab_size),
        seed=request.seed if request.seed is not None else random.getrandbits(62),
        stop=stop_strings(request.stop, limits),
        stop_token_ids=_known_ids("stop_token_ids", request.stop_token_ids, vocab_size),
        min_tokens=request.min_tokens,
        max_tokens=max_tokens,
        ignore_eos=request.ignore_eos,
        logprobs=logprobs,
    )


def of_answer(params: SamplingParams, number: int) -> SamplingParams:
    """The parameters of answer `number` of a request with several: the next seed."""
    if number == 0:
        return params
    assert params.seed is not None
    seed = params.seed + number
    return msgspec.structs.replace(params, seed=seed if seed <= MAX_SEED else seed - 2 * MAX_SEED)


def stop_strings(stop: str | list[str], limits: ServerSection) -> tuple[str, ...]:
    """The stop strings as a tuple, each of them possible."""
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > limits.max_stop:
        raise RequestError(
            f"stop has {len(stops)} strings; this server takes at most {limits.max_stop} (--max-stop).",
            param="stop",
        )
    for text in stops:
        if not text:
            raise RequestError(
                "stop holds an empty string, which would end every answer before it begins; leave it out.",
                param="stop",
            )
        if len(text) > limits.max_stop_chars:
            raise RequestError(
                f"A stop string has {len(text)} characters; at most {limits.max_stop_chars} are allowed "
                "(--max-stop-chars).",
                param="stop",
            )
    return tuple(stops)


def _check_limits(request: GenerationRequest, limits: ServerSection, logprobs: int | None) -> None:
    if request.n > limits.max_choices:
        raise RequestError(
            f"n is {request.n}; this server makes at most {limits.max_choices} answers (--max-choices). "
            "Send several requests.",
            param="n",
        )
    if logprobs is not None and logprobs > limits.max_top_logprobs:
        name = "top_logprobs" if "top_logprobs" in type(request).model_fields else "logprobs"
        raise RequestError(
            f"{name} is {logprobs}; this server gives at most "
            f"{limits.max_top_logprobs} (--max-top-logprobs).",
            param=name,
        )
    if request.stream_options is not None and not request.stream:
        raise RequestError(
            "stream_options needs stream: true; set it, or leave the options out.", param="stream_options"
        )


def _logit_bias(biases: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    by_id: dict[int, float] = {}
    for key, bias in biases.items():
        try:
            token_id = int(key)
        except ValueError:
            raise RequestError(
                f"logit_bias has the key {key[:40]!r}; keys are token ids (see /v1/tokenize).",
                param="logit_bias",
            ) from None
        by_id[token_id] = bias
    _known_ids("logit_bias", list(by_id), vocab_size)
    return by_id


def _known_ids(name: str, ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{name} holds the token id {token_id}; the model knows 0 to {vocab_size - 1}.", param=name
            )
    return tuple(ids)
