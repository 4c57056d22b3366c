"""Faults of eagle3 pipelines and engines, each planted where the report of it had it.

Used by the fault-injection suite. A plant changes files of a copied run, or patches one seam of the engine
or of training; the explanation is never told. Numbers are those of the fault catalogue in docs/drafter.md.
Invariant: the reference (float32, on one rank) is never patched, unless the fault is in what all share.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from firstlight.base.files import sha256_of
from firstlight.drafter import generate as generate_module
from firstlight.drafter.capture import capture
from firstlight.drafter.generate import GenerateSettings, generate
from firstlight.drafter.packing import Row
from firstlight.drafter.shards import Shard, read_shard, write_shard
from firstlight.drafter.target import read_ends
from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.scheduler.sequence import Sequence
from firstlight.engine.speculation.eagle3 import Eagle3TreeDrafter
from firstlight.engine.speculation.eagle3_plain import PlainLayer
from firstlight.engine.speculation.places import slots_of
from firstlight.loading.tensor_file import read_tensor_file, write_tensor_file
from firstlight.models.batch import ForwardBatch
from firstlight.models.decoder import Decoder
from firstlight.models.eagle3 import Eagle3Drafter
from firstlight.models.eagle3_unroll import Block, UnrollRows
from firstlight.models.layers.mlp import GatedMlp
from support.drafters import SMALL_ENGINE
from support.fault_runs import ANSWER_TOKENS, STATES, FaultRun, edit_config

Patch = pytest.MonkeyPatch


def shards(run: FaultRun) -> list[Path]:
    return sorted((run.out / "capture").glob("states-*.safetensors"))


def change_shards(run: FaultRun, change: Callable[[Shard], dict[str, Any]]) -> None:
    for path in shards(run):
        shard = read_shard(path)
        write_shard(path, replace(shard, **change(shard)))
        record(path)


def record(path: Path) -> None:
    """Makes the manifest beside a file say that its stage wrote it so."""
    manifest = msgspec.json.decode((path.parent / "manifest.json").read_bytes())
    manifest["files"][path.name] = sha256_of(path)
    (path.parent / "manifest.json").write_bytes(msgspec.json.encode(manifest))


# --- the checkpoint ---


def ids_one_lower(run: FaultRun) -> None:
    """1: ids of SGLang's files, which name the block, where blocks that have run are counted."""
    edit_config(run.folder, eagle_aux_hidden_state_layer_ids=[1, 3, 4])


