"""The built-in prompt families: each makes one user message from a random number generator.

A family is a way of asking; `HELD_OUT` are those that are never trained on, so that there is something new to
measure with. Invariant: the same seed gives the same prompts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

from firstlight.drafter import words

Family = Callable[[random.Random], str]


def _explain(rng: random.Random) -> str:
    topic, audience = rng.choice(words.TOPICS), rng.choice(words.AUDIENCES)
    return rng.choice(
        (
            f"Explain {topic} to {audience}.",
            f"What is {topic}, and why does it matter?",
            f"Give me a short introduction to {topic}.",
            f"How would you describe {topic} in three sentences?",
            f"What should everybody know about {topic}?",
        )
    )


def _list(rng: random.Random) -> str:
    things = rng.choice(words.THINGS)
    num = rng.randint(3, 10)
    return rng.choice(
        (f"List {num} {things}.", f"Name {num} {things}.", f"Give me {num} {things}, numbered.")
    )


def _write(rng: random.Random) -> str:
    topic, kind, name = rng.choice(words.TOPICS), rng.choice(words.KINDS), rng.choice(words.NAMES)
    return rng.choice(
        (
            f"Write a {kind} about {topic}.",
            f"Write a {kind} in which {name} learns about {topic}.",
            f"Write a {kind} that begins with the words: {name} had never thought about {topic}",
        )
    )


def _email(rng: random.Random) -> str:
    tone, occasion, name = rng.choice(words.TONES), rng.choice(words.OCCASIONS), rng.choice(words.NAMES)
    return rng.choice((f"Write a {tone} e-mail {occasion}.", f"Write a {tone} e-mail to {name} {occasion}."))


def _summary(rng: random.Random) -> str:
    sentences = [f"{rng.choice(words.SUBJECTS)} {rng.choice(words.DEEDS)}." for _ in range(rng.randint(3, 6))]
    ask = rng.choice(("Summarise this:", "Summarise in one sentence:", "Rewrite this in simpler words:"))
    return f"{ask} {' '.join(sentences)}"


def _code(rng: random.Random) -> str:
    task, language = rng.choice(words.TASKS), rng.choice(("Python", "Python", "JavaScript", "Java", "C"))
    return rng.choice(
        (f"Write a {language} function that {task}.", f"Show me {language} code that {task}, with comments.")
    )


def _facts(rng: random.Random) -> str:
    place = rng.choice(words.PLACES)
    return rng.choice(
        (
            f"What is the capital of {place}?",
            f"Tell me three facts about {place}.",
            f"Which languages are spoken in {place}?",
            f"What food is {place} known for?",
            f"Describe the climate of {place}.",
            f"What should I see in {place} in {rng.randint(2, 9)} days?",
        )
    )


def _compare(rng: random.Random) -> str:
    pool = rng.choice((words.TOPICS, words.PLACES))
    first, second = rng.sample(pool, 2)
    return rng.choice(
        (f"Compare {first} and {second}.", f"What is the difference between {first} and {second}?")
    )


def _classify(rng: random.Random) -> str:
    text = rng.choice(words.FEELINGS) + ". " + rng.choice(words.FEELINGS) + "."
    return rng.choice(
        (f"Is this review positive or negative? {text}", f"Classify the sentiment and say why: {text}")
    )


def _arithmetic(rng: random.Random) -> str:
    a, b, c = rng.randint(2, 99), rng.randint(2, 60), rng.randint(2, 12)
    name, other, item = *rng.sample(words.NAMES, 2), rng.choice(words.ITEMS)
    return rng.choice(
        (
            f"What is {a} + {b}?",
            f"What is {a} * {c}? Think step by step.",
            f"{name} has {a} {item} and gives {b % a} to {other}. How many does {name} have left?",
            f"{name} buys {c} boxes with {b} {item} each. How many {item} is that?",
            f"A train goes {a} km an hour for {c} hours. How far does it go?",
            f"Compute {a} - {b} + {c}, step by step.",
        )
    )


def _sequences(rng: random.Random) -> str:
    start, step = rng.randint(1, 30), rng.randint(2, 12)
    numbers = [start + step * index for index in range(5)]
    mixed = [rng.randint(1, 99) for _ in range(rng.randint(4, 8))]
    return rng.choice(
        (
            f"Continue the sequence: {', '.join(map(str, numbers))}",
            f"Sort these numbers: {', '.join(map(str, mixed))}",
            f"Sort these words by the alphabet: {', '.join(rng.sample(words.ITEMS, 5))}",
            f"Count from {start} to {start + step}.",
            f"Which of these numbers is the largest: {', '.join(map(str, mixed))}?",
        )
    )


def _advice(rng: random.Random) -> str:
    goal = rng.choice(words.GOALS)
    return rng.choice(
        (
            f"How do I {goal}?",
            f"Give me advice on how to {goal}.",
            f"I want to {goal}. What are the first steps?",
            f"What mistakes do people make when they {goal}?",
        )
    )


def _chat(rng: random.Random) -> str:
    return rng.choice(words.CHAT)


TEMPLATES: dict[str, Family] = {
    "explain": _explain,
    "list": _list,
    "write": _write,
    "email": _email,
    "summary": _summary,
    "code": _code,
    "facts": _facts,
    "compare": _compare,
    "classify": _classify,
    "arithmetic": _arithmetic,
    "sequences": _sequences,
    "advice": _advice,
    "chat": _chat,
}
HELD_OUT = ("advice", "chat")


# Families of the package reasoning-gym (the extra `drafter`), where it is installed: tasks in plain words
# with short questions. Without the package there are none, and the manifest of the prompts says so.
GYM_TASKS = (
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
GYM_HELD_OUT = ("gym-leg_counting", "gym-family_relationships")


def gym_families() -> dict[str, Family]:
    """A family for each task; none where the package is missing."""
    if find_spec("reasoning_gym") is None:
        return {}
    return {f"gym-{task}": partial(_gym_question, task) for task in GYM_TASKS}


def _gym_question(task: str, rng: random.Random) -> str:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(task, size=1, seed=rng.randrange(2**31))
    return str(dataset[0]["question"])
