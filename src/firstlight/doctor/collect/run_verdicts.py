"""What the supervisor of a run has said of it, from the record in its directory.

Taken in each look, as a verdict may be given or withdrawn meanwhile. Invariant: only a verdict that stands is
evidence.
"""

from __future__ import annotations

from collections.abc import Iterator

from firstlight.base.run_verdict import read_run_verdict
from firstlight.doctor.case.evidence import Observation
from firstlight.doctor.case.redact import hide_in_text
from firstlight.doctor.case.target import RUN
from firstlight.doctor.case.values_process import SupervisorVerdict
from firstlight.doctor.collect.scene import Collector, Scene

_MOST_CHARS = 1000


def collect_run_verdict(scene: Scene) -> Iterator[Observation]:
    """The verdict, if there is one."""
    run_dir = scene.target.run_dir
    said = read_run_verdict(run_dir) if run_dir is not None else None
    if said is not None:
        value = SupervisorVerdict(
            message=hide_in_text(said.message)[:_MOST_CHARS],
            hint=hide_in_text(said.hint)[:_MOST_CHARS],
            subject=said.subject,
            is_stall=said.is_stall,
            cause=said.cause,
            grade=said.grade,
            given_wall_s=said.time_s,
        )
        yield Observation(subject=RUN, source=f"{run_dir}/verdict.json", value=value)


RUN_VERDICTS = Collector("run-verdict", collect_run_verdict)
