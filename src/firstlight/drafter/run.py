"""All stages in their order, each behind the gates that make it worth running.

Invariant: a run that is started again does only what is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from firstlight.drafter.capture import CaptureSettings, capture, require_storage
from firstlight.drafter.evaluate import Report, evaluate, read_report
from firstlight.drafter.evaluate_settings import EvaluateSettings
from firstlight.drafter.export import export, renew_cards
from firstlight.drafter.gate_record import GateRecord
from firstlight.drafter.gates import check
from firstlight.drafter.gates_after import gates_of_export, gates_of_results
from firstlight.drafter.generate import GenerateSettings, generate
from firstlight.drafter.prompts import PromptSettings, make_prompts
from firstlight.drafter.stages import is_finished, read_manifest
from firstlight.drafter.target import Target, read_ends
from firstlight.drafter.train import CHECKPOINT, train
from firstlight.drafter.train_settings import Limits, TrainSettings, require_device, require_known
from firstlight.models.eagle3_file import load_eagle3


@dataclass
class RunOrder:
    """The settings of every stage. `engine`: options of `LLM` for the stages that generate.

    `force` goes on behind closed gates.
    """

    prompts: PromptSettings = field(default_factory=PromptSettings)
    generate: GenerateSettings = field(default_factory=GenerateSettings)
    capture: CaptureSettings = field(default_factory=CaptureSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)
    engine: dict[str, Any] = field(default_factory=dict)
    threads: int = 0
    device: str = "cpu"  # of the training
    force: bool = False


def run(out: Path, target: Target, order: RunOrder, say: Callable[[str], None]) -> Report:
    """Makes a drafter. Raises `ModelFileError` where a gate is closed, and then runs nothing behind it."""
    order = _ready(target, order)
    make_prompts(out, target, order.prompts, order.engine)
    generate(out, target, order.generate, order.capture, order.engine)
    capture(out, target, order.capture, order.threads)
    record = GateRecord(out, target, say, force=order.force)
    record.require(check(out, target, order.train.attention))
    train(out, target, order.train, Limits(device=order.device, say=say))
    made_of = {CHECKPOINT: read_manifest(out / "train").files[CHECKPOINT]}
    if not is_finished(out / "evaluate", msgspec.to_builtins(order.evaluate), made_of):
        evaluate(out, target, order.evaluate)
    report = read_report(out)
    record.require(gates_of_results(report))
    if not is_finished(out / "export", {}, made_of):
        export(out, target)
    record.require(gates_of_export(out, target, order.evaluate.num_drafts, order.capture.cpu_kernels))
    renew_cards(out, target)
    return report


def _ready(target: Target, order: RunOrder) -> RunOrder:
    """What training would find wrong after hours is found now; the states are those that the start needs."""
    require_known(order.train)
    require_device(order.device)
    require_storage(order.capture.storage)
    if not order.train.init_from or order.capture.layers:
        return order
    ends = read_ends(target.checkpoint)
    loaded = load_eagle3(Path(order.train.init_from), target.checkpoint.description, ends.embedding)
    layers = loaded.drafter.config.state_layers
    return replace(order, capture=msgspec.structs.replace(order.capture, layers=layers))
