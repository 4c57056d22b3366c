"""What a run folder holds, and what of it looks wrong before anything is computed.

Invariant: what is stored is compared with what the answers' ids and the target's chat template say now;
nothing is repaired.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from firstlight.drafter.answers import Answer, read_answers
from firstlight.drafter.capture import MIN_DOCUMENT_TOKENS, states_name
from firstlight.drafter.explain.evidence import DataFacts, Trained
from firstlight.drafter.explain.order import Order
from firstlight.drafter.loops import loop_start
from firstlight.drafter.prompts import PROMPTS_FILE, TRAIN, Prompt, read_prompts
from firstlight.drafter.shards import read_contract, read_shard
from firstlight.drafter.stages import MANIFEST, Manifest, read_manifest
from firstlight.drafter.target import Target
from firstlight.loading.tensor_file import read_tensor_file

MAX_SHARDS = 4
MAX_RENDERED = 64
SHOWN_TOKENS = 12


@dataclass(frozen=True)
class Marks:
    """What was stored of a document beside its states: `tokens` and `mask` [I], and in which file."""

    path: Path
    tokens: list[int]
    mask: torch.Tensor


@dataclass(frozen=True)
class Stored:
    """The stored states of a document: `states` [I, C, H], and the teacher's `final` [I, H]."""

    layers: tuple[int, ...]
    states: torch.Tensor
    final: torch.Tensor


@dataclass
class Documents:
    """What is measured with: answers, and what was stored of them by name."""

    answers: list[Answer] = field(default_factory=list)
    stored: dict[str, Stored] = field(default_factory=dict)
    facts: DataFacts | None = None
    trained: Trained | None = None


def read_documents(order: Order) -> Documents:
    """The documents of a run folder; held-out ones where there are any."""
    if order.out is None or not (order.out / "generate" / MANIFEST).exists():
        return Documents()
    # The first shards do: each has a few hundred answers.
    names = sorted(read_manifest(order.out / "generate").files)[:MAX_SHARDS]
    answers = [answer for name in names for answer in read_answers(order.out / "generate", name)]
    usable = [answer for answer in answers if _is_usable(answer, order)]
    held_out = [answer for answer in usable if answer.split != TRAIN]
    chosen = _spread(held_out or usable, order.max_documents)
    marks = _marks(order.out, names)
    facts = _facts(order, answers, marks, held_out=bool(held_out))
    stored = _stored(order.out, marks, {answer.id for answer in chosen})
    return Documents(chosen, stored, facts, _trained(order.out))


def left_out(order: Order, documents: Documents, prompts: list[list[int]]) -> list[str]:
    """What is looked at in part or not at all, with the option that changes it. `prompts`: those asked."""
    most, answers, notes = order.max_tokens, documents.answers, []
    lengths = [len(a.tokens) for a in answers] if answers else [len(prompt) for prompt in prompts]
    cut = sum(length > most for length in lengths)
    if cut:
        notes.append(
            f"{cut} of {len(lengths)} documents behind their first {most} tokens (--document-tokens)"
        )
    left = 0 if answers else len(order.prompts) - len(prompts)
    if left:
        notes.append(f"{left} prompts behind the first {len(prompts)} (--documents)")
    return notes


def _is_usable(answer: Answer, order: Order) -> bool:
    """Long enough to be drafted for, and the prompt leaves room in what is looked at."""
    least = order.k + 2
    fits = len(answer.prompt_token_ids) + least <= order.max_tokens
    return fits and len(answer.tokens) >= MIN_DOCUMENT_TOKENS and len(answer.token_ids) >= least


def _spread(answers: list[Answer], num: int) -> list[Answer]:
    """As many families as there are, one answer of each in turn, the longest first."""
    families: dict[str, list[Answer]] = {}
    for answer in sorted(answers, key=lambda answer: -len(answer.token_ids)):
        families.setdefault(answer.family, []).append(answer)
    rounds = max((len(family) for family in families.values()), default=0)
    turns = [family[turn] for turn in range(rounds) for family in families.values() if turn < len(family)]
    return turns[:num]


def _marks(out: Path, names: list[str]) -> dict[str, Marks]:
    """Tokens and masks of the stored documents by name, without their states."""
    folder = out / "capture"
    if not (folder / MANIFEST).exists():
        return {}
    finished = read_manifest(folder).files
    marks = {}
    for name in names:
        path = folder / states_name(name)
        if path.name not in finished:
            continue
        tensors, start = read_tensor_file(path, ("tokens", "supervised")), 0
        for document in read_contract(path).documents:
            span = slice(start, start + document.num_indices)
            marks[document.id] = Marks(path, tensors["tokens"][span].tolist(), tensors["supervised"][span])
            start += document.num_indices
    return marks


