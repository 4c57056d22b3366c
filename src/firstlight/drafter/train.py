"""Stage 4: trains the drafter with the training-time test, in one loop that can be killed anywhere.

Called by `firstlight drafter train` and `run`. Each epoch takes the shards that are captured when it begins,
so training may start while answers are still being made. Invariant: what a checkpoint holds is all that the
rest of the training depends on; rows, order and learning rate follow from it and the settings.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from firstlight.base.errors import EngineError, UsageError
from firstlight.drafter.checkpoints import Point, Progress, load_drafter, load_optimizer, save_checkpoint
from firstlight.drafter.curves import write_curves
from firstlight.drafter.make_drafter import new_drafter
from firstlight.drafter.objective import Outcome, Tally, Teacher, make_teacher, unrolled
from firstlight.drafter.packing import Row, join, plan_rows, rows_of
from firstlight.drafter.prompts import TRAIN
from firstlight.drafter.schedule import describe, epochs_done, learning_rate, share_done
from firstlight.drafter.shards import Document, Shard, read_shard
from firstlight.drafter.stages import Stage, open_stage, read_manifest, require_target
from firstlight.drafter.target import Target, read_ends
from firstlight.models.eagle3 import Eagle3Drafter

CHECKPOINT = "checkpoint.safetensors"
BETAS = (0.9, 0.95)
VALIDATION_SHARDS = 4
Say = Callable[[str], None]


class TrainSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How it is trained. `num_steps` drafts are unrolled; `rows_per_step` rows make an optimiser step.

    `max_minutes` of training end it early, with a learning rate that falls in time; 0 is no such end.
    """

    draft_vocab_size: int = 8192
    num_steps: int = 3
    step_decay: float = 0.8
    epochs: int = 4
    row_tokens: int = 512
    rows_per_step: int = 2
    learning_rate: float = 1e-3
    warmup_share: float = 0.04
    max_minutes: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.5
    seed: int = 0


@dataclass
class Limits:
    """What may end a run early, and how often it writes; none of it changes the result."""

    max_optimizer_steps: int | None = None
    checkpoint_every_s: float = 300.0
    report_every_steps: int = 10
    validate_every_rows: int = 256
    max_validation_rows: int = 24
    say: Say = field(default=lambda text: None)


