"""Stage 4: trains the drafter with the training-time test, in one loop that can be killed anywhere.

Each epoch takes the shards that are captured when it begins, so training may start while answers are still
being made. Invariant: what a checkpoint holds is all that the rest of the training depends on; rows, order
and learning rate follow from it and the settings.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from firstlight.base.errors import EngineError, UsageError
from firstlight.drafter.checkpoints import Point, Progress, load_drafter, load_optimizer, save_checkpoint
from firstlight.drafter.curves import Board, why_no_picture, write_curves
from firstlight.drafter.make_drafter import first_drafter
from firstlight.drafter.objective import Outcome, Tally, Teacher, make_teacher, unrolled
from firstlight.drafter.packing import Row, join, plan_rows, rows_of
from firstlight.drafter.prompts import TRAIN
from firstlight.drafter.ranks import Ranks, together
from firstlight.drafter.shards import Document, Shard, read_shard
from firstlight.drafter.stages import Stage, open_stage, read_manifest, require_target
from firstlight.drafter.target import Target, open_target, read_ends
from firstlight.drafter.train_settings import (
    BFLOAT16,
    Limits,
    TrainSettings,
    describe,
    epochs_done,
    learning_rate,
    require_device,
    require_known,
    share_done,
    silent,
)

CHECKPOINT = "checkpoint.safetensors"
BETAS = (0.9, 0.95)
VALIDATION_SHARDS = 4


class Trainer:
    """A drafter with its optimiser and its place in the data."""

    def __init__(
        self, out: Path, target: Target, settings: TrainSettings, limits: Limits, ranks: Ranks | None = None
    ) -> None:
        require_known(settings)
        require_device(limits.device)
        self.settings, self.limits, self.ranks = settings, limits, ranks or Ranks()
        self._captured = out / "capture"
        require_target(read_manifest(self._captured), target.record, self._captured)
        given, defaults = msgspec.to_builtins(settings), msgspec.to_builtins(TrainSettings())
        self.stage: Stage = open_stage(out / "train", "train", given, {}, target.record, defaults)
        torch.manual_seed(settings.seed)
        ends = read_ends(target.checkpoint)
        self.path = self.stage.folder / CHECKPOINT
        self.progress = Progress()
        if self.path.exists():
            self.drafter, self.progress = load_drafter(self.path, ends.embedding)
        else:
            made = first_drafter(target, ends, self._shards(), settings)
            self.drafter = made.drafter
            self.stage.manifest.numbers["vocabulary"] = made.numbers
        norm_eps = target.checkpoint.description.norm_eps
        self.teacher: Teacher = make_teacher(ends, self.drafter.target_ids_R, norm_eps).to(limits.device)
        self.drafter = self.drafter.to(limits.device)
        self.optimizer = torch.optim.AdamW(
            self.drafter.parameters(),
            lr=settings.learning_rate,
            betas=BETAS,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        if self.path.exists():
            load_optimizer(self.path, self.drafter, self.optimizer, self.progress.step)
        self._board = Board(self.stage.folder) if limits.tensorboard and self.ranks.rank == 0 else None
        self._saved_s = time.monotonic()
        self._tally, self._loss, self._num_steps = Tally(settings.num_steps), 0.0, 0

    def run(self) -> Stage:
        """Trains to the end of the last epoch, or until the limits say so."""
        settings, steps_left = self.settings, self.limits.max_optimizer_steps
        if self.stage.has(CHECKPOINT) and share_done(settings, self.progress) >= 1:
            return self._finished()  # at an earlier run
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
                    self._save(picture=False)
                    return self.stage
        if rows:
            self._step(rows)
        self._report(final=True)
        self._save()
        return self._finished()

    def _finished(self) -> Stage:
        if self.ranks.rank == 0:
            self.stage.finish()
            if (lacks := why_no_picture()) is not None:
                self.limits.say(lacks)
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
                # States may be arriving: every rank takes the shards that the first one sees.
                progress.shards = self.ranks.of_first([path.name for path in self._shards()])
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
        for row in rows[self.ranks.rank :: self.ranks.size]:
            outcome = self._unrolled(row)
            share = int(row.supervised_T.sum()) / total
            torch.autograd.backward(outcome.loss * share)
            self._tally.add(outcome)
            self._loss += float(outcome.losses_S[0]) * share
        self.ranks.add_gradients(self.drafter.parameters())
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
        self._num_steps += 1
        progress.seconds = self.ranks.of_first(progress.seconds + time.monotonic() - began_s)
        if progress.step % self.limits.report_every_steps == 0:
            self._report()
        if time.monotonic() - self._saved_s >= self.limits.checkpoint_every_s:
            self._save()

    def _unrolled(self, row: Row) -> Outcome:
        settings, device = self.settings, self.limits.device
        narrow = torch.autocast(torch.device(device).type, torch.bfloat16, enabled=settings.dtype == BFLOAT16)
        with narrow:
            return unrolled(
                self.drafter,
                self.teacher,
                row.to(device),
                settings.num_steps,
                settings.step_decay,
                settings.loss,
            )

    def _report(self, *, final: bool = False) -> None:
        """A point on the training curve, and at times one on the validation curve."""
        progress, settings = self.progress, self.settings
        if not self._num_steps:
            return
        self._loss, *counts = self.ranks.add_numbers([self._loss, *self._tally.counts()])
        tally = Tally.of(counts)
        point = Point(
            step=progress.step,
            epoch=round(epochs_done(progress), 4),
            loss=self._loss / self._num_steps,
            accuracy=tally.accuracy,
            acceptance_length=tally.acceptance_length,
            learning_rate=learning_rate(settings, progress),
            tokens=tally.valid[0],
        )
        self._tally, self._loss, self._num_steps = Tally(settings.num_steps), 0.0, 0
        self._show(point, "", progress.training)
        if self.ranks.rank == 0 and (final or self._is_time_to_validate()):
            found = self._validate()
            if found is not None:
                found.step, found.epoch = progress.step, point.epoch
                self._show(found, "held out: ", progress.validation)

    def _show(self, point: Point, what: str, curve: list[Point]) -> None:
        curve.append(point)
        self.limits.say(what + describe(point, self.progress, self.settings))
        if self._board is not None:
            self._board.add("held out" if what else "training", point)

    def _is_time_to_validate(self) -> bool:
        # By rows and not by steps: its cost stays a few hundredths of training's, whatever a step is.
        settings, limits = self.settings, self.limits
        every_steps = max(1, limits.validate_every_rows // settings.rows_per_step)
        reports = max(1, every_steps // limits.report_every_steps)
        return self.progress.step % (reports * limits.report_every_steps) == 0

    @torch.no_grad()
    def _validate(self) -> Point | None:
        """A point over held-out documents of the first shards; None where they have none."""
        settings = self.settings
        tally, loss, num = Tally(settings.num_steps), 0.0, 0
        for path in self._shards()[:VALIDATION_SHARDS]:
            held_out = rows_of(
                read_shard(path), settings.row_tokens, lambda document: not is_for_training(document)
            )
            for row in itertools.islice(held_out, self.limits.max_validation_rows - num):
                outcome = self._unrolled(row)
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

    def _save(self, *, picture: bool = True) -> None:
        self._saved_s = time.monotonic()
        if self.ranks.rank:
            return
        save_checkpoint(self.path, self.drafter, self.optimizer, self.progress)
        write_curves(self.stage.folder, self.progress, picture=picture)
        last = self.progress.validation[-1:] or self.progress.training[-1:]
        numbers = {"step": self.progress.step, "tokens": self.progress.tokens}
        numbers |= {"last": msgspec.to_builtins(last[0])} if last else {}
        self.stage.finish_file(CHECKPOINT, numbers)
        self.limits.say(f"checkpoint at step {self.progress.step}")


def train(out: Path, target: Target, settings: TrainSettings, limits: Limits) -> Stage:
    """Runs the stage in `out`/train, from its checkpoint if there is one."""
    given = (out, target.path, settings, replace(limits, say=silent))
    with together(limits.num_ranks, _other_rank, given) as ranks:
        return Trainer(out, target, settings, limits, ranks).run()


def _other_rank(ranks: Ranks, out: Path, target: Path, settings: TrainSettings, limits: Limits) -> None:
    Trainer(out, open_target(target), settings, limits, ranks).run()


def is_for_training(document: Document) -> bool:
    """Whether a document may be learned from."""
    return document.split == TRAIN
