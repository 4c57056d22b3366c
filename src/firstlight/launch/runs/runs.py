"""The runs of our user on this machine, and how far each of their processes is.

Reads what supervisors and processes have written down, and asks a living supervisor only whether it has a
verdict. Invariant: only directories of our own user count, and what a run does not tell is absent, never
guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from firstlight.base.blackbox.reader import NotABox, Odometer, read_box
from firstlight.base.blackbox.store import boxes_of
from firstlight.base.config import RunConfig, read_config
from firstlight.base.errors import UsageError
from firstlight.base.exit_notes import ExitNote, read_exit_notes
from firstlight.base.phases import DRAIN, READY, SERVING
from firstlight.base.process import start_ticks
from firstlight.base.run_verdict import read_run_verdict
from firstlight.doctor.servers.supervisor_socket import VERDICT, Answer, ask_supervisor
from firstlight.launch.runs.run_directory import ended_runs, living_runs
from firstlight.launch.runs.run_record import RunRecord, ended_run
from firstlight.launch.terminal.ready_card import base_url

_ANSWER_S = 0.5
_GOING_ON = ("starting", "ready", "stopping")


class ProcessView(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a run. `percent` of the phase; `end`: None while it lives, and if nobody saw its end."""

    name: str
    role: str
    rank: int | None = None
    pid: int | None = None
    is_alive: bool = False
    phase: str | None = None
    percent: float | None = None
    detail: str = ""
    end: ExitNote | None = None


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `pid`: of its supervisor. `status`: starting, ready, stuck, lost, stopping, ended, elsewhere.

    `verdict`: why it is stuck, lost or has ended, in the supervisor's words; `what_to_do` about it.
    """

    run_dir: str
    pid: int
    started_s: float  # Unix time
    status: str
    model: str | None = None
    url: str | None = None
    uds: str | None = None
    processes: tuple[ProcessView, ...] = ()
    verdict: str = ""
    what_to_do: str = ""


def list_runs(*, with_ended: bool = False) -> list[RunView]:
    """Those that go on, the oldest first; `with_ended` also what is left of others, before them."""
    ended = [(path, ended_run(path)) for path in ended_runs()] if with_ended else []
    return [view(path, record) for path, record in [*ended, *living_runs().items()] if record is not None]


def find_run(wanted: str) -> tuple[Path, RunRecord]:
    """The living run with this directory, name or pid of its supervisor. Raises `UsageError`."""
    living = living_runs()
    for path, record in living.items():
        if wanted in (path.name, str(record.pid)) or Path(wanted).absolute() == path.absolute():
            return path, record
    names = ", ".join(f"{path.name} (pid {record.pid})" for path, record in living.items())
    raise UsageError(
        f"no run of yours that goes on is called {wanted}.",
        f"There is: {names}."
        if names
        else "None goes on; `firstlight ps --all` shows what is left of others.",
    )


def config_of(run_dir: Path) -> RunConfig | None:
    """Its configuration; None before it is written, and if another version wrote it."""
    try:
        return read_config(run_dir)
    except (OSError, msgspec.DecodeError):
        return None


def view(run_dir: Path, record: RunRecord) -> RunView:
    """What a run tells."""
    config, notes = config_of(run_dir), read_exit_notes(run_dir)
    processes = tuple(_process(name, path, notes.get(name)) for name, path in boxes_of(run_dir).items())
    status = status_of(_supervisor(run_dir, record), processes, notes)
    said = _said(run_dir) if status in _GOING_ON else Answer()
    kept = read_run_verdict(run_dir)
    verdict = said.verdict or kept
    if status in _GOING_ON and said.status in ("lost", "failed"):
        status = "lost"  # it ended the api process itself, which looks like stopping
    elif status in _GOING_ON and verdict is not None:
        status = "stuck"
    return RunView(
        run_dir=str(run_dir),
        pid=record.pid,
        started_s=record.started_s,
        status=status,
        model=config.model.served_names[0] if config else None,
        url=base_url(config.server) if config else None,
        uds=config.server.uds if config else None,
        processes=processes,
        verdict=verdict.message if verdict else "",
        what_to_do=verdict.hint if verdict else "",
    )


def status_of(supervisor: str, processes: Sequence[ProcessView], notes: Mapping[str, ExitNote]) -> str:
    """The run's status. `supervisor`: "here", "elsewhere" (another container) or "ended"."""
    if supervisor != "here":
        return supervisor
    if any(not note.told for note in notes.values()):
        return "lost"
    if notes or any(process.phase == DRAIN for process in processes):
        return "stopping"
    is_ready = processes and all(
        # The api process is ready before the engine is, and serves from then on.
        process.phase == SERVING or (process.phase == READY and process.rank is not None)
        for process in processes
    )
    return "ready" if is_ready else "starting"


def _said(run_dir: Path) -> Answer:
    """What the supervisor says of a run; nothing when it does not answer at once."""
    try:
        return ask_supervisor(run_dir, VERDICT, _ANSWER_S)
    except OSError:
        return Answer()


def _supervisor(run_dir: Path, record: RunRecord) -> str:
    if ended_run(run_dir) is not None:
        return "ended"
    return "here" if record.is_running() else "elsewhere"


def _process(name: str, path: Path, end: ExitNote | None) -> ProcessView:
    role = "rank" if name.startswith("rank-") else name
    try:
        box = read_box(path, with_events=False)
    except NotABox:
        return ProcessView(name=name, role=role, end=end, pid=end.pid if end else None)
    phase = box.phase
    return ProcessView(
        name=name,
        role=box.role,
        rank=box.rank,
        pid=box.pid or (end.pid if end else None),
        is_alive=end is None and box.pid > 0 and start_ticks(box.pid) == box.start_ticks,
        phase=phase.name if phase else None,
        percent=_percent(phase.odometer) if phase else None,
        detail=phase.detail if phase else "",
        end=end,
    )


def _percent(odometer: Odometer) -> float | None:
    return round(100 * odometer.done / odometer.total, 1) if odometer.total else None
