"""Stage 3: the target's hidden states for every answer, through the serving path.

The engine's own runner computes prompt and answer in one pass, with the kernels that serve, several documents
in a step. Invariant: the tokens are those that the engine saw and made; a shard of answers gives one shard of
states, whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from firstlight.base.config import EngineSection
from firstlight.base.errors import UsageError
from firstlight.drafter.answers import Answer, read_answers
from firstlight.drafter.int8_states import storage_error
from firstlight.drafter.objective import Teacher, make_teacher
from firstlight.drafter.progress import Meter
from firstlight.drafter.shards import (
    BFLOAT16,
    INT8,
    NO_TOKEN,
    Contract,
    Document,
    Shard,
    require_finite,
    write_shard,
)
from firstlight.drafter.stages import Stage, open_stage, read_manifest, require_target
from firstlight.drafter.target import Target, read_ends
from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.worker.startup import Started, quiet, start
from firstlight.ops.collectives import Group

STEP_TOKENS = 1024  # of a step, as far as whole documents fit
MAX_DOCUMENTS = 32  # of a step
MIN_DOCUMENT_TOKENS = 4
CHOICES_AT_ONCE = 256  # times the vocabulary: the logits that are held at once


class CaptureSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Which states: the residual stream after so many blocks. Empty: (2, L // 2, L - 3) of L blocks.

    `storage`: bfloat16, or int8 with a scale for each channel; the last state is bfloat16 in any case.
    """

    layers: tuple[int, ...] = ()
    dtype: str = "auto"
    cpu_kernels: str = "auto"
    storage: str = BFLOAT16


