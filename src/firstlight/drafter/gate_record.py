"""What the gates said, kept with the run, so that a gate that was forced open is seen by whoever comes after.

Called by `firstlight drafter run` and `check`; read by the model card. Invariant: a closed gate is passed
only by force, and that stands in the manifest of `gates`, of the export, and in the card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from firstlight.base.errors import ModelFileError
from firstlight.drafter.gates import Gate
from firstlight.drafter.stages import MANIFEST, Stage, open_stage, read_manifest
from firstlight.drafter.target import Target

GATES = "gates"


class GateRecord:
    """The gates of a run; `force` goes on behind a closed one."""

    def __init__(self, out: Path, target: Target, say: Callable[[str], None], *, force: bool = False) -> None:
        self._stage: Stage = open_stage(out / GATES, GATES, {}, {}, target.record)
        self._say, self._force = say, force
        self._said: dict[str, dict[str, object]] = self._stage.manifest.numbers.setdefault(GATES, {})

    def require(self, gates: Iterator[Gate]) -> None:
        """Goes through gates. Raises `ModelFileError` at the first that is closed, unless by force."""
        for gate in gates:
            forced = not gate.passed and self._force
            self.note(gate, forced=forced)
            state = "open" if gate.passed else "closed, FORCED" if forced else "closed"
            self._say(f"gate {gate.name} ({state}): {gate.said}")
            if not gate.passed and not forced:
                raise ModelFileError(
                    f"The gate {gate.name!r} is closed: {gate.said}",
                    "Nothing behind it was run. Mend what it names, then run the same command again; --force "
                    "goes on all the same, and says so in the manifest and in the model card.",
                )

    def note(self, gate: Gate, *, forced: bool = False) -> None:
        """Keeps what a gate said."""
        self._said[gate.name] = msgspec.to_builtins(gate) | {"forced": forced}
        self._stage.finish()


def forced_gates(out: Path) -> dict[str, str]:
    """The gates that were closed and passed by force, and what they said."""
    return {name: str(gate["said"]) for name, gate in _known(out).items() if gate["forced"]}


def passed_gates(out: Path) -> dict[str, str]:
    """The gates that were open, and what they said."""
    return {name: str(gate["said"]) for name, gate in _known(out).items() if gate["passed"]}


def _known(out: Path) -> dict[str, dict[str, object]]:
    if not (out / GATES / MANIFEST).exists():
        return {}
    found: dict[str, dict[str, object]] = read_manifest(out / GATES).numbers.get(GATES, {})
    return found