def _stored(out: Path, marks: dict[str, Marks], wanted: set[str]) -> dict[str, Stored]:
    stored = {}
    for path in sorted({marks[name].path for name in wanted if name in marks}):
        shard = read_shard(path)
        for document, span in shard.spans():
            if document.id in wanted:
                states, final = shard.states[span].clone(), shard.final[span].clone()
                stored[document.id] = Stored(shard.contract.layers, states, final)
    return stored


def _facts(order: Order, answers: list[Answer], marks: dict[str, Marks], *, held_out: bool) -> DataFacts:
    assert order.out is not None, "facts of no folder"
    shifts: Counter[int] = Counter()
    empty = other = 0
    for answer in answers:
        one = marks.get(answer.id)
        if one is None:
            continue
        other += one.tokens != answer.tokens[1:]
        places = one.mask.nonzero().squeeze(1)
        empty += not len(places)
        if len(places):
            shifts[int(places[0]) - (len(answer.prompt_token_ids) - 1)] += 1
    supervised = sum(int(one.mask.sum()) for one in marks.values())
    total = sum(len(one.tokens) for one in marks.values())
    rendered, otherwise, first = _render(order, answers)
    return DataFacts(
        num_documents=len(answers),
        num_rendered=rendered,
        num_rendered_otherwise=otherwise,
        first_difference=first,
        supervised_share=supervised / total if total else None,
        num_without_supervision=empty,
        mask_shifts=dict(shifts),
        num_other_tokens=other,
        changed=_changed(order.out, order.target),
        held_out=held_out,
        repeated_share=sum(loop_start(a.token_ids) is not None for a in answers) / max(len(answers), 1),
    )


def _render(order: Order, answers: list[Answer]) -> tuple[int, int, str]:
    """How many recorded prompts were rendered anew, how many are others now, and where the first differs."""
    assert order.out is not None, "prompts of no folder"
    if not (order.out / "prompts" / PROMPTS_FILE).exists() or not order.target.text.has_chat_template:
        return 0, 0, ""
    prompts: dict[str, Prompt] = {prompt.id: prompt for prompt in read_prompts(order.out)}
    known = [answer for answer in answers if answer.id in prompts][:MAX_RENDERED]
    text, first, num = order.target.text, "", 0
    for answer in known:
        asked = prompts[answer.id]
        rendered = text.encode(text.render_chat(asked.messages, tools=asked.tools), add_special_tokens=False)
        if rendered != answer.prompt_token_ids:
            num += 1
            first = first or _difference(order.target, answer.prompt_token_ids, rendered)
    return len(known), num, first


def _difference(target: Target, recorded: list[int], rendered: list[int]) -> str:
    pairs = zip(recorded, rendered, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(recorded), len(rendered)))
    shown = [repr(_shown(target, ids[place : place + SHOWN_TOKENS])) for ids in (recorded, rendered)]
    return f"from token {place} on the data have {shown[0]}, and the template makes {shown[1]}"


def _shown(target: Target, ids: list[int]) -> str:
    return target.text.decode(ids, skip_special_tokens=False)


def _changed(out: Path, target: Target) -> list[str]:
    """What of the target is not what the newest stage was made with."""
    for stage in ("capture", "generate"):
        if not (out / stage / MANIFEST).exists():
            continue
        record = read_manifest(out / stage).target
        if record is not None:
            names = ("weights", "tokenizer", "chat_template")
            return [
                name.replace("_", " ")
                for name in names
                if getattr(record, f"{name}_sha256") != getattr(target.record, f"{name}_sha256")
            ]
    return []


def _trained(out: Path) -> Trained | None:
    if not (out / "train" / MANIFEST).exists():
        return None
    manifest: Manifest = read_manifest(out / "train")
    last = manifest.numbers.get("last")
    if not isinstance(last, dict):
        return None
    accuracy = [float(value) for value in last.get("accuracy", [])]
    held_out = bool(manifest.numbers.get("vocabulary", {}).get("coverage_held_out"))
    return Trained(step=int(manifest.numbers.get("step", 0)), accuracy=accuracy, is_held_out=held_out)
