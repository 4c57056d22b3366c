"""How one sequence is sampled.

Torch-free and serialisable. Invariant: a `SamplingParams` was validated when it was made, so that the engine
never meets a value out of range.
"""

from __future__ import annotations

import msgspec

from firstlight.base.errors import RequestError

MAX_SEED = 2**63 - 1
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_STOP_TOKEN_IDS = 64


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters with their neutral values.

    `top_k` 0 is off. `logprobs` None is off; k >= 0 asks for the sampled token and the k likeliest.
    `stop` strings are found by the text side (api process or `LLM`), never by the engine. `max_tokens` None
    means: up to the model's length. `seed` None is drawn when the request is submitted.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_k", self.top_k, 0, 2**31 - 1)
        _in_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None:
            _in_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens}); lower it.",
                    param="min_tokens",
                )
        if self.seed is not None:
            _in_range("seed", self.seed, -MAX_SEED, MAX_SEED)
        if self.logprobs is not None:
            _in_range("logprobs", self.logprobs, 0, 1024)
        _at_most("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS_ENTRIES)
        _at_most("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        for bias in self.logit_bias.values():
            _in_range("logit_bias", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _in_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    # Written so that NaN fails: every comparison with NaN is false.
    if not ((low < value if open_low else low <= value) and value <= high):
        bracket = "(" if open_low else "["
        raise RequestError(f"{name} is {value}, but must lie in {bracket}{low}, {high}].", param=name)


def _at_most(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise RequestError(f"{name} has {count} entries; at most {limit} are allowed.", param=name)
