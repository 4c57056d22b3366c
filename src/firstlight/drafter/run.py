"""All stages in their order, each behind the gates that make it worth running.

Called by `firstlight drafter run`. Invariant: a run that is started again does only what is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from firstlight.drafter.capture import CaptureSettings, capture
from firstlight.drafter.evaluate import IN_DOMAIN, EvaluateSettings, Report, evaluate, read_report
from firstlight.drafter.export import export
from firstlight.drafter.gates import Gate, check, require
from firstlight.drafter.generate import GenerateSettings, generate
from firstlight.drafter.prompts import PromptSettings, make_prompts
from firstlight.drafter.target import Target
from firstlight.drafter.train import train
from firstlight.drafter.train_settings import Limits, TrainSettings

MIN_FIRST_ACCURACY = 0.3  # of the first draft, in domain: below, a drafter cannot pay for itself


@dataclass
class RunOrder:
    """The settings of every stage. `engine`: options of `LLM` for the stages that generate."""

    prompts: PromptSettings = field(default_factory=PromptSettings)
    generate: GenerateSettings = field(default_factory=GenerateSettings)
    capture: CaptureSettings = field(default_factory=CaptureSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)
    engine: dict[str, Any] = field(default_factory=dict)
    threads: int = 0


def run(out: Path, target: Target, order: RunOrder, say: Callable[[str], None]) -> Report:
    """Makes a drafter. Raises `ModelFileError` where a gate is closed, and then runs nothing behind it."""
    make_prompts(out, target, order.prompts, order.engine)
    generate(out, target, order.generate, order.capture, order.engine)
    capture(out, target, order.capture, order.threads)
    for gate in require(check(out, target)):
        say(f"gate {gate.name}: {gate.said}")
    train(out, target, order.train, Limits(say=say))
    evaluate(out, target, order.evaluate)
    report = read_report(out)
    for gate in require(iter([accuracy_gate(report)])):
        say(f"gate {gate.name}: {gate.said}")
    export(out, target)
    return report


def accuracy_gate(report: Report) -> Gate:
    """The first draft must be right often enough in domain, before anything is served."""
    found = report.teacher_forced.get(IN_DOMAIN) or next(iter(report.teacher_forced.values()))
    first, length, k = found["accuracy"][0], found["predicted_acceptance_length"], found["k"]
    said = f"{100 * first:.1f} % of first drafts right, predicted acceptance length {length:.2f} at k = {k}"
    passed = first >= MIN_FIRST_ACCURACY
    if not passed:
        said += ": too little data or training, or data of another kind (training)."
    return Gate(name="offline accuracy", passed=passed, said=said)
