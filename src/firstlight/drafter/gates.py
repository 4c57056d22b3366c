"""Checks in a fixed order, each of which must hold before the next stage's numbers mean anything.

A gate says what it measured and, where it fails, which side is at fault. Invariant: a gate measures with what
a user has: the target, the captured states and the drafter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import torch
import torch.nn.functional as F

from firstlight.base.errors import ModelFileError, UsageError
from firstlight.drafter.answers import Answer, read_answers
from firstlight.drafter.capture import Capturer, CaptureSettings
from firstlight.drafter.chain import eagle_proposer, run_chain
from firstlight.drafter.explain.engine_run import acceptance_length, answer_in_engine
from firstlight.drafter.explain.order import Order
from firstlight.drafter.make_drafter import drafter_config, initialise
from firstlight.drafter.objective import Tally, make_teacher, unrolled
from firstlight.drafter.packing import Row, rows_of
from firstlight.drafter.progress import Meter
from firstlight.drafter.shards import Document, Shard, read_shard
from firstlight.drafter.stages import read_manifest, versions
from firstlight.drafter.target import Ends, Target, read_ends
from firstlight.drafter.train_settings import HEADS
from firstlight.models.eagle3 import DraftCache, Eagle3Drafter
from firstlight.models.eagle3_file import save_eagle3
from firstlight.models.eagle3_latent import make_drafter

STATES, TEACHER = "states equal the reference", "the last state is the teacher"
BY_HEART, UNROLLED = "one answer is learnt by heart", "training equals serving"
NUM_DOCUMENTS = 4  # that are computed anew by the reference
MIN_COSINE = 0.98  # of a served state with the reference's: layouts that round stay far above
MIN_TEACHER_AGREEMENT = 0.9  # of the target's own greedy choices, from the last captured state
OVERFIT_STEPS = 300
OVERFIT_RATE = 2e-3
OVERFIT_TOKENS = 64
BY_HEART_TEMPERATURE = 0.05  # the choices of the target are to be learnt, not its doubts
NUM_DRAFTS = 3
MAX_LOGIT_GAP = 1e-3


class Gate(msgspec.Struct, kw_only=True):
    """One check: `said` is what was measured, or what is wrong and on which side.

    `judged` is false where there was too little to measure with: it is neither open nor closed, and stops
    nothing.
    """

    name: str
    passed: bool
    said: str
    judged: bool = True

    @property
    def state(self) -> str:
        """In a word or two."""
        return "too few to judge" if not self.judged else "open" if self.passed else "closed"

    @property
    def stops(self) -> bool:
        """Whether nothing behind it may be run."""
        return self.judged and not self.passed


@dataclass(frozen=True)
class Check:
    """A gate that can be gone through. `of`: digest of what it measures; as long as that stays, so does what
    it says."""

    name: str
    of: str
    measure: Callable[[], Gate]


def digest_of(*parts: object) -> str:
    """Of what a gate measures, with the software that it is measured by."""
    return hashlib.sha256(msgspec.json.encode([versions(), *parts], order="deterministic")).hexdigest()


def check(out: Path, target: Target, attention: str = HEADS) -> list[Check]:
    """The gates on what is captured, in their order. `attention`: of the drafters that are tried.

    Raises `UsageError` where nothing is captured.
    """
    files = read_manifest(out / "capture").files
    if not files:
        raise UsageError(
            f"{out / 'capture'} has no states: no prompt was answered, or every answer is too short.",
            "Give other prompts, or a higher --max-tokens.",
        )
    name = min(files)
    answers_name = name.replace("states-", "answers-").replace(".safetensors", ".jsonl")
    eps = target.checkpoint.description.norm_eps
    shard = cache(lambda: read_shard(out / "capture" / name))
    answers = cache(lambda: read_answers(out / "generate", answers_name))
    ends = cache(lambda: read_ends(target.checkpoint))
    of = digest_of(files[name], target.record, attention)
    return [
        Check(STATES, of, lambda: states_gate(target, shard(), answers())),
        Check(TEACHER, of, lambda: teacher_gate(shard(), ends(), eps)),
        Check(BY_HEART, of, lambda: overfit_gate(target, shard(), ends(), answers(), attention)),
        Check(UNROLLED, of, lambda: unroll_gate(target, shard(), ends(), attention)),
    ]


def states_gate(target: Target, shard: Shard, answers: list[Answer]) -> Gate:
    """Stored states beside those of the float32 reference; of a wrong layer it says which one it is."""
    name = STATES
    num_layers = target.checkpoint.description.num_layers
    every = tuple(range(num_layers))
    reference = Capturer(target, CaptureSettings(layers=every, dtype="float32"), threads=0)
    by_id = {answer.id: answer for answer in answers}
    sums = torch.zeros(len(shard.contract.layers) + 1, num_layers + 1)
    num = 0
    documents = shard.spans()[:NUM_DOCUMENTS]
    with Meter("states of the reference", "answers", len(documents)) as meter:
        for document, span in documents:
            answer = by_id[document.id]
            (fresh,) = reference.states_of([answer.prompt_token_ids + answer.token_ids])
            stored = torch.cat((shard.states[span][1:], shard.final[span][:-1, None]), 1).float()
            # Index j + 1 of the states and index j of `final` are the same token, that of row j + 1.
            expected = fresh[1:-1].float()
            for place in range(stored.shape[1]):
                sums[place] += F.cosine_similarity(stored[:, place, None], expected, dim=-1).sum(0)
            num += len(stored)
            meter.add(1)
    cosines = sums / max(num, 1)
    named = [*shard.contract.layers, shard.contract.final_layer]
    for place, layer in enumerate(named):
        best = int(cosines[place].argmax())
        if float(cosines[place, layer]) < MIN_COSINE:
            said = (
                f"state {layer} has a cosine of {float(cosines[place, layer]):.4f} with the reference "
                f"and {float(cosines[place, best]):.4f} with state {best}: "
            )
            other = "the capture takes another layer (integration)."
            side = other if best != layer else "the engine computes it wrongly."
            return Gate(name=name, passed=False, said=said + side)
    lowest = min(float(cosines[place, layer]) for place, layer in enumerate(named))
    return Gate(name=name, passed=True, said=f"finite, and cosine at least {lowest:.5f} over {num} tokens")


def teacher_gate(shard: Shard, ends: Ends, norm_eps: float) -> Gate:
    """The target's norm and head on the last state must give the tokens that the target chose."""
    name = TEACHER
    teacher = make_teacher(ends, torch.arange(len(ends.head)), norm_eps)
    asked = shard.supervised.nonzero().squeeze(1)[:512]
    chosen = teacher.log_probs(shard.final[asked]).argmax(-1)
    share = float((chosen == shard.wanted[asked]).float().mean()) if len(asked) else 0.0
    said = f"{100 * share:.1f} % of {len(asked)} tokens follow from it"
    if share < MIN_TEACHER_AGREEMENT:
        said += ": the last state is of another block, was normed, or the answers are not greedy (data)."
    return Gate(name=name, passed=share >= MIN_TEACHER_AGREEMENT, said=said)


