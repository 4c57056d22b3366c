"""Stage 1: what the target will be asked. Writes prompts.jsonl, one conversation a line.

Prompts come from the built-in families, from the target itself (sampled from an empty user turn) and from
files. Invariant: no conversation occurs twice, and a held-out one is never marked for training.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from firstlight.base.errors import FirstlightError, ModelFileError, UsageError
from firstlight.base.files import replacing, sha256_of
from firstlight.drafter import families
from firstlight.drafter.progress import Meter
from firstlight.drafter.prompt_files import Conversation, Messages, read_prompt_file
from firstlight.drafter.stages import Stage, open_stage, read_manifest
from firstlight.drafter.target import Target
from firstlight.engine.params import SamplingParams
from firstlight.llm import LLM

PROMPTS_FILE = "prompts.jsonl"
TRAIN, HELD_OUT_PROMPT, HELD_OUT_FAMILY = "train", "held-out prompt", "held-out family"
SELF = "self"  # the family of prompts that the target made
SELF_BATCH = 128
MIN_SELF_CHARS, MAX_SELF_CHARS = 8, 500
MAX_TRIES = 40  # for a family that runs out of new prompts
MARK = "PROMPT-GOES-HERE"


class Prompt(msgspec.Struct, kw_only=True):
    """One conversation that ends with a question. `id` is made of its content."""

    id: str
    family: str
    split: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []


class PromptSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How many prompts of which kind. `files` are read whole, each as a family of its own."""

    num_templates: int = 2400
    num_gym: int = 1000
    num_self: int = 2000
    files: tuple[str, ...] = ()
    skip_bad: bool = False  # records of files that are not understood
    held_out_share: float = 0.04  # of the prompts of every family that is trained on
    seed: int = 0


def make_prompts(out: Path, target: Target, settings: PromptSettings, engine: dict[str, Any]) -> Stage:
    """Runs the stage in `out`/prompts. `engine` are options of `LLM`."""
    inputs = {file: sha256_of(_existing(file)) for file in settings.files}
    given, defaults = msgspec.to_builtins(settings), msgspec.to_builtins(PromptSettings())
    stage = open_stage(out / "prompts", "prompts", given, inputs, target.record, defaults)
    if stage.has(PROMPTS_FILE):
        stage.finish()
        return stage
    rng = random.Random(settings.seed)
    gym = families.gym_families()
    found: dict[str, Prompt] = {}
    _add(found, _templates(rng, settings.num_templates, families.TEMPLATES), settings)
    _add(found, _templates(rng, settings.num_gym if gym else 0, gym), settings)
    skipped: dict[str, int] = {}
    for file in settings.files:
        bad: list[FirstlightError] = []
        _add(found, _of_file(Path(file), target, bad if settings.skip_bad else None), settings)
        if bad:
            skipped[file] = len(bad)
            say_skipped("prompts", Path(file), bad)
    if settings.num_self:
        _add(found, _self_made(stage, target, settings, engine), settings)
    prompts = list(found.values())
    if not prompts:
        raise UsageError(
            "There is not one prompt.", "Raise --templates, --gym or --self, or give a --file with prompts."
        )
    rng.shuffle(prompts)
    with replacing(stage.folder / PROMPTS_FILE) as output:
        output.write(b"".join(msgspec.json.encode(prompt) + b"\n" for prompt in prompts))
    numbers = {"prompts": len(prompts), "families": _count(prompts), "reasoning_gym": bool(gym)}
    numbers |= {"skipped_records": skipped} if skipped else {}
    stage.finish_file(PROMPTS_FILE, numbers)
    stage.finish()
    return stage


def read_prompts(out: Path) -> list[Prompt]:
    """The prompts of a run, in their order. Raises `ModelFileError` where they were changed."""
    folder = out / "prompts"
    manifest = read_manifest(folder)
    path = folder / PROMPTS_FILE
    if not path.is_file() or sha256_of(path) != manifest.files.get(PROMPTS_FILE):
        raise ModelFileError(
            f"{path} is not the file that the stage wrote.", f"Remove {folder} and run the stage again."
        )
    decode = msgspec.json.Decoder(Prompt).decode
    return [decode(row) for row in path.read_bytes().splitlines()]


