"""`firstlight serve` without its flags: bind, locate the model, start the children, follow them to the end.

Invariant: the public socket listens and answers before anything slow begins, and whatever happens a Unix
socket is removed, and the run directory too, unless it holds the logs of a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import msgspec

from firstlight.base import environment
from firstlight.base.blackbox.store import FOLDER, box_path, keep_boxes, make_box_folder
from firstlight.base.blackbox.writer import BlackBox, create_box
from firstlight.base.clock import Clock, SystemClock
from firstlight.base.config import ModelSection, RunConfig, ServerSection, write_config
from firstlight.base.disposable_child import OnWait, run_apart
from firstlight.base.errors import EngineError
from firstlight.base.phases import SPAWN
from firstlight.base.resolve_config import Resolved
from firstlight.launch.backends.native import NativeBackend
from firstlight.launch.backends.protocol import Backend, BoxSpec
from firstlight.launch.control import LaunchState, OnStall
from firstlight.launch.events import FAILURE_CODES
from firstlight.launch.processes.children import Children
from firstlight.launch.processes.commands import run_id, title
from firstlight.launch.processes.janitor_process import start_janitor
from firstlight.launch.public.early_socket import Early, open_early
from firstlight.launch.public.listen import bound_port
from firstlight.launch.public.public_side import PublicSide
from firstlight.launch.public.startup_responder import Picture
from firstlight.launch.public.startup_status import verdict_values
from firstlight.launch.public.systemd import Notifier
from firstlight.launch.runs.files import check_files
from firstlight.launch.runs.logs import keep_verdict, log_path, write_ends
from firstlight.launch.runs.run_directory import make_run_directory, remove_ended_runs, write_api_keys
from firstlight.launch.supervisor import RestartLimit, supervise
from firstlight.launch.terminal.console import Console
from firstlight.launch.verdict import Verdict, verdict


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the user wants served. `cores`: those we may use."""

    resolved: Resolved
    model: str | None
    api_keys: tuple[str, ...] = ()
    cores: tuple[int, ...]
    debug: bool = False


def serve(
    order: Order,
    locate: Callable[[str | None], Path],
    stream: TextIO,
    early: Early | None = None,
    *,
    start_s: float | None = None,
    clock: Clock | None = None,
) -> int:
    """Serve until asked to stop; the exit code. Raises the errors that come before the first child.

    `start_s`: when the program was launched, on the monotonic clock; without it: now.
    """
    clock = clock or SystemClock()
    start_s = clock.now_s() if start_s is None else start_s
    console = Console(
        stream,
        start_s,
        order.resolved.engine.tensor_parallel,
        bool(order.api_keys),
        as_json=order.resolved.server.log_format == "json",
    )
    manager = environment.service_manager()
    public = _opened(order, early)
    public.front.begin(start_s)
    notifier = Notifier(manager, clock)
    try:
        server = msgspec.structs.replace(order.resolved.server, port=bound_port(public.listener))
        looking = Picture(message="The model is not ready yet: its files are being looked for.")
        public.front.publish(looking)
        notifier.show(looking)
        backend = pick_backend(order.resolved, order.cores)
        model = _found(order, backend, locate, _Waiting(public, notifier, console))
        remove_ended_runs()
        started = _Started(order, server, model, backend)
        run = _Run(started, _Outside(public, console, notifier, clock))
        limit = RestartLimit()
        while True:
            end, wants_restart = run.once()
            if not wants_restart or not limit.allows_another(clock.now_s()):
                return end.exit_code
            again = f"starting again in {limit.pause_s:.0f} s ({limit.count} of {limit.most})"
            console.say(again)
            waiting = restarting(end, again)
            public.front.publish(waiting)
            notifier.show(waiting)
            limit.wait(notifier.beat)
            public.front.begin(clock.now_s())
            console.begin(clock.now_s())
    finally:
        notifier.close()
        public.close()


def _found(
    order: Order, backend: Backend, locate: Callable[[str | None], Path], waiting: OnWait
) -> ModelSection:
    """The model, its files looked at by a child that may be lost: the port answers whatever they do."""

    def look() -> str:
        check_files(order.resolved.model, order.resolved.server)
        model = backend.find_model(order.model, locate)
        if backend.reads_model:
            backend.require_servable(model)
        return msgspec.json.encode(model).decode()

    said = run_apart(look, order.resolved.launch.stall_verdict_s, waiting)
    model = msgspec.json.decode(said, type=ModelSection)
    if not backend.reads_model:
        backend.require_servable(model)
    return model


class _Waiting:
    """Tells who asks on the port which file is waited for, and the terminal, once for each file."""

    def __init__(self, public: Early, notifier: Notifier, console: Console) -> None:
        self._public, self._notifier, self._console = public, notifier, console
        self._told: set[str] = set()

    def __call__(self, path: str, seconds: float) -> None:
        what = f"{path or 'a file'} has not answered for {seconds:.0f} s"
        picture = Picture(message=f"The model is not ready yet: its files are being looked for, and {what}.")
        self._public.front.publish(picture)
        self._notifier.show(picture)
        if path not in self._told:
            self._told.add(path)
            self._console.say(f"{what}: waiting for it.")


