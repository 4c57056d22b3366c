"""What the gates said, kept with the run, so that a gate that was forced open is seen by whoever comes after.

Invariant: a closed gate is passed only by force, and that stands in the manifest of `gates`, of the export,
and in the card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from firstlight.base.errors import ModelFileError
from firstlight.drafter.gates import Check, Gate
from firstlight.drafter.stages import MANIFEST, Stage, open_stage, read_manifest
from firstlight.drafter.target import Target

GATES = "gates"


class GateRecord:
    """The gates of a run; `force` goes on behind a closed one."""

    def __init__(self, out: Path, target: Target, say: Callable[[str], None], *, force: bool = False) -> None:
        self._stage: Stage = open_stage(out / GATES, GATES, {}, {}, target.record)
        self._say, self._force = say, force
        self._said: dict[str, dict[str, object]] = self._stage.manifest.numbers.setdefault(GATES, {})

    def require(self, checks: Iterable[Check]) -> None:
        """Goes through gates; one that was open and measures the same as then stays so.

        Raises `ModelFileError` at the first that is closed, unless by force.
        """
        for check in checks:
            before = self._opened(check)
            gate = before or check.measure()
            forced = gate.stops and self._force
            self.note(check, gate, forced=forced)
            state = "closed, FORCED" if forced else gate.state
            self._say(f"gate {gate.name} ({state}{', measured before' if before else ''}): {gate.said}")
            if gate.stops and not forced:
                raise ModelFileError(
                    f"The gate {gate.name!r} is closed: {gate.said}",
                    "Nothing behind it was run. Mend what it names, then run the same command again; --force "
                    "goes on all the same, and says so in the manifest and in the model card.",
                )

    def note(self, check: Check, gate: Gate, *, forced: bool = False) -> None:
        """Keeps what a gate said."""
        self._said[check.name] = msgspec.to_builtins(gate) | {"forced": forced, "of": check.of}
        self._stage.finish()

    def _opened(self, check: Check) -> Gate | None:
        known = self._said.get(check.name, {})
        if not known.get("passed") or known.get("of") != check.of:
            return None
        return Gate(name=check.name, passed=True, said=str(known["said"]))


def forced_gates(out: Path) -> dict[str, str]:
    """The gates that were closed and passed by force, and what they said."""
    return {name: str(gate["said"]) for name, gate in _known(out).items() if gate["forced"]}


def passed_gates(out: Path) -> dict[str, str]:
    """The gates that were open, and what they said."""
    return {name: str(gate["said"]) for name, gate in _known(out).items() if gate["passed"]}


def unjudged_gates(out: Path) -> dict[str, str]:
    """The gates that had too little to judge by, and what they said."""
    return {name: str(gate["said"]) for name, gate in _known(out).items() if not gate.get("judged", True)}


def _known(out: Path) -> dict[str, dict[str, object]]:
    if not (out / GATES / MANIFEST).exists():
        return {}
    found: dict[str, dict[str, object]] = read_manifest(out / GATES).numbers.get(GATES, {})
    return found
