"""Measures all that `explain` judges by: the data, the engine's states and drafts, what the drafter is
worth.

Each part fills its own field of the evidence; a part that cannot be measured leaves a note. Invariant: it
gets what a user has - a checkpoint, a target, data - and changes none of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from firstlight.base.errors import FirstlightError, UsageError
from firstlight.drafter.answers import Answer
from firstlight.drafter.capture import Capturer, CaptureSettings
from firstlight.drafter.explain.documents import Documents, left_out, read_documents
from firstlight.drafter.explain.draft_keys import match_keys
from firstlight.drafter.explain.drafts import ROUNDS, Drafted, match_drafts
from firstlight.drafter.explain.engine_run import (
    Answered,
    Listening,
    acceptance_length,
    engine_section,
    start_drafting,
)
from firstlight.drafter.explain.evidence import Evidence, Loaded, Served, VariantAccuracy
from firstlight.drafter.explain.leak import leak_of
from firstlight.drafter.explain.order import Order
from firstlight.drafter.explain.ranks import states_of_ranks
from firstlight.drafter.explain.samples import Sample, measure, own_loop
from firstlight.drafter.explain.states import Pair, match_ranks, match_states, match_teacher
from firstlight.drafter.explain.variants import Variant, config_variants, engine_variants
from firstlight.drafter.explain.weights import compare_weights
from firstlight.drafter.progress import Meter
from firstlight.drafter.tapped import Tapped, TappedEngine
from firstlight.drafter.target import Ends, read_ends
from firstlight.engine.params import SamplingParams
from firstlight.models.eagle3 import Eagle3Drafter
from firstlight.models.eagle3_file import load_eagle3

NUM_PARTS = 8


def collect(order: Order) -> Evidence:
    """All the evidence, with a meter on standard error. Raises `FirstlightError`s."""
    with Meter("explain", "parts", NUM_PARTS) as meter:
        return _Collector(order, meter).run()


@dataclass
class _Reference:
    """The float32 reference: states [T, L + 1, H] of any tokens, and what it would choose behind each."""

    capturer: Capturer

    def of(self, tokens: list[int]) -> torch.Tensor:
        return self.with_choices(tokens)[0]

    def with_choices(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        states, choices = self.capturer.states_and_choices(tokens)
        return states.float(), choices


class _Collector:
    """The parts, in the order of the way from the data to the served draft."""

    def __init__(self, order: Order, meter: Meter) -> None:
        self.order, self.target, self._meter = order, order.target, meter
        description = order.target.checkpoint.description
        self.num_layers, self.norm_eps = description.num_layers, description.norm_eps
        self.ends: Ends = read_ends(order.target.checkpoint)
        self.every = tuple(range(self.num_layers))
        self.drafter, loaded = self._load()
        self.evidence = Evidence(
            target=order.target.record.name,
            drafter=str(order.drafter),
            loaded=loaded,
            served=order.served,
            notes=list(order.notes),
        )

    def run(self) -> Evidence:
        documents = read_documents(self.order)
        self.evidence.data, self.evidence.trained = documents.facts, documents.trained
        self._meter.add(1, "decode of the engine")
        tapped = self._decode(documents)
        self._meter.add(1, "states of the reference")
        answers = documents.answers or [_as_answer(index, one) for index, one in enumerate(tapped)]
        reference = _Reference(
            Capturer(self.target, CaptureSettings(layers=self.every, dtype="float32"), self.order.threads)
        )
        samples = [self._sample(answer, reference) for answer in answers]
        samples = [sample for sample in samples if len(sample.queries) > self.order.k]
        if not samples:
            raise UsageError(
                "The target's answers are too short to draft for.", "Give prompts that it answers at length."
            )
        self._check_decode(tapped, reference)
        self._meter.add(1, "states of the engine")
        self._check_stored(documents, samples)
        self._check_prefill(samples)
        self._check_ranks(samples)
        self._meter.add(1, "accuracy of the drafter")
        if self.drafter is not None:
            self._measure(self.drafter, samples, reference)
        return self.evidence

    def _load(self) -> tuple[Eagle3Drafter | None, Loaded]:
        target = self.target.checkpoint.description
        try:
            loaded = load_eagle3(self.order.drafter, target, self.ends.embedding)
        except FirstlightError as error:
            self._meter.say(f"the strict reader refuses it: {error}")
            return None, Loaded(error=str(error), remedy=error.hint)
        config = loaded.drafter.config
        return loaded.drafter, Loaded(
            notes=list(loaded.notes),
            layers=list(config.state_layers),
            rope=_rope(config.rope_theta, config.rope_scaling),
            target_rope=_rope(target.rope_theta, target.rope_scaling),
        )

    def _decode(self, documents: Documents) -> list[Tapped]:
        """Short answers of the engine, with the states that its decode left."""
        order, text = self.order, self.target.text
        prompts = [answer.prompt_token_ids for answer in documents.answers]
        if not prompts:
            prompts = [
                text.encode(text.render_chat(asked.messages, tools=asked.tools), add_special_tokens=False)
                for asked in order.prompts[: order.max_documents]
            ]
        if not prompts:
            raise UsageError(
                "There is no document to measure with.",
                "Give --out with a run folder, or --file with prompts.",
            )
        settings = CaptureSettings(layers=self.every, cpu_kernels=order.cpu_kernels)
        section = engine_section(order)
        options: dict[str, Any] = {
            name: getattr(section, name)
            for name in ("threads", "max_num_seqs", "max_model_len", "kv_memory_bytes")
        }
        engine = TappedEngine(self.target, settings, options)
        self.evidence.notes += left_out(order, documents, prompts)
        params = SamplingParams(temperature=0.0, max_tokens=order.answer_tokens, seed=0)
        return engine.answer([prompt[: order.max_tokens] for prompt in prompts], params, lambda _: None)

    def _sample(self, answer: Answer, reference: _Reference) -> Sample:
        tokens = answer.tokens[: self.order.max_tokens]
        num_prompt = min(len(answer.prompt_token_ids), len(tokens))
        return Sample(answer.id, tokens, num_prompt, *reference.with_choices(tokens))

    def _check_decode(self, tapped: list[Tapped], reference: _Reference) -> None:
        pairs, equal, num = [], 0, 0
        finals, chosen = [], []
        for one in tapped:
            tokens = (one.prompt_token_ids + one.token_ids)[: len(one.states)]
            first = len(one.prompt_token_ids) - 1
            expected, choices = reference.with_choices(tokens)
            pairs.append((one.states[first + 1 :].float(), expected[first + 1 :]))
            made = torch.tensor(one.token_ids)[: len(tokens) - first]
            equal, num = equal + int((choices[first:] == made).sum()), num + len(made)
            finals.append(one.states[first:, -1])
            chosen.append(made)
        layers = (*self.every, self.num_layers)
        self.evidence.states.append(match_states("decode", layers, pairs))
        self.evidence.greedy_agreement = equal / max(num, 1)
        teacher = match_teacher("decode", self.ends, self.norm_eps, torch.cat(finals), torch.cat(chosen))
        self.evidence.teachers.append(teacher)

    def _check_stored(self, documents: Documents, samples: list[Sample]) -> None:
        pairs: list[Pair] = []
        last: list[Pair] = []
        finals, chosen = [], []
        layers: tuple[int, ...] = ()
        for sample in samples:
            stored = documents.stored.get(sample.name)
            if stored is None:
                continue
            layers, num = stored.layers, len(sample.tokens) - 1
            pairs.append((stored.states[:num], sample.states[:num]))
            last.append((stored.final[: num - 1, None], sample.states[1:num]))
            queries = sample.queries
            finals.append(stored.final[queries])
            chosen.append(sample.choices[queries + 1])
        if not pairs:
            return
        match = match_states("stored", layers, pairs)
        final = match_states("stored", (self.num_layers,), last)
        match.layers.extend(final.layers)
        self.evidence.states.append(match)
        self.evidence.teachers.append(
            match_teacher("stored", self.ends, self.norm_eps, torch.cat(finals), torch.cat(chosen))
        )

    def _check_prefill(self, samples: list[Sample]) -> None:
        settings = CaptureSettings(layers=self.every, cpu_kernels=self.order.cpu_kernels)
        capturer = Capturer(self.target, settings, self.order.threads)
        pairs = [(capturer.states_of([sample.tokens])[0].float(), sample.states) for sample in samples]
        self.evidence.states.append(match_states("prefill", (*self.every, self.num_layers), pairs))

    def _check_ranks(self, samples: list[Sample]) -> None:
        if self.order.num_ranks < 2 or not samples:
            return
        layers, sample = (*self.every, self.num_layers), samples[0]
        ranks = states_of_ranks(
            self.target, self.order.num_ranks, layers, sample.tokens, self.order.cpu_kernels
        )
        match = match_states(f"{len(ranks)} ranks", layers, [(ranks[0], sample.states)])
        self.evidence.states.append(match_ranks(match, layers, ranks, sample.states))

    def _measure(self, drafter: Eagle3Drafter, samples: list[Sample], reference: _Reference) -> None:
        evidence, k = self.evidence, self.order.k
        if self.order.served is not None:
            k = self.order.served.k
        evidence.accuracy = measure(drafter, samples, k)
        evidence.own_loop = own_loop(drafter, samples, k)
        evidence.leak = leak_of(drafter, samples[0])
        self._meter.add(1, "variants of the drafter")
        rope = self.target.checkpoint.description.rope_scaling
        variants = list(config_variants(drafter, self.ends, self.num_layers, rope))
        evidence.variants = [
            VariantAccuracy(key=v.key, what=v.what, found=measure(v.drafter, samples, k)) for v in variants
        ]
        self._meter.add(1, "drafts of the engine")
        self._check_engine(drafter, [*variants, *engine_variants(drafter)], samples, reference)
        self._meter.add(2)

    def _check_engine(
        self, drafter: Eagle3Drafter, variants: list[Variant], samples: list[Sample], reference: _Reference
    ) -> None:
        order, evidence = self.order, self.evidence
        try:
            started = start_drafting(order)
        except FirstlightError as error:
            evidence.notes.append(f"the engine did not start with the drafter: {error} {error.hint}")
            return
        evidence.weights = compare_weights(started.drafter, order.drafter, self.ends)
        listening = Listening(started)
        prompts = [sample.tokens[: sample.num_prompt] for sample in samples]
        lengths = [len(sample.tokens) - sample.num_prompt for sample in samples]
        first = listening.answer(prompts, lengths)
        # Again, with part of the answers: their pages are found in the prefix cache.
        halves = [length // 2 for length in lengths]
        longer = [one.prompt + one.tokens[:half] for one, half in zip(first, halves, strict=True)]
        answered = first + listening.answer(
            longer, [length - half for length, half in zip(lengths, halves, strict=True)]
        )
        expected = [reference.of(one.prompt + one.tokens) for one in answered]
        evidence.drafts = match_drafts(
            drafter, variants, [_drafted(one, s) for one, s in zip(answered, expected, strict=True)]
        )
        evidence.draft_keys = match_keys(drafter, list(zip(answered, expected, strict=True)))
        pairs = [_states_pair(one, s) for one, s in zip(answered, expected, strict=True)]
        evidence.states.append(match_states("verify", drafter.config.state_layers, pairs))
        evidence.engine = Served(
            acceptance_length=acceptance_length(first), k=order.k, source="the engine in this process"
        )
        made = [
            Sample("", one.prompt + one.tokens, len(one.prompt), states, torch.empty(0))
            for one, states in zip(first, expected, strict=False)
        ]
        evidence.engine_loop = own_loop(drafter, made, order.k)


def _as_answer(index: int, tapped: Tapped) -> Answer:
    return Answer(
        id=f"prompt-{index}",
        family="prompts",
        split="",
        prompt_token_ids=tapped.prompt_token_ids,
        token_ids=tapped.token_ids,
        finish_reason=tapped.finish_reason or "",
    )


def _drafted(answered: Answered, states: torch.Tensor) -> Drafted:
    tokens = answered.prompt + answered.tokens
    proposals = [p for _, p in sorted(answered.proposals.items()) if p.num_tokens < len(tokens)]
    return Drafted(tokens, states, answered.num_cached, proposals[:ROUNDS])


def _states_pair(answered: Answered, states: torch.Tensor) -> Pair:
    """The states that the engine left of positions whose token stayed, beside the reference's."""
    last = len(answered.prompt) + len(answered.tokens) - 1
    places = sorted(place for place in answered.states if place < last)
    return torch.stack([answered.states[place] for place in places]), states[places]


def _rope(theta: float, scaling: Any) -> str:
    factor = f" factor {scaling.factor:g}" if scaling.kind in ("linear", "llama3") else ""
    return f"theta {theta:g}, scaling {scaling.kind}{factor}"
