"""Stage 2: the target answers the prompts, in this process or on a server, and the exact token ids are kept.

Writes answers in shards of some hundred prompts, and in the same pass (in this process) the shards of their
hidden states; what is finished is never made again. Invariant: text is never tokenised again: prompt and
answer are the ids that the engine saw and made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from firstlight.base.files import replacing
from firstlight.drafter.answers import Answer
from firstlight.drafter.capture import (
    MIN_DOCUMENT_TOKENS,
    CaptureSettings,
    open_states,
    sampled_teacher,
    store_states,
)
from firstlight.drafter.loops import loop_start
from firstlight.drafter.progress import Meter
from firstlight.drafter.prompts import PROMPTS_FILE, Prompt, read_prompts
from firstlight.drafter.remote import RemoteEngine
from firstlight.drafter.stages import Stage, open_stage, read_manifest
from firstlight.drafter.tapped import Tapped, TappedEngine
from firstlight.drafter.target import Target
from firstlight.engine.params import SamplingParams

PARALLEL = 32  # requests to a server at once
MIN_ANSWER_TOKENS = 8  # what a cut loop must leave to be worth keeping


class GenerateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How answers are made; at temperature 0 for what is measured. `url`: of a server that answers.

    `max_prompt_tokens`: of prompts that are answered; 0: as many as the model's length leaves.
    """

    max_tokens: int = 256
    max_prompt_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    url: str = ""
    shard_prompts: int = 256
    seed: int = 0


def generate(
    out: Path,
    target: Target,
    settings: GenerateSettings,
    capture: CaptureSettings,
    engine: dict[str, Any],
    max_shards: int | None = None,
) -> Stage:
    """Runs the stage in `out`/generate, or at most `max_shards` more of its shards.

    The states go to `out`/capture with the settings of `capture`. `engine` are fields of `EngineSection`.
    """
    prompts = read_prompts(out)
    inputs = {PROMPTS_FILE: read_manifest(out / "prompts").files[PROMPTS_FILE]}
    given, defaults = msgspec.to_builtins(settings), msgspec.to_builtins(GenerateSettings())
    stage = open_stage(out / "generate", "generate", given, inputs, target.record, defaults)
    shards = list(_shards(prompts, settings.shard_prompts))
    missing = [(name, part) for name, part in shards if not stage.has(name)]
    todo = missing[:max_shards]
    if todo:
        states = open_states(out, target, capture)
        encode = partial(_encode, target)
        most = _most_prompt_tokens(target, settings)
        longest = max((n for _, part in todo for p in part if (n := len(encode(p))) <= most), default=0)
        if settings.url:
            source: TappedEngine | RemoteEngine = RemoteEngine(
                settings.url, int(engine.get("max_num_seqs", PARALLEL))
            )
        else:
            source = TappedEngine(target, capture, _with_room(engine, longest + settings.max_tokens, target))
        answerer = _Answerer(stage, states, target, settings, source)
        done = len(prompts) - sum(len(part) for _, part in missing)
        with Meter("generate", "prompts", len(prompts), done) as meter:
            for name, part in todo:
                answerer.shard(name, part, meter)
            if (dropped := stage.manifest.numbers.get("too_long_prompts", 0)) > 0:
                meter.say(_dropped_words(dropped, len(prompts), most, settings))
    if len(todo) == len(missing):
        stage.finish()
    return stage


def _shards(prompts: list[Prompt], size: int) -> Iterator[tuple[str, list[Prompt]]]:
    for number, start in enumerate(range(0, len(prompts), size)):
        yield f"answers-{number:05d}.jsonl", prompts[start : start + size]


