"""Stage 2: the target answers the prompts, in this process and batched, and the exact token ids are kept.

Called by `firstlight drafter generate` and `run`. Writes answers in shards of some hundred prompts; a shard
that is finished is never made again. Invariant: text is never tokenised again: prompt and answer are the ids
that the engine saw and made.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from firstlight.base.files import replacing
from firstlight.drafter.loops import loop_start
from firstlight.drafter.progress import Meter
from firstlight.drafter.prompts import PROMPTS_FILE, Prompt, read_prompts
from firstlight.drafter.stages import Stage, open_stage, read_manifest
from firstlight.drafter.target import Target
from firstlight.engine.params import SamplingParams
from firstlight.llm import LLM, Completion

MIN_ANSWER_TOKENS = 8  # what a cut loop must leave to be worth keeping


class Answer(msgspec.Struct, kw_only=True):
    """One answered prompt. `cut_tokens`: what was taken off its end because it only repeated."""

    id: str
    family: str
    split: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: str
    cut_tokens: int = 0


class GenerateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How answers are made. Temperature 0 is what a drafter is measured with."""

    max_tokens: int = 256
    max_prompt_tokens: int = 512
    temperature: float = 0.0
    shard_prompts: int = 256
    seed: int = 0


def generate(
    out: Path,
    target: Target,
    settings: GenerateSettings,
    engine: dict[str, Any],
    max_shards: int | None = None,
) -> Stage:
    """Runs the stage in `out`/generate, or at most `max_shards` more of its shards."""
    prompts = read_prompts(out)
    inputs = {PROMPTS_FILE: read_manifest(out / "prompts").files[PROMPTS_FILE]}
    stage = open_stage(out / "generate", "generate", msgspec.to_builtins(settings), inputs, target.record)
    shards = list(_shards(prompts, settings.shard_prompts))
    missing = [(name, part) for name, part in shards if not stage.has(name)]
    todo = missing[:max_shards]
    if todo:
        llm = LLM(str(target.path), progress=False, **engine)
        done = len(prompts) - sum(len(part) for _, part in missing)
        with Meter("generate", "prompts", len(prompts), done) as meter:
            for name, part in todo:
                _answer_shard(stage, name, part, settings, llm)
                totals = stage.manifest.numbers
                meter.add(len(part), f"{totals['answer_tokens']:,} tokens, {totals['loops']} loops")
    if len(todo) == len(missing):
        stage.finish()
    return stage


def read_answers(folder: Path, name: str) -> list[Answer]:
    """The answers of one shard."""
    decode = msgspec.json.Decoder(Answer).decode
    return [decode(row) for row in (folder / name).read_bytes().splitlines()]


def _shards(prompts: list[Prompt], size: int) -> Iterator[tuple[str, list[Prompt]]]:
    for number, start in enumerate(range(0, len(prompts), size)):
        yield f"answers-{number:05d}.jsonl", prompts[start : start + size]


def _answer_shard(
    stage: Stage, name: str, prompts: list[Prompt], settings: GenerateSettings, llm: LLM
) -> None:
    token_lists = [
        llm.text.encode(llm.text.render_chat(prompt.messages), add_special_tokens=False) for prompt in prompts
    ]
    chosen = [
        (prompt, tokens)
        for prompt, tokens in zip(prompts, token_lists, strict=True)
        if len(tokens) <= settings.max_prompt_tokens
    ]
    params = SamplingParams(
        temperature=settings.temperature, max_tokens=settings.max_tokens, seed=settings.seed
    )
    completions = llm.generate([tokens for _, tokens in chosen], params)
    answers = [_answer(prompt, done) for (prompt, _), done in zip(chosen, completions, strict=True)]
    kept = [
        answer for answer in answers if len(answer.token_ids) >= MIN_ANSWER_TOKENS or not answer.cut_tokens
    ]
    with replacing(stage.folder / name) as output:
        output.write(b"".join(msgspec.json.encode(answer) + b"\n" for answer in kept))
    before = stage.manifest.numbers
    added = {
        "answers": len(kept),
        "answer_tokens": sum(len(answer.token_ids) for answer in kept),
        "loops": sum(answer.cut_tokens > 0 for answer in answers),
        "loop_tokens_cut": sum(answer.cut_tokens for answer in answers),
        "dropped_as_loops": len(answers) - len(kept),
        "too_long_prompts": len(prompts) - len(chosen),
    }
    stage.finish_file(name, {key: before.get(key, 0) + value for key, value in added.items()})


def _answer(prompt: Prompt, done: Completion) -> Answer:
    tokens = done.token_ids
    start = loop_start(tokens)
    kept = tokens if start is None else tokens[:start]
    return Answer(
        id=prompt.id,
        family=prompt.family,
        split=prompt.split,
        prompt_token_ids=done.prompt_token_ids,
        token_ids=kept,
        finish_reason=done.finish_reason or "",
        cut_tokens=len(tokens) - len(kept),
    )
