"""One verdict from all findings: which side has to act, and what for.

What is proved counts before what is likely, and among equals what stands first on the way from the data to
the served draft. Invariant: a hint decides nothing.
"""

from __future__ import annotations

import msgspec

from firstlight.drafter.explain import checks_data, checks_drafter, checks_drafts, checks_engine
from firstlight.drafter.explain.evidence import Evidence
from firstlight.drafter.explain.finding import EXIT_CODES, Finding, Side, Sure
from firstlight.drafter.explain.measured import MEASURED, Check, promise

CHECKS: tuple[Check, ...] = (
    *checks_data.CHECKS,
    *checks_engine.CHECKS,
    *checks_drafts.CHECKS,
    *checks_drafter.CHECKS,
)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The side, the cause (empty where all is fine), and all findings, the deciding one first.

    `passed` are the promises of the checks that had something to look at, and found nothing.
    """

    side: Side
    cause: str
    findings: list[Finding]
    passed: list[str]

    @property
    def exit_code(self) -> int:
        """Of the command."""
        return EXIT_CODES[self.side]


def judge(evidence: Evidence) -> Verdict:
    """Runs every check."""
    found: list[Finding] = []
    passed: list[str] = []
    for check in CHECKS:
        finding = check(evidence)
        if finding is None:
            passed += [promise(check, evidence)] if MEASURED[check](evidence) else []
        elif finding.cause not in {other.cause for other in found}:  # two checks may see one thing
            found.append(finding)
    found.sort(key=lambda finding: (-finding.sure, finding.place))
    deciding = [finding for finding in found if finding.sure > Sure.HINT]
    # Without the engine's drafts nothing was found wrong, and nothing right.
    side = deciding[0].side if deciding else Side.FINE if evidence.drafts else Side.NOT_MEASURED
    return Verdict(side=side, cause=deciding[0].cause if deciding else "", findings=found, passed=passed)
