"""Procedural prompt families of the package reasoning-gym (the extra `drafter`), where it is installed.

Called by `prompts`. Only tasks in plain words are taken, whose questions are short. Invariant: without the
package there are no such families, and the prompts' manifest says so.
"""

from __future__ import annotations

import random
from functools import partial
from importlib.util import find_spec

from firstlight.drafter.families import Family

TASKS = (
    "basic_arithmetic",
    "chain_sum",
    "products",
    "decimal_arithmetic",
    "gcd",
    "lcm",
    "prime_factorization",
    "fraction_simplification",
    "simple_equations",
    "number_sorting",
    "word_sorting",
    "letter_counting",
    "spell_backward",
    "leg_counting",
    "count_primes",
    "time_intervals",
    "calendar_arithmetic",
    "number_sequence",
    "family_relationships",
    "syllogism",
    "gsm_symbolic",
    "aiw",
)
HELD_OUT = ("gym-leg_counting", "gym-family_relationships")


def gym_families() -> dict[str, Family]:
    """A family for each task; none where the package is missing."""
    if find_spec("reasoning_gym") is None:
        return {}
    return {f"gym-{task}": partial(_question, task) for task in TASKS}


def _question(task: str, rng: random.Random) -> str:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(task, size=1, seed=rng.randrange(2**31))
    return str(dataset[0]["question"])