class Capturer:
    """An engine whose steps leave their states. `layers` has the last block's state at its end."""

    def __init__(
        self, target: Target, settings: CaptureSettings, threads: int, *, keeps_states: bool = True
    ) -> None:
        description = target.checkpoint.description
        self.layers = state_layers(target, settings.layers)
        section = EngineSection(
            threads=threads,
            cpu_kernels=settings.cpu_kernels,
            max_num_seqs=MAX_DOCUMENTS,
            max_batched_tokens=STEP_TOKENS,
            max_model_len=min(2 * STEP_TOKENS, description.max_position),
            prefix_cache=False,
        )
        every = (*self.layers, description.num_layers) if keeps_states else ()
        self._engine: Started = start(target.checkpoint, settings.dtype, section, Group(), quiet, every)

    @property
    def max_tokens(self) -> int:
        """The longest document that it takes."""
        return self._engine.section.max_model_len

    def states_of(self, documents: list[list[int]]) -> list[torch.Tensor]:
        """The states [T, C + 1, H] of each document, bfloat16, from one step over all of them."""
        self.run(documents)
        return self._states([len(tokens) for tokens in documents])

    def states_and_choices(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The states of one document, and behind each token the one that the target would choose [T]."""
        choices = self.run([tokens], list(range(len(tokens)))).argmax(-1)
        return self._states([len(tokens)])[0], choices

    def _states(self, counts: list[int]) -> list[torch.Tensor]:
        return list(self._engine.runner.states.to(torch.bfloat16).split(counts))

    def run(self, documents: list[list[int]], samples: Sequence[int] = ()) -> torch.Tensor:
        """One step over whole documents; logits of the rows in `samples`."""
        page_size = self._engine.section.page_size_tokens
        pages, first = [], 1
        for slot, tokens in enumerate(documents):
            num = -(-len(tokens) // page_size)
            pages.append((slot, 0, list(range(first, first + num))))
            first += num
        counts = [len(tokens) for tokens in documents]
        flat = [token for tokens in documents for token in tokens]
        slots = list(range(len(documents)))
        every = StepPlan(0, slots, [0] * len(slots), counts, flat, list(samples), pages)
        return self._engine.runner.run(every)


def state_layers(target: Target, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """The captured layers, as the contract counts them. Raises `UsageError` for one that is not there."""
    num_layers = target.checkpoint.description.num_layers
    layers = wanted or default_layers(num_layers)
    if len(set(layers)) != len(layers) or not all(0 <= layer < num_layers for layer in layers):
        raise UsageError(
            f"The layers {list(layers)} are not different states of a model with {num_layers} blocks.",
            f"Give some of 0 (embeddings) to {num_layers - 1}, such as {list(default_layers(num_layers))}.",
        )
    return tuple(sorted(layers))


def default_layers(num_layers: int) -> tuple[int, ...]:
    """An early, a middle and a late state; of a very small model what there is."""
    layers = {min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 0)}
    return tuple(sorted(layers))


def capture(
    out: Path,
    target: Target,
    settings: CaptureSettings,
    threads: int = 0,
    max_shards: int | None = None,
) -> Stage:
    """Runs the stage in `out`/capture for every finished shard of answers, or for `max_shards` more."""
    source = read_manifest(out / "generate")
    require_target(source, target.record, out / "generate")
    stage = open_states(out, target, settings)
    names = sorted(source.files)
    missing = [name for name in names if not stage.has(states_name(name))]
    todo = missing[:max_shards]
    if todo:
        capturer = Capturer(target, settings, threads)
        is_sampled = float(source.settings.get("temperature", 0.0)) > 0
        teacher = sampled_teacher(target) if is_sampled else None
        with Meter("capture", "tokens", _count_tokens(out, todo)) as meter:
            for name in todo:
                captured = _states_of_shard(out, name, capturer, meter)
                store_states(stage, name, target, capturer.layers, captured, teacher)
            stage.manifest.numbers["tokens_per_s"] = round(meter.rate, 1)
    if len(todo) == len(missing) and source.complete:
        stage.finish()
    return stage


def open_states(out: Path, target: Target, settings: CaptureSettings) -> Stage:
    """The stage's folder, to be written to by `capture`, or while answers are made."""
    require_storage(settings.storage)
    given, defaults = msgspec.to_builtins(settings), msgspec.to_builtins(CaptureSettings())
    return open_stage(out / "capture", "capture", given, {}, target.record, defaults)


def require_storage(storage: str) -> None:
    """Raises `UsageError` for a kind that is not there."""
    if storage not in (BFLOAT16, INT8):
        raise UsageError(f"States are not stored as {storage!r}.", f"Give {BFLOAT16} or {INT8}.")


def states_name(answers_name: str) -> str:
    """The file of states that belongs to a file of answers."""
    return answers_name.replace("answers-", "states-").replace(".jsonl", ".safetensors")


def _count_tokens(out: Path, names: list[str]) -> int:
    return sum(len(answer.tokens) for name in names for answer in read_answers(out / "generate", name))


def _states_of_shard(
    out: Path, name: str, capturer: Capturer, meter: Meter
) -> list[tuple[Answer, torch.Tensor]]:
    captured: list[tuple[Answer, torch.Tensor]] = []
    for group in _groups(read_answers(out / "generate", name), capturer.max_tokens):
        texts = [answer.tokens for answer in group]
        captured += zip(group, capturer.states_of(texts), strict=True)
        meter.add(sum(len(tokens) for tokens in texts))
    return captured


def store_states(
    stage: Stage,
    answers_name: str,
    target: Target,
    layers: tuple[int, ...],
    captured: list[tuple[Answer, torch.Tensor]],
    teacher: Teacher | None = None,
) -> None:
    """Writes the shard of states that belongs to a shard of answers, and records it.

    The states [T, C + 1, H] are those of prompt and answer; the last token's is not needed. `teacher`, of
    the whole vocabulary, says what the target would choose where answers were sampled.
    """
    if not captured:
        return
    parts, documents = [], []
    for answer, states in captured:
        parts.append(aligned(answer.tokens, len(answer.prompt_token_ids), states))
        num_indices = len(answer.tokens) - 1
        documents.append(
            Document(id=answer.id, family=answer.family, split=answer.split, num_indices=num_indices)
        )
    record, description = target.record, target.checkpoint.description
    contract = Contract(
        layers=layers,
        final_layer=description.num_layers,
        hidden_size=description.hidden_size,
        weights_sha256=record.weights_sha256,
        tokenizer_sha256=record.tokenizer_sha256,
        chat_template_sha256=record.chat_template_sha256,
        documents=tuple(documents),
        storage=stage.manifest.settings.get("storage", BFLOAT16),
    )
    shard = Shard(contract, **{key: torch.cat([part[key] for part in parts]) for key in parts[0]})
    path = stage.folder / states_name(answers_name)
    require_finite(shard, path)
    if teacher is not None:
        asked = shard.supervised.nonzero().squeeze(1)
        for rows in asked.split(CHOICES_AT_ONCE):
            shard.wanted[rows] = teacher.log_probs(shard.final[rows]).argmax(-1).int()
    write_shard(path, shard)
    numbers = stage.manifest.numbers
    if contract.storage == INT8:
        numbers["storage_error"] = storage_error(shard.states, numbers.get("storage_error"))
    added = {"indices": len(shard.tokens), "supervised": int(shard.supervised.sum())}
    stage.finish_file(path.name, {key: numbers.get(key, 0) + value for key, value in added.items()})


def sampled_teacher(target: Target) -> Teacher:
    """The teacher over the whole vocabulary: a sampled answer does not say what the target would choose."""
    ends, norm_eps = read_ends(target.checkpoint), target.checkpoint.description.norm_eps
    return make_teacher(ends, torch.arange(len(ends.head)), norm_eps)


def aligned(tokens: list[int], num_prompt: int, states: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of one document by the contract; `states` [T, C + 1, H] with the last state at the end.

    What the target would choose is what it chose, if the answer is greedy. No index that is trained
    needs the last token's state, which is not there when the answer was just made: it is zero in any case.
    """
    num = len(tokens)
    states = torch.cat((states[: num - 1], torch.zeros_like(states[:1])))
    x = torch.tensor(tokens, dtype=torch.int32)
    predicted = torch.cat((x[2:], torch.tensor([NO_TOKEN], dtype=torch.int32)))
    # Index j is trained where x_{j+1} and x_{j+2} are the answer's: a draft follows a token of the target's.
    index = torch.arange(num - 1)
    return {
        "states": states[: num - 1, :-1],
        "final": states[1:num, -1],
        "tokens": x[1:],
        "predicted": predicted,
        "wanted": predicted.clone(),
        "supervised": (index + 1 >= num_prompt) & (predicted != NO_TOKEN),
    }


def _groups(answers: list[Answer], max_tokens: int) -> Iterator[list[Answer]]:
    """Answers that share a step."""
    group: list[Answer] = []
    total = 0
    for answer in answers:
        num = len(answer.tokens)
        if not MIN_DOCUMENT_TOKENS <= num <= max_tokens:
            continue
        if group and (total + num > STEP_TOKENS or len(group) == MAX_DOCUMENTS):
            yield group
            group, total = [], 0
        group.append(answer)
        total += num
    if group:
        yield group
