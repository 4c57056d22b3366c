"""Which drafters `--drafter` may name; and which trees of drafts `--draft-tokens`, `--draft-top-k` and
`--draft-nodes` may ask for.

Called when the settings are resolved, and by the engine for those that were given to it directly. Invariant:
a tree that passes can be made, by a drafter that makes trees.
"""

from __future__ import annotations

import os
from pathlib import Path

from firstlight.base.config import EngineSection
from firstlight.base.disposable_child import require_answer
from firstlight.base.errors import UsageError

NGRAM = "ngram"
MOST_NODES = 63  # with the token before them, as many rows as drafts may bring a step to


def most_nodes(depth: int, top_k: int) -> int:
    """The guesses of the last known token, and those of the drafts that go on in each later place."""
    return top_k + (depth - 1) * top_k * top_k


def check_drafter(drafter: str) -> None:
    """Raises a `UsageError` for a `--drafter` that is no known word and no path that exists."""
    if drafter in (NGRAM, "none"):
        return
    require_answer(drafter)
    if Path(os.path.expanduser(drafter)).exists():
        return
    what = "no such folder" if "/" in drafter else "no drafter"
    raise UsageError(
        f"--drafter {drafter}: there is {what}.",
        "Check the path. Use ngram, the folder of an EAGLE-3 drafter, a small model of the same family, or "
        "none.",
    )


def refuse_trees(top_k: int, what: str) -> None:
    """Raises a `UsageError` if the settings ask for trees, of which `what` makes none."""
    if top_k > 1:
        raise UsageError(
            f"--draft-top-k {top_k} asks for trees of drafts, but {what} makes chains alone.",
            "Leave out --draft-top-k and --draft-nodes, or give the folder of an EAGLE-3 drafter.",
        )


def check_tree(engine: EngineSection) -> None:
    """Raises a `UsageError` for settings that contradict each other."""
    depth, top_k, nodes = engine.draft_tokens, engine.draft_top_k, engine.draft_nodes
    if engine.drafter == NGRAM:
        refuse_trees(top_k, "prompt lookup")
    if not nodes:
        return
    if top_k == 1:
        raise UsageError(
            f"--draft-nodes {nodes} is for trees, but with --draft-top-k 1 drafts are a chain of "
            f"--draft-tokens {depth}.",
            "Add --draft-top-k 4, or leave out --draft-nodes.",
        )
    if nodes < depth:
        raise UsageError(
            f"--draft-nodes {nodes} is less than --draft-tokens {depth}: such a tree cannot be that deep.",
            f"Use --draft-nodes {depth * top_k}, or --draft-tokens {nodes}.",
        )
    most = most_nodes(depth, top_k)
    if nodes > most:
        raise UsageError(
            f"--draft-nodes {nodes}: --draft-tokens {depth} and --draft-top-k {top_k} make {most} at most.",
            f"Use --draft-nodes {most}, or raise one of them.",
        )