def unroll_gate(target: Target, shard: Shard, ends: Ends, attention: str = HEADS) -> Gate:
    """Training's unrolled drafts equal the drafter run step by step, as it is served."""
    name = UNROLLED
    drafter = _fresh(target, shard, ends, attention)
    # Outputs that are zero at first would hide a difference.
    with torch.no_grad():
        for matrix in (drafter.o_proj, drafter.down_proj):
            matrix.weight.normal_(std=0.02)
    row = _one_document(shard)
    rows = row.unroll_rows()
    place = len(rows.queries_Q) // 2
    index = int(rows.queries_Q[place])
    with torch.no_grad():
        unrolled_outputs = [output[place] for output in drafter.unroll(rows, NUM_DRAFTS)]
        cache = DraftCache()
        fused = drafter.fuse(row.states_TCH[: index + 1])
        output = drafter.advance(fused, row.tokens_T[: index + 1], cache)[-1:]
        gaps = []
        for step in range(NUM_DRAFTS):
            gaps.append(float((drafter.logits(output) - drafter.logits(unrolled_outputs[step])).abs().max()))
            later = row.tokens_T[index + step + 1 : index + step + 2]
            if step + 1 == NUM_DRAFTS or not len(later):
                break
            output = drafter.advance(drafter.feedback(output), later, cache)
    worst = max(gaps)
    said = f"largest difference of logits {worst:.1e} over {len(gaps)} drafts"
    return Gate(name=name, passed=worst <= MAX_LOGIT_GAP, said=said)