class Trainer:
    """A drafter with its optimiser and its place in the data."""

    def __init__(self, out: Path, target: Target, settings: TrainSettings, limits: Limits) -> None:
        self.settings, self.limits = settings, limits
        self._captured = out / "capture"
        require_target(read_manifest(self._captured), target.record, self._captured)
        self.stage: Stage = open_stage(
            out / "train", "train", msgspec.to_builtins(settings), {}, target.record
        )
        torch.manual_seed(settings.seed)
        ends = read_ends(target.checkpoint)
        self.path = self.stage.folder / CHECKPOINT
        self.progress = Progress()
        if self.path.exists():
            self.drafter, self.progress = load_drafter(self.path, ends.embedding)
        else:
            made = new_drafter(target, ends, self._shards(), settings)
            self.drafter = made.drafter
            self.stage.manifest.numbers["vocabulary"] = made.numbers
        self.teacher: Teacher = make_teacher(
            ends, self.drafter.target_ids_R, target.checkpoint.description.norm_eps
        )
        self.optimizer = torch.optim.AdamW(
            self.drafter.parameters(),
            lr=settings.learning_rate,
            betas=BETAS,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        if self.path.exists():
            load_optimizer(self.path, self.drafter, self.optimizer, self.progress.step)
        self._saved_s = self._began_s = time.monotonic()
        self._tally, self._loss, self._num_rows = Tally(settings.num_steps), 0.0, 0

    def run(self) -> Stage:
        """Trains to the end of the last epoch, or until the limits say so."""
        settings, steps_left = self.settings, self.limits.max_optimizer_steps
        rows: list[Row] = []
        for row in self._rows():
            rows.append(row)
            if len(rows) < settings.rows_per_step:
                continue
            self._step(rows)
            rows = []
            if share_done(settings, self.progress) >= 1:
                break
            if steps_left is not None:
                steps_left -= 1
                if steps_left <= 0:
                    self._save()
                    return self.stage
        if rows:
            self._step(rows)
        self._report(final=True)
        self._save()
        self.stage.finish()
        return self.stage

    def _shards(self) -> list[Path]:
        files = sorted(read_manifest(self._captured).files)
        if not files:
            raise UsageError(
                f"{self._captured} holds no states yet.", "Run firstlight drafter capture first."
            )
        return [self._captured / name for name in files]

    def _rows(self) -> Iterator[Row]:
        """The rows from where training stands; moves `progress` on before each is handed out."""
        progress, settings = self.progress, self.settings
        while progress.epoch < settings.epochs:
            if not progress.shards:
                progress.shards = [path.name for path in self._shards()]
                random.Random(settings.seed * 1009 + progress.epoch).shuffle(progress.shards)
            while progress.shard < len(progress.shards):
                shard = read_shard(self._captured / progress.shards[progress.shard])
                yield from self._rows_of(shard)
                progress.shard, progress.row = progress.shard + 1, 0
                progress.num_rows = 0
            progress.epoch, progress.shard, progress.shards = progress.epoch + 1, 0, []

    def _rows_of(self, shard: Shard) -> Iterator[Row]:
        progress = self.progress
        seed = (self.settings.seed * 1009 + progress.epoch) * 100_003 + progress.shard
        skipped = progress.row
        plan = plan_rows(shard, self.settings.row_tokens, is_for_training, random.Random(seed))
        progress.num_rows = len(plan)
        for number, spans in enumerate(plan):
            if number < skipped:
                continue
            progress.row = number + 1
            yield join(shard, spans)

    def _step(self, rows: list[Row]) -> None:
        settings, progress = self.settings, self.progress
        began_s = time.monotonic()
        rate = learning_rate(settings, progress)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # Every supervised token has the same weight, however the rows are filled.
        total = sum(int(row.supervised_T.sum()) for row in rows)
        for row in rows:
            outcome = unrolled(self.drafter, self.teacher, row, settings.num_steps, settings.step_decay)
            share = int(row.supervised_T.sum()) / total
            torch.autograd.backward(outcome.loss * share)
            self._count(outcome, share)
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), settings.clip)
        if not math.isfinite(float(norm)):
            raise EngineError(
                f"The gradient is not finite at step {progress.step}.",
                "Lower --learning-rate; the last checkpoint is still there.",
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        progress.step += 1
        progress.tokens += total
        progress.seconds += time.monotonic() - began_s
        if progress.step % self.limits.report_every_steps == 0:
            self._report()
        if time.monotonic() - self._saved_s >= self.limits.checkpoint_every_s:
            self._save()

    def _count(self, outcome: Outcome, share: float) -> None:
        self._tally.add(outcome)
        self._loss += float(outcome.losses_S[0]) * share
        self._num_rows += 1

    def _report(self, *, final: bool = False) -> None:
        """A point on the training curve, and at times one on the validation curve."""
        progress, settings, tally = self.progress, self.settings, self._tally
        if not self._num_rows:
            return
        num_steps = max(1, round(self._num_rows / settings.rows_per_step))
        point = Point(
            step=progress.step,
            epoch=round(epochs_done(progress), 4),
            loss=self._loss / num_steps,
            accuracy=tally.accuracy,
            acceptance_length=tally.acceptance_length,
            learning_rate=learning_rate(settings, progress),
            tokens=tally.valid[0],
        )
        progress.training.append(point)
        self.limits.say(describe(point, progress, settings))
        self._tally, self._loss, self._num_rows = Tally(settings.num_steps), 0.0, 0
        if final or self._is_time_to_validate():
            found = validate(
                self.drafter, self.teacher, self._shards(), settings, self.limits.max_validation_rows
            )
            if found is not None:
                found.step, found.epoch = progress.step, point.epoch
                progress.validation.append(found)
                self.limits.say("held out: " + describe(found, progress, settings))

    def _is_time_to_validate(self) -> bool:
        # By rows and not by steps: its cost stays a few hundredths of training's, whatever a step is.
        settings, limits = self.settings, self.limits
        every_steps = max(1, limits.validate_every_rows // settings.rows_per_step)
        reports = max(1, every_steps // limits.report_every_steps)
        return self.progress.step % (reports * limits.report_every_steps) == 0

    def _save(self) -> None:
        save_checkpoint(self.path, self.drafter, self.optimizer, self.progress)
        self._saved_s = time.monotonic()
        write_curves(self.stage.folder, self.progress)
        last = self.progress.validation[-1:] or self.progress.training[-1:]
        numbers = {"step": self.progress.step, "tokens": self.progress.tokens}
        numbers |= {"last": msgspec.to_builtins(last[0])} if last else {}
        self.stage.finish_file(CHECKPOINT, numbers)
        self.limits.say(f"checkpoint at step {self.progress.step}")


def train(out: Path, target: Target, settings: TrainSettings, limits: Limits) -> Stage:
    """Runs the stage in `out`/train, from its checkpoint if there is one."""
    return Trainer(out, target, settings, limits).run()


def is_for_training(document: Document) -> bool:
    """Whether a document may be learned from."""
    return document.split == TRAIN


def validate(
    drafter: Eagle3Drafter, teacher: Teacher, shards: list[Path], settings: TrainSettings, max_rows: int
) -> Point | None:
    """A point over held-out documents of the first shards; None where they have none."""
    tally, loss, num = Tally(settings.num_steps), 0.0, 0
    with torch.no_grad():
        for path in shards[:VALIDATION_SHARDS]:
            rows = rows_of(
                read_shard(path), settings.row_tokens, lambda document: not is_for_training(document)
            )
            for row in rows:
                if num == max_rows:
                    break
                outcome = unrolled(drafter, teacher, row, settings.num_steps, settings.step_decay)
                tally.add(outcome)
                loss, num = loss + float(outcome.losses_S[0]), num + 1
    if not num:
        return None
    return Point(
        step=0,
        epoch=0.0,
        loss=loss / num,
        accuracy=tally.accuracy,
        acceptance_length=tally.acceptance_length,
        tokens=tally.valid[0],
    )
