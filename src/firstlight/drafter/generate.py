"""Stage 2: the target answers the prompts, in this process or on a server, and the exact token ids are kept.

Called by `firstlight drafter generate` and `run`. Writes answers in shards of some hundred prompts, and
in the same pass (in this process) the shards of their hidden states; what is finished is never made again.
Invariant:
text is never tokenised again: prompt and answer are the ids that the engine saw and made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
    """How answers are made; at temperature 0 for what is measured. `url`: of a server that answers."""

    max_tokens: int = 256
    max_prompt_tokens: int = 512
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
        if settings.url:
            source: TappedEngine | RemoteEngine = RemoteEngine(
                settings.url, int(engine.get("max_num_seqs", PARALLEL))
            )
        else:
            source = TappedEngine(target, capture, engine)
        answerer = _Answerer(stage, states, target, settings, source)
        done = len(prompts) - sum(len(part) for _, part in missing)
        with Meter("generate", "prompts", len(prompts), done) as meter:
            for name, part in todo:
                answerer.shard(name, part, meter)
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
        chosen = [(prompt, self._encode(prompt)) for prompt in prompts]
        chosen = [(prompt, tokens) for prompt, tokens in chosen if len(tokens) <= settings.max_prompt_tokens]
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
        text = self.target.text
        return text.encode(text.render_chat(prompt.messages, tools=prompt.tools), add_special_tokens=False)


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