def overfit_gate(
    target: Target,
    shard: Shard,
    ends: Ends,
    answers: Sequence[Answer] = (),
    attention: str = HEADS,
) -> Gate:
    """A drafter that sees one answer only must learn it by heart, and then draft nearly all of it.

    With the `answers` of the shard it must do so in the engine, too.
    """
    name = BY_HEART
    torch.manual_seed(0)
    drafter = _fresh(target, shard, ends, attention)
    row = _one_document(shard, OVERFIT_TOKENS)
    teacher = replace(
        make_teacher(ends, drafter.target_ids_R, target.checkpoint.description.norm_eps),
        temperature=BY_HEART_TEMPERATURE,
    )
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=OVERFIT_RATE, weight_decay=0.0)
    with Meter("learning one answer by heart", "steps at most", OVERFIT_STEPS) as meter:
        for step in range(OVERFIT_STEPS):
            outcome = unrolled(drafter, teacher, row, NUM_DRAFTS, 1.0)
            torch.autograd.backward(outcome.loss)
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            tally = Tally(NUM_DRAFTS)
            tally.add(outcome)
            meter.add(1, f"{100 * min(tally.conditional):.0f} % of its drafts right")
            if step > 10 and min(tally.conditional) == 1.0:
                break
    tokens = row.tokens_T.tolist()
    first = int(row.supervised_T.nonzero()[0])
    rounds = run_chain(tokens, first, NUM_DRAFTS, eagle_proposer(drafter, row.states_TCH, tokens))
    length = rounds.acceptance_length
    # The last round is cut by the end of the answer, so that k + 1 itself may be out of reach.
    best = rounds.emitted / -(-rounds.emitted // (NUM_DRAFTS + 1))
    passed = length >= 0.9 * best
    said = f"acceptance length {length:.2f} of at most {best:.2f} after {step + 1} steps"
    if not passed:
        said += ": loss, mask or states are wrong (training)."
        return Gate(name=name, passed=False, said=said)
    answer = next((answer for answer in answers if answer.tokens[1 : len(tokens) + 1] == tokens), None)
    if answer is None:
        return Gate(name=name, passed=True, said=said)
    in_engine = _served_length(target, drafter, answer, len(tokens) + 1)
    said += f", {in_engine:.2f} in the engine"
    passed = in_engine >= 0.9 * best
    if not passed:
        said += ": the engine drafts otherwise than training (integration)."
    return Gate(name=name, passed=passed, said=said)


def _served_length(target: Target, drafter: Eagle3Drafter, answer: Answer, num_tokens: int) -> float:
    """The acceptance length of an engine that answers one prompt with the drafter."""
    with TemporaryDirectory() as folder:
        save_eagle3(Path(folder), drafter, torch.float32)
        order = Order(target=target, drafter=Path(folder), k=NUM_DRAFTS, max_tokens=num_tokens)
        prompt = answer.prompt_token_ids
        return acceptance_length(answer_in_engine(order, [prompt], [num_tokens - len(prompt)]))


def _fresh(target: Target, shard: Shard, ends: Ends, attention: str) -> Eagle3Drafter:
    """A drafter whose vocabulary holds what the shard's documents need."""
    seen = torch.cat((shard.wanted[shard.supervised], shard.tokens)).long().unique()
    ids = seen[seen >= 0]
    config = drafter_config(target, shard.contract.layers, len(ids), attention)
    drafter = make_drafter(config, ends.embedding)
    drafter.target_ids_R.copy_(ids)
    initialise(drafter, ends)
    return drafter


def _one_document(shard: Shard, max_supervised: int | None = None) -> Row:
    """The row of the first document with a long enough answer; cut behind `max_supervised` tokens."""
    for document, span in shard.spans():
        places = shard.supervised[span].nonzero().squeeze(1)
        if len(places) <= 2 * NUM_DRAFTS:
            continue
        (row,) = rows_of(shard, document.num_indices, _is(document.id))
        is_cut = max_supervised is not None and len(places) > max_supervised
        end = int(places[max_supervised]) if is_cut else len(row.tokens_T)
        return Row(
            states_TCH=row.states_TCH[:end],
            final_TH=row.final_TH[:end],
            tokens_T=row.tokens_T[:end],
            wanted_T=row.wanted_T[:end],
            supervised_T=row.supervised_T[:end],
            positions_T=row.positions_T[:end],
            document_T=row.document_T[:end],
            families_D=row.families_D,
        )
    raise ModelFileError(
        "No captured answer is long enough to check with.",
        "Raise --max-tokens of generate, or give more prompts.",
    )


def _is(name: str) -> Callable[[Document], bool]:
    return lambda document: document.id == name
