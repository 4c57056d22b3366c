"""Whom `firstlight doctor` looks at, and the look itself with word of it on a terminal.

Invariant: a key is sent to a server of our own user only, unless a person pointed at the server.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from firstlight.base import environment
from firstlight.base.config import API_KEYS_FILE
from firstlight.base.errors import UsageError
from firstlight.base.run_verdict import read_run_verdict
from firstlight.cli.keys import gather_keys
from firstlight.doctor.case.evidence import Case
from firstlight.doctor.case.redact import hide_in_text
from firstlight.doctor.case.target import Role, Target
from firstlight.doctor.collect.run import examine
from firstlight.doctor.collect.scene import Options, Scene
from firstlight.doctor.report.report_text import name_of, printable
from firstlight.doctor.servers.discover import find_targets, target_of_pid, target_of_run, target_of_url
from firstlight.doctor.servers.supervisor_socket import VERDICT, ask_supervisor
from firstlight.launch.runs.run_directory import ended_runs, living_runs
from firstlight.launch.runs.runs import find_run

if TYPE_CHECKING:
    from firstlight.cli.doctor_options import DoctorOptions

_SUPERVISOR_S = 1.0
_NOTE_CHARS = 200
_REFRESH_S = 0.5
_LOOK_S = 1.0  # what a look takes where nothing hangs
_BYSTANDERS = (Role.JANITOR, Role.HELPER, Role.COMPILER)  # what is left of a server for a moment
_WIPE = "\r\x1b[K"


def targets_of(options: DoctorOptions) -> tuple[Target, ...]:
    """The one that was pointed at, or all that are found. Raises `UsageError` when there is none."""
    if options.pid is not None:
        return (target_of_pid(options.pid),)
    if options.url is not None:
        target = target_of_url(options.url)
        if not target.processes:
            raise UsageError(
                f"{options.url}: {'; '.join(target.notes)}.",
                "It may be another machine's: run the doctor there; or another user's: run it with sudo.",
            )
        return (target,)
    if options.run is not None:
        is_folder = Path(options.run).is_dir()
        if not is_folder and os.sep in options.run:
            raise UsageError(
                f"there is no folder {options.run}.",
                "Of runs that failed the newest five are kept, for a day: `firstlight ps --all` lists them.",
            )
        return (target_of_run(Path(options.run).absolute() if is_folder else find_run(options.run)[0]),)
    found = [
        target for target in find_targets() if any(one.role not in _BYSTANDERS for one in target.processes)
    ]
    known = {target.run_dir for target in found}
    runs = [target_of_run(path) for path in living_runs() if str(path) not in known]
    targets = (*found, *(run for run in runs if run.processes))
    if not targets:
        raise UsageError("no model server was found on this machine.", _how_to_point())
    return targets


def _how_to_point() -> str:
    kept = ", ".join(str(path) for path in ended_runs()[-3:])
    ways = "--pid PID (of any of its processes), --url http://HOST:PORT, or --run DIR of a run that ended"
    return f"Point at one: {ways}{f' (there is: {kept})' if kept else ''}."


def examine_one(target: Target, options: DoctorOptions) -> Case:
    """All looks at one server."""
    key = key_for(target, options)
    headers = (("Authorization", f"Bearer {key}"),) if key else ()
    scene = Scene(
        _with_word_of_supervisor(target),
        options=Options(with_help=True, with_generation=options.generate, headers=headers),
    )
    with _told(target, options):
        return examine(scene, num_looks=options.looks, interval_s=options.interval)


def _with_word_of_supervisor(target: Target) -> Target:
    """What a living supervisor says of a run, as a note, if it could not write it into the run's record."""
    if target.run_dir is None or read_run_verdict(target.run_dir) is not None:
        return target
    try:
        said = ask_supervisor(target.run_dir, VERDICT, _SUPERVISOR_S).verdict
    except OSError:  # an older one, another user's, or one that is dead or stopped itself
        return target
    note = f"its supervisor says: {said.message.partition('; ')[0][:_NOTE_CHARS]}" if said else ""
    return msgspec.structs.replace(target, notes=(*target.notes, hide_in_text(note))) if note else target


def key_for(target: Target, options: DoctorOptions) -> str | None:
    """The key that was given in a file; else the run's own where we may read it; else the environment's."""
    if options.api_key_file is not None:
        return gather_keys((), options.api_key_file)[0]
    if target.run_dir is not None:
        with contextlib.suppress(OSError, IndexError, UnicodeDecodeError):
            return (Path(target.run_dir) / API_KEYS_FILE).read_text(encoding="utf-8").split()[0]
    is_pointed_at = any(value is not None for value in (options.pid, options.url, options.run))
    is_ours = bool(target.processes) and all(one.uid == os.geteuid() for one in target.processes)
    return next(iter(environment.api_keys()), None) if is_ours or is_pointed_at else None


@contextlib.contextmanager
def _told(target: Target, options: DoctorOptions) -> Iterator[None]:
    """A line on a terminal while it lasts, and nothing of it afterwards."""
    if not sys.stderr.isatty() or options.watch:
        yield
        return
    expected_s = options.looks * _LOOK_S + (options.looks - 1) * options.interval
    what = f"looking at {len(target.processes)} processes of {name_of(target)}, {options.looks} times"
    end = threading.Event()
    thread = threading.Thread(target=_tell, args=(what, expected_s, end), daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        print(_WIPE, end="", file=sys.stderr, flush=True)


def _tell(what: str, expected_s: float, end: threading.Event) -> None:
    start_s = time.monotonic()
    while True:
        spent_s = time.monotonic() - start_s
        left = f"about {expected_s - spent_s:.0f} s" if spent_s < expected_s else "waiting for what hangs"
        print(f"{_WIPE}{printable(what)[:150]}: {left}", end="", file=sys.stderr, flush=True)
        if end.wait(_REFRESH_S):
            return
