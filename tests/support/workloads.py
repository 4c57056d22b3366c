"""Requests of every kind for the tests of the invariants: lengths across borders, every sampling parameter.

Invariant: the same arguments give the same requests.
"""

from __future__ import annotations

import random
from typing import Any

from firstlight.engine.messages import Submit
from support.engines import submit

# Around the borders of pages (16), of attention's buckets (64, 128), of the reference's row tile (32).
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 150)
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 30, "min_p": 0.02},
    {"temperature": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    {"repetition_penalty": 1.3, "logit_bias": {5: 2.0, 6: -100.0}},
    {"temperature": 1.0, "min_tokens": 5, "stop_token_ids": (50, 51), "logit_bias": {50: 5.0}},
)


def circling(num: int, max_tokens: int = 60) -> list[Submit]:
    """Requests whose answers have three words and so go round in circles: prompt lookup follows them."""
    few = {"logit_bias": {5: 9.0, 6: 9.0, 7: 9.0}, "max_tokens": max_tokens, "ignore_eos": True}
    return [
        submit(f"circle{n}", range(3 + n, 30), temperature=0.2 * (n % 2), seed=n, logprobs=n % 3, **few)
        for n in range(num)
    ]


def requests(num: int, vocabulary: int, *, max_tokens: int = 12, seed: int = 0) -> list[Submit]:
    """`num` requests with prompts of `LENGTHS` in turn; every third shares a prefix with another."""
    chance = random.Random(seed)
    shared = [chance.randrange(3, vocabulary) for _ in range(200)]
    made = []
    for number in range(num):
        length = LENGTHS[(number * 5) % len(LENGTHS)]
        prompt = [chance.randrange(3, vocabulary) for _ in range(length)]
        if number % 3 == 0:
            cut = min(length - 1, 20 + 16 * (number % 5))
            prompt[:cut] = shared[:cut]
        params = {"seed": 100 + number, "logprobs": number % 4, "max_tokens": max_tokens}
        made.append(submit(f"r{number}", prompt, **{**params, **KINDS[number % len(KINDS)]}))
    return made
