"""How processes of a native run ended: the last words that they or their supervisor left in its directory.

Invariant: a file that cannot be read is evidence, and no record is made up from what is merely missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from firstlight.base.exit_notes import ExitNote, read_exit_notes
from firstlight.base.failure import Failure, read_failure
from firstlight.doctor.case.evidence import Observation
from firstlight.doctor.case.redact import hide_in_text
from firstlight.doctor.case.values_process import ExitRecord
from firstlight.doctor.collect.scene import Collector, Scene

_PREFIX, _SUFFIX = "failure-", ".json"


def collect_exits(scene: Scene) -> Iterator[Observation]:
    """One record a process that left words, or whose end its supervisor wrote down."""
    if scene.target.run_dir is None:
        return
    run_dir = Path(scene.target.run_dir)
    notes = read_exit_notes(run_dir)
    words = {
        path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX): path
        for path in run_dir.glob(f"{_PREFIX}*{_SUFFIX}")
    }
    for name in sorted({*notes, *words}):
        note, failure = notes.get(name), read_failure(run_dir, name)
        source = str(words.get(name, run_dir / f"exit-{name}.json"))
        if note is not None or failure is not None:
            yield Observation(subject=name, source=source, value=_record(name, note, failure))


def _record(name: str, note: ExitNote | None, failure: Failure | None) -> ExitRecord:
    record = ExitRecord(name=name)
    if failure is not None:
        record = ExitRecord(
            name=name,
            code=failure.exit_code,
            message=hide_in_text(failure.message)[:1000],
            hint=failure.hint[:500],
        )
    if note is None:
        return record
    return msgspec.structs.replace(
        record, code=note.code, signal=note.signal, was_told=note.told, is_oom=note.is_oom
    )


EXITS = Collector("exits", collect_exits, is_dynamic=False)