@dataclass(frozen=True)
class _Answerer:
    """Makes one shard of answers after the other, and the shard of states beside each."""

    stage: Stage
    states: Stage
    target: Target
    settings: GenerateSettings
    engine: TappedEngine | RemoteEngine

    def shard(self, name: str, prompts: list[Prompt], meter: Meter) -> None:
        settings, numbers = self.settings, self.stage.manifest.numbers
        most = _most_prompt_tokens(self.target, settings)
        chosen = [(prompt, self._encode(prompt)) for prompt in prompts]
        chosen = [(prompt, tokens) for prompt, tokens in chosen if len(tokens) <= most]
        params = SamplingParams(
            temperature=settings.temperature,
            top_p=settings.top_p,
            max_tokens=settings.max_tokens,
            seed=settings.seed,
        )
        note = _so_far(numbers)
        tapped = self.engine.answer(
            [tokens for _, tokens in chosen], params, lambda num: meter.add(num, note)
        )
        meter.add(len(prompts) - len(chosen))
        together = zip(chosen, tapped, strict=True)
        pairs = [(_answer(prompt, done), done.states) for (prompt, _), done in together]
        kept = [(a, s) for a, s in pairs if len(a.token_ids) >= MIN_ANSWER_TOKENS or not a.cut_tokens]
        with replacing(self.stage.folder / name) as output:
            output.write(b"".join(msgspec.json.encode(answer) + b"\n" for answer, _ in kept))
        added = {
            "answers": len(kept),
            "answer_tokens": sum(len(answer.token_ids) for answer, _ in kept),
            "loops": sum(answer.cut_tokens > 0 for answer, _ in pairs),
            "loop_tokens_cut": sum(answer.cut_tokens for answer, _ in pairs),
            "dropped_as_loops": len(pairs) - len(kept),
            "too_long_prompts": len(prompts) - len(chosen),
        }
        self.stage.finish_file(name, {key: numbers.get(key, 0) + value for key, value in added.items()})
        meter.add(0, _so_far(numbers))
        if isinstance(self.engine, RemoteEngine):
            return
        # Killed between the two, the answers are there without states: the stage capture makes those.
        with_states = [(a, s[: len(a.tokens)]) for a, s in kept if len(a.tokens) >= MIN_DOCUMENT_TOKENS]
        teacher = sampled_teacher(self.target) if settings.temperature > 0 else None
        store_states(self.states, name, self.target, self.engine.layers, with_states, teacher)

    def _encode(self, prompt: Prompt) -> list[int]:
        return _encode(self.target, prompt)


def _encode(target: Target, prompt: Prompt) -> list[int]:
    text = target.text
    return text.encode(text.render_chat(prompt.messages, tools=prompt.tools), add_special_tokens=False)


def _most_prompt_tokens(target: Target, settings: GenerateSettings) -> int:
    """What the settings allow, and what leaves room for a whole answer in the model's length."""
    room = target.checkpoint.description.max_position - settings.max_tokens
    return min(settings.max_prompt_tokens or room, room)


def _with_room(engine: dict[str, Any], num_tokens: int, target: Target) -> dict[str, Any]:
    """The engine's options, its length raised to what the longest prompt and its answer need."""
    given = engine.get("max_model_len")
    most = target.checkpoint.description.max_position
    return (
        engine if given is None or given >= num_tokens else engine | {"max_model_len": min(num_tokens, most)}
    )


def _dropped_words(dropped: int, total: int, most: int, settings: GenerateSettings) -> str:
    is_own = settings.max_prompt_tokens == 0 or most < settings.max_prompt_tokens
    remedy = (
        f"that is the model's own length less --max-tokens {settings.max_tokens}"
        if is_own
        else "--max-prompt-tokens takes longer ones; 0: up to the model's own length"
    )
    return f"{dropped} of {total} prompts are not answered: they have more than {most} tokens ({remedy})"


def _so_far(numbers: dict[str, Any]) -> str:
    """Of the shards that are finished; nothing before the first."""
    if "answer_tokens" not in numbers:
        return ""
    return f"{numbers['answer_tokens']:,} tokens, {numbers.get('loops', 0)} loops"


def _answer(prompt: Prompt, done: Tapped) -> Answer:
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
