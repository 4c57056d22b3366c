"""How processes of a native run ended: the last words that they or their supervisor left in its directory.

Called by `run` once. Invariant: a file that cannot be read is
evidence, and no record is made up from what is merely missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from firstlight.base.failure import read_failure
from firstlight.doctor.collect.scene import Collector, Scene
from firstlight.doctor.evidence import Observation
from firstlight.doctor.redact import hide_in_text
from firstlight.doctor.values_process import ExitRecord

_PREFIX, _SUFFIX = "failure-", ".json"


def collect_exits(scene: Scene) -> Iterator[Observation]:
    """One record a process that left one."""
    if scene.target.run_dir is None:
        return
    for path in sorted(Path(scene.target.run_dir).glob(f"{_PREFIX}*{_SUFFIX}")):
        name = path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
        failure = read_failure(scene.target.run_dir, name)
        if failure is None:
            continue
        value = ExitRecord(
            name=name,
            code=failure.exit_code,
            message=hide_in_text(failure.message)[:1000],
            hint=failure.hint[:500],
        )
        yield Observation(subject=name, source=str(path), value=value)


EXITS = Collector("exits", collect_exits, is_dynamic=False)
