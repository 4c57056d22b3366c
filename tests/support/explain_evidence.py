"""Evidence of a drafter of which everything is right, and parts of it to be changed.

Used by the tests of `drafter.explain`. Invariant: `judge` finds nothing wrong with it.
"""

from __future__ import annotations

from typing import Any

from firstlight.drafter.explain.evidence import (
    Accuracy,
    DataFacts,
    DraftMatch,
    Evidence,
    LayerMatch,
    Loaded,
    OwnLoop,
    StatesMatch,
    TeacherMatch,
    VariantAccuracy,
)

LAYERS = (2, 15, 27)


def accuracy(first: float = 0.6, length: float = 2.2, **changes: Any) -> Accuracy:
    rates = [first, first - 0.1, first - 0.15]
    values = {"k": 3, "num_tokens": 500, "accuracy": rates, "conditional": rates, "predicted_length": length}
    return Accuracy(**{**values, "in_vocabulary": first, **changes})


def states(stage: str, **changes: Any) -> StatesMatch:
    fits = [
        LayerMatch(layer=layer, cosine=0.9999, relative_l2=0.01, best_layer=layer, best_cosine=0.9999)
        for layer in (*LAYERS, 30)
    ]
    return StatesMatch(**{"stage": stage, "num_tokens": 500, "layers": fits, **changes})


def drafts(situation: str, agreement: float, **changes: Any) -> DraftMatch:
    return DraftMatch(
        situation=situation, num=100, by_position=[agreement] * 3, agreement=agreement, **changes
    )


def evidence(**changes: Any) -> Evidence:
    """Of a drafter of which everything is right."""
    values: dict[str, Any] = {
        "target": "target",
        "drafter": "drafter",
        "loaded": Loaded(layers=list(LAYERS), rope="theta 10000", target_rope="theta 10000"),
        "data": DataFacts(
            num_documents=50, num_rendered=50, supervised_share=0.5, mask_shifts={0: 50}, held_out=True
        ),
        "states": [states(stage) for stage in ("stored", "prefill", "decode", "verify")],
        "teachers": [TeacherMatch(stage=stage, num=400, agreement=0.99) for stage in ("stored", "decode")],
        "greedy_agreement": 0.99,
        "accuracy": accuracy(),
        "own_loop": OwnLoop(k=3, acceptance_length=2.2, low=2.1, high=2.3),
        "leak": 0.0,
        "weights": [],
        "drafts": [drafts("first", 0.99), drafts("later", 0.98), drafts("cached", 0.99)],
    }
    return Evidence(**{**values, **changes})


def layer(number: int, cosine: float, best: int, best_cosine: float) -> LayerMatch:
    return LayerMatch(layer=number, cosine=cosine, relative_l2=0.5, best_layer=best, best_cosine=best_cosine)


def variant(key: str, first: float, length: float) -> VariantAccuracy:
    return VariantAccuracy(key=key, what=f"the change {key}", found=accuracy(first, length))
