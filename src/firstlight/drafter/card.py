"""The model card of an exported drafter: what it is for, its data, settings and results, in a README.md.

Invariant: every number comes from a manifest or a report of the run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from firstlight.base.files import replacing
from firstlight.drafter.curves import CURVES, PICTURE
from firstlight.drafter.evaluate import REPORT, Line, read_report
from firstlight.drafter.gate_record import forced_gates, passed_gates, unjudged_gates
from firstlight.drafter.stages import read_manifest
from firstlight.drafter.target import Target

CARD = "README.md"


def write_card(folder: Path, out: Path, target: Target, engine: str) -> None:
    """Writes the card; results stand in it if the run was evaluated."""
    sections = [_head(target, engine), *_gates(out), _data(out), _training(out), *_curves(folder, out)]
    if (out / "evaluate" / REPORT).exists():
        sections.append(_results(out))
    with replacing(folder / CARD) as file:
        file.write("\n\n".join(sections).encode() + b"\n")


def _head(target: Target, engine: str) -> str:
    record = target.record
    return (
        f"# EAGLE-3 drafter for {record.name}\n\n"
        f"Made by `firstlight drafter`, in the form for {engine}; firstlight serves every form.\n\n"
        f"- weights of the target (SHA-256): `{record.weights_sha256}`\n"
        f"- its tokenizer: `{record.tokenizer_sha256}`\n"
        f"- its chat template: `{record.chat_template_sha256}`"
    )


def _gates(out: Path) -> list[str]:
    titles = {
        "Gates that were closed, and passed by force": forced_gates(out),
        "Gates that were open": passed_gates(out),
        "Gates that had too little to judge by": unjudged_gates(out),
    }
    sections = []
    for title, gates in titles.items():
        rows = "\n".join(f"- {name}: {said}" for name, said in gates.items())
        sections += [f"## {title}\n\n{rows}"] if gates else []
    return sections


def _data(out: Path) -> str:
    prompts, answers, states = (read_manifest(out / name) for name in ("prompts", "generate", "capture"))
    families = ", ".join(prompts.numbers.get("families", {}))
    numbers = answers.numbers
    return (
        "## Data\n\n"
        f"{prompts.numbers.get('prompts', 0):,} prompts ({families}); "
        f"{numbers.get('answers', 0):,} answers of the "
        f"target with {numbers.get('answer_tokens', 0):,} tokens, settings {answers.settings}. "
        f"{numbers.get('loops', 0):,} answers were cut where they began to repeat themselves. "
        f"{states.numbers.get('supervised', 0):,} supervised tokens were captured."
    )


def _training(out: Path) -> str:
    manifest = read_manifest(out / "train")
    # A card is published: the folder's name says enough of where training started.
    settings = manifest.settings | {"init_from": Path(str(manifest.settings.get("init_from", ""))).name}
    rows = [f"- {name}: {value}" for name, value in settings.items()]
    vocabulary: dict[str, Any] = manifest.numbers.get("vocabulary", {})
    rows += [f"- vocabulary, {name}: {value}" for name, value in vocabulary.items()]
    step, tokens = manifest.numbers.get("step"), manifest.numbers.get("tokens")
    rows.append(f"- optimiser steps: {step}, supervised tokens: {tokens}")
    if not manifest.complete:
        rows.append("- **stopped before its end**")
    return "## Training\n\n" + "\n".join(rows)


def _curves(folder: Path, out: Path) -> list[str]:
    """Brings the curves along: numbers, and the picture where one was drawn."""
    found = [path for name in (CURVES, PICTURE) if (path := out / "train" / name).exists()]
    for path in found:
        with replacing(folder / path.name) as file:
            file.write(path.read_bytes())
    return [f"![loss and accuracy by step]({PICTURE})"] if (folder / PICTURE).exists() else []


def _results(out: Path) -> str:
    report = read_report(out)
    head = "| drafter | group | k | documents | acceptance length | 95 % | accepted | by position |\n"
    rows = "\n".join(_row(line) for line in report.lines)
    return (
        "## Results\n\nGreedy, held out, loops cut; acceptance length counts the target's own token.\n\n"
        f"{head}|---|---|---|---|---|---|---|---|\n{rows}"
    )


def _row(line: Line) -> str:
    positions = " / ".join(f"{value:.2f}" for value in line.by_position)
    return (
        f"| {line.drafter} | {line.group} | {line.k} | {line.documents} | {line.acceptance_length:.2f} | "
        f"{line.low:.2f}-{line.high:.2f} | {100 * line.accepted_share:.0f} % | {positions} |"
    )
