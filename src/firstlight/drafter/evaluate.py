"""Stage 5: what the drafter is worth, before any server runs, with intervals and baselines beside it.

Invariant: every rate stands beside its k, and a token that the draft vocabulary lacks counts as a failure.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from firstlight.base.errors import UsageError
from firstlight.base.files import replacing
from firstlight.drafter.baselines import off_by_one
from firstlight.drafter.chain import Propose, Rounds, ngram_proposer, run_chain, unrolled_proposer
from firstlight.drafter.checkpoints import load_drafter
from firstlight.drafter.evaluate_settings import EvaluateSettings
from firstlight.drafter.make_drafter import initialise
from firstlight.drafter.objective import Tally, Teacher, make_teacher, unrolled
from firstlight.drafter.packing import rows_of
from firstlight.drafter.progress import Meter
from firstlight.drafter.prompts import HELD_OUT_PROMPT, TRAIN
from firstlight.drafter.shards import Document, Shard, read_contract, read_shard
from firstlight.drafter.stages import Stage, open_stage, read_manifest, require_target
from firstlight.drafter.target import Ends, Target, read_ends
from firstlight.drafter.train import CHECKPOINT
from firstlight.models.eagle3 import Eagle3Drafter
from firstlight.models.eagle3_latent import make_drafter

REPORT = "report.json"
RESAMPLES = 1000
Chosen = list[tuple[Path, set[str]]]  # of each shard, the documents that are measured
IN_DOMAIN, NEW_FAMILIES = "in domain (held-out prompts)", "new (held-out families)"
EAGLE, UNTRAINED, NGRAM = "eagle3", "untrained", "n-gram"


class Line(msgspec.Struct, kw_only=True):
    """One drafter on one group of documents. `low`, `high`: 95 % of bootstrap resamples of the documents."""

    drafter: str
    group: str
    k: int
    documents: int
    tokens: int = 0  # that its rounds gave
    acceptance_length: float
    low: float
    high: float
    accepted_share: float  # of the drafts
    by_position: list[float]  # unconditional: of all rounds
    conditional: list[float]


class Report(msgspec.Struct, kw_only=True):
    """The chain loop by group and drafter, and what the teacher-forced accuracy predicts for it."""

    step: int
    lines: list[Line]
    teacher_forced: dict[str, dict[str, Any]]


def evaluate(out: Path, target: Target, settings: EvaluateSettings) -> Stage:
    """Runs the stage in `out`/evaluate over the drafter as it was last stored."""
    captured = out / "capture"
    manifest = read_manifest(captured)
    require_target(manifest, target.record, captured)
    trained = read_manifest(out / "train")
    ends = read_ends(target.checkpoint)
    drafter, progress = load_drafter(out / "train" / CHECKPOINT, ends.embedding)
    given, defaults = msgspec.to_builtins(settings), msgspec.to_builtins(EvaluateSettings())
    stage = open_stage(out / "evaluate", "evaluate", given, {}, target.record, defaults)
    stage.manifest.inputs = {CHECKPOINT: trained.files[CHECKPOINT]}
    shards = [captured / name for name in sorted(manifest.files)]
    chosen = _choose(shards, settings)
    found = _chain(_drafters(drafter, ends, settings, target), chosen, settings)
    if settings.off_by_one:
        found |= off_by_one(out, target, drafter, chosen, settings)
    teacher = make_teacher(ends, drafter.target_ids_R, target.checkpoint.description.norm_eps)
    report = Report(
        step=progress.step,
        lines=_lines(found, settings),
        teacher_forced=_teacher_forced(drafter, teacher, chosen, settings.num_drafts),
    )
    with replacing(stage.folder / REPORT) as file:
        file.write(msgspec.json.format(msgspec.json.encode(report), indent=1))
    stage.finish_file(REPORT)
    stage.finish()
    return stage


def read_report(out: Path) -> Report:
    """The report of the last evaluation."""
    return msgspec.json.decode((out / "evaluate" / REPORT).read_bytes(), type=Report)


def _choose(shards: list[Path], settings: EvaluateSettings) -> Chosen:
    """Which held-out documents of which shard, the same for every drafter."""
    left: dict[str, int] = {}
    chosen = []
    for path in shards:
        names = set()
        for document in read_contract(path).documents:
            key = f"{document.split} {document.family}"
            if document.split != TRAIN and left.setdefault(key, settings.max_documents) > 0:
                left[key] -= 1
                names.add(document.id)
        chosen.append((path, names))
    if not any(names for _, names in chosen):
        raise UsageError(
            "No captured document is held out, so there is nothing to measure with.",
            "Let generate and capture go on; a few prompts of every family are held out.",
        )
    return chosen


def _drafters(
    drafter: Eagle3Drafter, ends: Ends, settings: EvaluateSettings, target: Target
) -> dict[str, Eagle3Drafter]:
    """The drafter, what it was before it learned, and those that it is to be compared with."""
    untrained = make_drafter(drafter.config, ends.embedding)
    untrained.target_ids_R.copy_(drafter.target_ids_R)
    torch.manual_seed(settings.seed)
    initialise(untrained, ends)
    found = {EAGLE: drafter, UNTRAINED: untrained}
    for folder in settings.beside:
        trained = read_manifest(Path(folder) / "train")
        require_target(trained, target.record, Path(folder) / "train")
        other, _ = load_drafter(Path(folder) / "train" / CHECKPOINT, ends.embedding)
        if other.config.state_layers != drafter.config.state_layers:
            raise UsageError(
                f"{folder} was trained on the states {list(other.config.state_layers)}, not on "
                f"{list(drafter.config.state_layers)}.",
                "Compare trainings on the same captured states.",
            )
        found[f"{Path(folder).name} (T = {trained.settings.get('num_steps')})"] = other
    return found


def _chain(
    drafters: dict[str, Eagle3Drafter], chosen: Chosen, settings: EvaluateSettings
) -> dict[str, list[tuple[Document, Rounds]]]:
    makers: dict[str, Callable[[torch.Tensor, list[int]], Propose]] = {
        name: partial(unrolled_proposer, drafter, settings.num_drafts) for name, drafter in drafters.items()
    }
    makers[NGRAM] = lambda states, tokens: ngram_proposer(tokens)
    found: dict[str, list[tuple[Document, Rounds]]] = {name: [] for name in makers}
    with Meter("chain", "documents", sum(len(names) for _, names in chosen)) as meter:
        for path, names in chosen:
            shard = read_shard(path) if names else None
            for document, states, tokens, first in _documents(shard, names):
                for name, make in makers.items():
                    rounds = run_chain(tokens, first, settings.num_drafts, make(states, tokens))
                    found[name].append((document, rounds))
                meter.add(1)
    return found


def _documents(shard: Shard | None, names: set[str]) -> list[tuple[Document, torch.Tensor, list[int], int]]:
    """States, tokens and the first index that is drafted from, of the chosen documents."""
    if shard is None:
        return []
    found = []
    for document, span in shard.spans():
        places = shard.supervised[span].nonzero()
        if document.id in names and len(places):
            found.append((document, shard.states[span], shard.tokens[span].tolist(), int(places[0])))
    return found


def groups_of(document: Document) -> tuple[str, str]:
    """The groups that a document counts in: its family, and whether that family was trained on."""
    whole = IN_DOMAIN if document.split == HELD_OUT_PROMPT else NEW_FAMILIES
    return whole, document.family


def _lines(found: dict[str, list[tuple[Document, Rounds]]], settings: EvaluateSettings) -> list[Line]:
    lines = []
    for name, results in found.items():
        grouped: dict[str, list[Rounds]] = {}
        for document, rounds in results:
            for group in groups_of(document):
                grouped.setdefault(group, []).append(rounds)
        order = sorted(grouped, key=lambda group: (group not in (IN_DOMAIN, NEW_FAMILIES), group))
        lines += [line_of(name, group, grouped[group], settings) for group in order]
    return lines


def line_of(name: str, group: str, results: list[Rounds], settings: EvaluateSettings) -> Line:
    """Pools the rounds of a group's documents."""
    num_rounds = sum(result.num_rounds for result in results)
    accepted = [sum(column) for column in zip(*(result.accepted for result in results), strict=True)]
    before = [num_rounds, *accepted[:-1]]
    low, high = bootstrap(results, settings.seed)
    return Line(
        drafter=name,
        group=group,
        k=settings.num_drafts,
        documents=len(results),
        tokens=sum(result.emitted for result in results),
        acceptance_length=sum(result.emitted for result in results) / max(num_rounds, 1),
        low=low,
        high=high,
        accepted_share=sum(accepted) / max(num_rounds * settings.num_drafts, 1),
        by_position=[count / max(num_rounds, 1) for count in accepted],
        conditional=[now / max(earlier, 1) for now, earlier in zip(accepted, before, strict=True)],
    )