def identify(messages: Messages, tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """A name made of the content: equal conversations have the same, whatever their spaces and case."""
    text = "\x00".join(" ".join(str(m.get("content")).lower().split()) + m["role"] for m in messages)
    others = [{key: m[key] for key in m if key not in ("role", "content")} for m in messages]
    if tools or any(others):
        text += msgspec.json.encode([others, list(tools)], order="deterministic").decode()
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _add(
    found: dict[str, Prompt], made: Iterable[tuple[str, Messages | Conversation]], settings: PromptSettings
) -> None:
    for family, asked in made:
        whole = asked if isinstance(asked, Conversation) else Conversation(asked)
        name = identify(whole.messages, whole.tools)
        if name not in found:
            split = _split(family, name, settings.held_out_share)
            found[name] = Prompt(
                id=name, family=family, split=split, messages=whole.messages, tools=whole.tools
            )


def say_skipped(stage: str, path: Path, bad: Sequence[FirstlightError]) -> None:
    """A line on standard error: how many records were left out, and what the first had."""
    with Meter(stage, "records", len(bad), len(bad)) as meter:
        meter.say(f"{len(bad)} records of {path} are left out (--skip-bad); the first: {bad[0]}")


def _of_file(
    path: Path, target: Target, bad: list[FirstlightError] | None
) -> Iterator[tuple[str, Conversation]]:
    """The file's conversations that the target can be asked; what is wrong with others goes to `bad`.

    Raises the first of those errors where `bad` is None.
    """
    for asked in read_prompt_file(path, None if bad is None else bad.append):
        try:
            _require_shown(asked, target)
        except FirstlightError as error:
            if bad is None:
                raise
            bad.append(error)
        else:
            yield path.stem, asked


def _require_shown(asked: Conversation, target: Target) -> None:
    """Raises `UsageError` where the target's template takes no such conversation, or hides its tools."""
    try:
        shown = target.text.render_chat(asked.messages, tools=asked.tools)
    except FirstlightError as error:
        raise UsageError(
            f"{asked.where}: the target's chat template does not take it: {error}",
            "Mend this record, or leave such records out with --skip-bad.",
        ) from error
    if asked.tools and shown == target.text.render_chat(asked.messages):
        raise UsageError(
            f"{asked.where} has tools, and the target's chat template shows none.",
            "Remove the field tools, leave such records out with --skip-bad, or train for a model that knows "
            "tools.",
        )


def _split(family: str, name: str, share: float) -> str:
    if family in (*families.HELD_OUT, *families.GYM_HELD_OUT):
        return HELD_OUT_FAMILY
    return HELD_OUT_PROMPT if int(name, 16) % 10_000 < share * 10_000 else TRAIN


def _templates(
    rng: random.Random, total: int, table: dict[str, families.Family]
) -> Iterator[tuple[str, Messages]]:
    """As many of each family; one that has few different prompts gives what it has."""
    for index, (name, make) in enumerate(table.items()):
        wanted = total * (index + 1) // len(table) - total * index // len(table)
        seen: set[str] = set()
        for _ in range(wanted * MAX_TRIES):
            if len(seen) == wanted:
                break
            text = make(rng)
            if text not in seen:
                seen.add(text)
                yield name, [{"role": "user", "content": text}]


def _self_made(
    stage: Stage, target: Target, settings: PromptSettings, engine: dict[str, Any]
) -> Iterator[tuple[str, Messages]]:
    """What the target would ask: sampled after the opening of a user's turn, in batches that are kept."""
    llm: LLM | None = None
    opening = _opening(target)
    with Meter("prompts of the target", "tries", settings.num_self) as meter:
        for first in range(0, settings.num_self, SELF_BATCH):
            num = min(SELF_BATCH, settings.num_self - first)
            name = f"self-{first:06d}.json"
            if not stage.has(name):
                llm = llm or LLM(str(target.path), progress=False, **engine)
                texts = _sample(llm, opening, [settings.seed * 1_000_003 + first + i for i in range(num)])
                with replacing(stage.folder / name) as file:
                    file.write(msgspec.json.encode(texts))
                stage.finish_file(name)
            for text in msgspec.json.decode((stage.folder / name).read_bytes(), type=list[str]):
                yield SELF, [{"role": "user", "content": text}]
            meter.add(num)


def _opening(target: Target) -> list[int]:
    """The tokens up to where a user begins to speak."""
    rendered = target.text.render_chat([{"role": "user", "content": MARK}], add_generation_prompt=False)
    opening, found, _ = rendered.partition(MARK)
    if not found:
        raise UsageError(
            "The chat template leaves no place where a user's turn begins.", "Give --self 0 for this model."
        )
    return target.text.encode(opening, add_special_tokens=False)


def _sample(llm: LLM, opening: list[int], seeds: list[int]) -> list[str]:
    """User turns that the target ended by itself."""
    params = [SamplingParams(temperature=1.0, top_p=0.95, max_tokens=96, seed=seed) for seed in seeds]
    answers = llm.generate([opening] * len(seeds), params)
    llm.require_answers(answers)
    texts = [answer.text.strip() for answer in answers if answer.finish_reason == "stop"]
    return [text for text in texts if MIN_SELF_CHARS <= len(text) <= MAX_SELF_CHARS]


def _existing(file: str) -> Path:
    path = Path(file)
    if not path.exists():
        raise UsageError(f"{path} is not there.", "Check the path given with --file.")
    if path.is_dir():
        raise UsageError(f"{path} is a folder, no file.", "Give each file in it with a --file of its own.")
    return path


def _count(prompts: list[Prompt]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for prompt in prompts:
        row = counts.setdefault(prompt.family, {})
        row[prompt.split] = row.get(prompt.split, 0) + 1
    return dict(sorted(counts.items()))