def as_speculators(run: FaultRun) -> None:
    """11: a file of speculators that does not say norm_before_residual, which is true there by default."""
    config = msgspec.json.decode((run.folder / "config.json").read_bytes())
    own = {name: config.pop(name) for name in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")}
    config["architectures"] = ["LlamaForCausalLM"]
    outer = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
    text = msgspec.json.encode({**outer, **own, "transformer_layer_config": config})
    (run.folder / "config.json").write_bytes(text)


def without_rope_scaling(run: FaultRun) -> None:
    """20: an export that forgets rope_scaling."""
    edit_config(run.folder, rope_scaling=None)


def small_vocabulary(run: FaultRun) -> None:
    """34: every third token of the draft vocabulary is missing; training counted accuracy without those."""
    path = run.folder / "model.safetensors"
    tensors = read_tensor_file(path)
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    kept = torch.arange(len(ids)) % 3 != 0
    tensors["lm_head.weight"] = tensors["lm_head.weight"][kept].clone()
    tensors["d2t"] = ids[kept] - torch.arange(int(kept.sum()))
    tensors["t2d"] = torch.zeros_like(tensors["t2d"])
    tensors["t2d"][ids[kept]] = True
    write_tensor_file(path, tensors, {})
    edit_config(run.folder, draft_vocab_size=int(kept.sum()))


# --- the data ---


def another_rendering(run: FaultRun, patch: Patch) -> None:
    """25: the data were made with thinking on, and are served with it off: the same template file."""
    encode = generate_module._Answerer._encode

    def with_thinking(self: Any, prompt: Any) -> list[int]:
        return [*encode(self, prompt), *self.target.text.encode("<think>\n", add_special_tokens=False)]

    for stage in ("generate", "capture"):
        for path in (run.out / stage).iterdir():
            path.unlink()
    with patch.context() as scope:
        scope.setattr(generate_module._Answerer, "_encode", with_thinking)
        settings = GenerateSettings(max_tokens=ANSWER_TOKENS)
        generate(run.out, run.target, settings, STATES, SMALL_ENGINE)
        capture(run.out, run.target, STATES, threads=1)


def empty_mask(run: FaultRun) -> None:
    """26: the answer's turns were not found."""
    change_shards(run, lambda shard: {"supervised": torch.zeros_like(shard.supervised)})


def late_mask(run: FaultRun) -> None:
    """27: the mask follows the embedded token, so that the first draft of an answer is not trained."""

    def change(shard: Shard) -> dict[str, Any]:
        mask = shard.supervised.clone()
        for _, span in shard.spans():
            first = int(mask[span].nonzero()[0])
            mask[span.start + first] = False
        return {"supervised": mask}

    change_shards(run, change)


def last_state_one_block_off(run: FaultRun) -> None:
    """3: what is stored as the last state is that before the last block."""
    from firstlight.drafter.answers import read_answers
    from firstlight.drafter.capture import Capturer, CaptureSettings

    capturer = Capturer(run.target, CaptureSettings(layers=(7,), dtype="float32"), threads=1)
    answers = {
        answer.id: answer
        for path in (run.out / "generate").glob("answers-*.jsonl")
        for answer in read_answers(path.parent, path.name)
    }

    def change(shard: Shard) -> dict[str, Any]:
        parts = [capturer.states_of([answers[document.id].tokens])[0][1:, 0] for document, _ in shard.spans()]
        return {"final": torch.cat(parts)}

    change_shards(run, change)


def states_of_the_next_token(run: FaultRun) -> None:
    """33, in the data: index j holds the state of x_{j+1}, which has seen what is to be predicted."""

    def change(shard: Shard) -> dict[str, Any]:
        states = shard.states.clone()
        for _, span in shard.spans():
            states[span.start : span.stop - 1] = shard.states[span.start + 1 : span.stop]
        return {"states": states}

    change_shards(run, change)


# --- training ---


class LeakingRows(UnrollRows):
    """A query sees the index behind its own, too."""

    def blocks(self) -> list[Block]:
        found = []
        for block in super().blocks():
            hidden = block.hidden_QT.clone()
            hidden[:, 1:] &= block.hidden_QT[:, :-1]
            found.append(replace(block, hidden_QT=hidden))
        return found


def leaking_mask(patch: Patch) -> None:
    """33: in training a draft may attend to the index behind its own."""
    rows_of = Row.unroll_rows
    patch.setattr(Row, "unroll_rows", lambda self: LeakingRows(**vars(rows_of(self))))


# --- the engine ---


def last_block_not_captured(patch: Patch) -> None:
    """3, in the decoder that all share: the last block's state is that before it."""
    keep = Decoder._keep

    def early(self: Decoder, layer: int, x_TH: torch.Tensor, batch: ForwardBatch) -> None:
        keep(self, layer, x_TH, batch)
        last = len(self._blocks)
        if layer == last - 1 and last in self._places and batch.states_TCH is not None:
            self._before_last = x_TH.clone()  # type: ignore[attr-defined]
        if layer == last and last in self._places and batch.states_TCH is not None:
            batch.states_TCH[:, self._places[last]] = self._before_last  # type: ignore[attr-defined]

    patch.setattr(Decoder, "_keep", early)


def partial_sums(patch: Patch) -> None:
    """7: states are taken before the sum over the ranks of the block's last product is made."""
    keep, call = Decoder._keep, GatedMlp.__call__
    missing: dict[int, torch.Tensor] = {}

    def of_one_rank(self: GatedMlp, x_TH: torch.Tensor) -> torch.Tensor:
        whole = call(self, x_TH)
        own = self._down(self._ops.gated_silu(self._gate_up(x_TH)))
        missing[self._group.rank] = whole - own
        return whole

    def early(self: Decoder, layer: int, x_TH: torch.Tensor, batch: ForwardBatch) -> None:
        group = self._blocks[0]._mlp._group
        part = missing[group.rank] if layer and group.size > 1 else torch.zeros(())
        keep(self, layer, x_TH - part, batch)

    patch.setattr(GatedMlp, "__call__", of_one_rank)
    patch.setattr(Decoder, "_keep", early)


def change_engine(patch: Patch, change: Callable[[Eagle3Drafter], None]) -> None:
    """Changes the drafter that the engine holds, and no other."""
    init = PlainLayer.__init__

    def changed(self: PlainLayer, model: Eagle3Drafter, num_slots: int, device: torch.device) -> None:
        init(self, model, num_slots, device)
        change(self._model)

    patch.setattr(PlainLayer, "__init__", changed)


def residual_lost(patch: Patch) -> None:
    """10: the engine adds no residual around attention."""

    def change(model: Eagle3Drafter) -> None:
        finish = model.finish
        model.finish = lambda attended, residual: finish(attended, torch.zeros_like(residual))  # type: ignore[method-assign]

    change_engine(patch, change)


def flag_ignored(patch: Patch) -> None:
    """11, in the engine: norm_before_residual is always taken as true."""

    def change(model: Eagle3Drafter) -> None:
        model.config = msgspec.structs.replace(model.config, norm_before_residual=True)

    change_engine(patch, change)


def head_overwritten(run: FaultRun, patch: Patch) -> None:
    """12: after loading, the head is shared with the target's."""
    ends = read_ends(run.target.checkpoint)

    def change(model: Eagle3Drafter) -> None:
        model.lm_head.weight.copy_(ends.head[model.target_ids_R])

    change_engine(patch, change)


def fc_skipped(patch: Patch) -> None:
    """15: the algorithm of EAGLE: the last state is taken as it is."""

    def change(model: Eagle3Drafter) -> None:
        model.fuse = lambda states_TCH: states_TCH[:, -1]  # type: ignore[method-assign]

    change_engine(patch, change)


def drafted_keys_kept(patch: Patch) -> None:
    """16: keys of accepted drafts stay as they were drafted."""
    observe, propose = Eagle3TreeDrafter.observe, Eagle3TreeDrafter.propose
    scratch: dict[str, Any] = {}

    def proposing(self: Eagle3TreeDrafter, sequences: Rows[Sequence], num: int) -> list[list[int]]:
        drafts = propose(self, sequences, num)
        asked = [sequence for sequence in sequences if len(sequence.tokens) > 1]
        scratch.clear()
        scratch.update({s.request_id: self._places.scratch(row) for row, s in enumerate(asked)})
        return drafts

    def observing(self: Eagle3TreeDrafter, plan: StepPlan, sequences: Rows[Sequence]) -> None:
        observe(self, plan, sequences)
        self.catch_up()  # what is written late would hide the fault
        layer: Any = self._layer
        for sequence in sequences:
            if not sequence.drafts or sequence.request_id not in scratch:
                continue
            known = len(sequence.tokens)
            slots = slots_of(sequence.pages, known + len(sequence.drafts), self._places.page_size)
            drafted = scratch[sequence.request_id]
            for place in range(len(sequence.drafts) - 1):
                for pool in (layer.keys, layer.values):
                    pool[slots[known + place]] = pool[drafted[place + 1]]

    patch.setattr(Eagle3TreeDrafter, "propose", proposing)
    patch.setattr(Eagle3TreeDrafter, "observe", observing)


def prefix_without_keys(patch: Patch) -> None:
    """17: pages are hit whose draft keys were never written."""
    observe = Eagle3TreeDrafter.observe
    seen: set[str] = set()

    def observing(self: Eagle3TreeDrafter, plan: StepPlan, sequences: Rows[Sequence]) -> None:
        layer: Any = self._layer
        for sequence in sequences:
            if sequence.request_id not in seen and sequence.num_cached:
                self.catch_up()
                slots = slots_of(sequence.pages, sequence.num_cached, self._places.page_size)
                for pool in (layer.keys, layer.values, layer.states):
                    pool[torch.from_numpy(slots)] = 0.0
            seen.add(sequence.request_id)
        observe(self, plan, sequences)

    patch.setattr(Eagle3TreeDrafter, "observe", observing)