def bootstrap(results: list[Rounds], seed: int) -> tuple[float, float]:
    """95 % of the acceptance lengths of resampled documents."""
    rng = random.Random(seed)
    lengths = []
    for _ in range(RESAMPLES):
        sample = rng.choices(results, k=len(results))
        lengths.append(sum(r.emitted for r in sample) / max(sum(r.num_rounds for r in sample), 1))
    lengths.sort()
    return lengths[int(0.025 * RESAMPLES)], lengths[int(0.975 * RESAMPLES) - 1]


@torch.no_grad()
def _teacher_forced(
    drafter: Eagle3Drafter, teacher: Teacher, chosen: Chosen, num_drafts: int
) -> dict[str, dict[str, Any]]:
    tallies: dict[str, Tally] = {}
    for path, names in chosen:
        shard = read_shard(path) if names else None
        for split in (HELD_OUT_PROMPT, None) if shard is not None else ():
            group = IN_DOMAIN if split else NEW_FAMILIES
            wanted = _wanted(names, in_domain=split is not None)
            for row in rows_of(shard, 512, wanted) if shard is not None else ():
                tally = tallies.setdefault(group, Tally(num_drafts))
                tally.add(unrolled(drafter, teacher, row, num_drafts, 1.0))
    return {
        group: {
            "accuracy": tally.accuracy,
            "conditional": tally.conditional,
            "predicted_acceptance_length": tally.acceptance_length,
            "k": num_drafts,
        }
        for group, tally in tallies.items()
    }


def _wanted(names: set[str], *, in_domain: bool) -> Callable[[Document], bool]:
    return lambda document: document.id in names and (document.split == HELD_OUT_PROMPT) == in_domain