def restarting(end: Verdict, again: str) -> Picture:
    """What is said between two starts: why the last one ended, and that another comes."""
    why = end.failure.message if end.failure is not None else "The engine was lost."
    message = f"{why} The engine is {again}."
    startup: dict[str, Any] = {"status": "starting", "message": message}
    if end.failure is not None:
        startup["verdict"] = verdict_values(end.failure)
    return Picture(message=message, startup=startup)


def _opened(order: Order, early: Early | None) -> Early:
    """What was opened before, if it is what the order asks for."""
    if early is not None and early.suits(order.resolved.server, order.api_keys):
        return early
    if early is not None:
        early.close()
    return open_early(order.resolved.server, order.api_keys)


class _Outside(NamedTuple):
    """Whom a run speaks to."""

    public: Early
    console: Console
    notifier: Notifier
    clock: Clock


class _Started(NamedTuple):
    """What a run is made from: the order with what was found out about it."""

    order: Order
    server: ServerSection
    model: ModelSection
    backend: Backend


class _Run:
    """One start of the engine after the other, on one public socket."""

    def __init__(self, started: _Started, outside: _Outside) -> None:
        self._order, self._server, self._model, self._backend = started
        self._public, self._console, self._notifier, self._clock = outside

    def once(self) -> tuple[Verdict, bool]:
        """From the first child to the end of the last; and whether it shall be started again."""
        directory = make_run_directory()
        has_failed = False
        try:
            make_box_folder(directory.path)
            config = self._write_run(directory.path)
            self._console.opening(config, self._backend.describe())
            for reason in self._order.resolved.reasons:
                if reason.is_doubtful:
                    self._console.say(f"warning: {reason.name} is {reason.value}: {reason.why}")
            state = self._follow(config)
            end = verdict(state)
            has_failed = end.failure is not None and end.failure.exit_code in FAILURE_CODES
            if has_failed:
                write_ends(directory.path, state.deaths)
                keep_verdict(directory.path, end)
            _say_end(end, directory.path, self._console)
            return end, has_failed and state.wants_restart
        finally:
            if has_failed:
                keep_boxes(directory.path)
            directory.close(keep_logs=has_failed)

    def _follow(self, config: RunConfig) -> LaunchState:
        front, listener = self._public.front, self._public.listener
        side = PublicSide(config, self._console, front, listener, self._notifier)
        run_dir = Path(config.run_dir)
        paths = [run_dir / FOLDER] if (run_dir / FOLDER).is_symlink() else []
        janitor = start_janitor(run_id(config), [*paths, *([config.server.uds] if config.server.uds else [])])
        try:
            plan = self._backend.plan(config, listener.fileno(), side.link.child.fileno())
            for box in plan.boxes:
                _make_box(config, box)
            initial = LaunchState(
                running=tuple(spec.name for spec in plan.children),
                drain_s=config.server.drain_s,
                on_stall=OnStall(config.launch.on_stall),
            )
            follower = self._backend.follow(config)
            with Children(config, plan.children, side, self._clock, janitor, follower) as children:
                return supervise(initial, children, self._clock)
        finally:
            side.close()
            janitor.dismiss()

    def _write_run(self, run_dir: Path) -> RunConfig:
        """Everything the children read, in place before the first of them starts."""
        resolved = self._order.resolved
        config = RunConfig(
            run_dir=str(run_dir),
            model=self._model,
            engine=resolved.engine,
            server=self._server,
            launch=resolved.launch,
            debug=self._order.debug,
        )
        write_config(config)
        if self._order.api_keys:
            write_api_keys(run_dir, self._order.api_keys)
        return config


def _make_box(config: RunConfig, spec: BoxSpec) -> None:
    """A process's black box, with the phase in which it is before its first line."""
    path = box_path(Path(config.run_dir), spec.name)
    create_box(path, role=spec.role, rank=spec.rank, run_id=run_id(config))
    box = BlackBox(path)
    box.enter_phase(SPAWN)
    box.close()


def _say_end(end: Verdict, run_dir: Path, console: Console) -> None:
    """How it ended, and after a failure where to read more."""
    if end.failure is None:
        console.closing()
        return
    console.failed(EngineError(end.failure.message, end.failure.hint).explain())
    if end.death is not None and log_path(run_dir, end.death.name).exists():
        console.say(f"  the log of {title(end.death.name)} is {log_path(run_dir, end.death.name)}")


# The backend that was asked for.


def pick_backend(resolved: Resolved, cores: Sequence[int]) -> Backend:
    """By the setting `backend`; `cores`: those we may use."""
    name = resolved.launch.backend
    if name == "native":
        return NativeBackend(resolved, cores)
    from firstlight.launch.backends.foreign import ForeignBackend  # brings an HTTP client and YAML
    from firstlight.launch.backends.kinds import KINDS

    return ForeignBackend(KINDS[name], resolved)
