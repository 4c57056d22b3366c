"""What a drafter is worth when the engine hands it the states of the wrong blocks.

The states of the next blocks (each id plus one) are captured anew for a few held-out answers: the commonest
fault of integration, measured on this very drafter. Invariant: documents, tokens and rounds are those of the
drafter's own line.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from firstlight.drafter.answers import read_answers
from firstlight.drafter.capture import MIN_DOCUMENT_TOKENS, Capturer, CaptureSettings
from firstlight.drafter.chain import Rounds, run_chain, unrolled_proposer
from firstlight.drafter.evaluate_settings import EvaluateSettings
from firstlight.drafter.shards import Document, read_contract
from firstlight.drafter.stages import read_manifest
from firstlight.drafter.target import Target
from firstlight.models.eagle3 import Eagle3Drafter

OWN_LAYERS, NEXT_LAYERS = "eagle3, these documents", "off by one layer"


def off_by_one(
    out: Path,
    target: Target,
    drafter: Eagle3Drafter,
    chosen: list[tuple[Path, set[str]]],
    settings: EvaluateSettings,
) -> dict[str, list[tuple[Document, Rounds]]]:
    """The rounds with the right states and with those of the next blocks, both captured now."""
    layers = drafter.config.state_layers
    options = read_manifest(out / "capture").settings
    dtype, kernels = options.get("dtype", "auto"), options.get("cpu_kernels", "auto")
    last = target.checkpoint.description.num_layers - 1
    few = list(_few_of_each_family(out, chosen, settings.off_by_one))
    found: dict[str, list[tuple[Document, Rounds]]] = {}
    for name, wanted in (
        (OWN_LAYERS, layers),
        (NEXT_LAYERS, tuple(min(layer + 1, last) for layer in layers)),
    ):
        if len(set(wanted)) < len(layers):
            continue  # so few blocks that the next ones are not all different
        capturer = Capturer(target, CaptureSettings(layers=wanted, dtype=dtype, cpu_kernels=kernels), 0)
        for document, tokens, num_prompt in few:
            (states,) = capturer.states_of([tokens])
            propose = unrolled_proposer(drafter, settings.num_drafts, states[:-1, :-1], tokens[1:])
            rounds = run_chain(tokens[1:], num_prompt - 1, settings.num_drafts, propose)
            found.setdefault(name, []).append((document, rounds))
    return found


def _few_of_each_family(
    out: Path, chosen: list[tuple[Path, set[str]]], most: int
) -> Iterator[tuple[Document, list[int], int]]:
    left: dict[str, int] = {}
    for path, names in chosen:
        for document, tokens, num_prompt in _documents(out, path, names):
            if left.setdefault(document.family, most) > 0:
                left[document.family] -= 1
                yield document, tokens, num_prompt


def _documents(out: Path, shard: Path, names: set[str]) -> list[tuple[Document, list[int], int]]:
    answers_name = shard.name.replace("states-", "answers-").replace(".safetensors", ".jsonl")
    answers = {answer.id: answer for answer in read_answers(out / "generate", answers_name)} if names else {}
    return [
        (document, answers[document.id].tokens, len(answers[document.id].prompt_token_ids))
        for document in read_contract(shard).documents
        if document.id in names
        and document.id in answers
        and len(answers[document.id].token_ids) >= MIN_DOCUMENT_TOKENS
    ]
