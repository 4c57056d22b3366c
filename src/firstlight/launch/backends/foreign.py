"""vLLM and SGLang as backends: one child that starts the rest, a relay in front of it, its log as its voice.

Invariants: the engine listens where only the relay is meant to reach it; readiness is one token through the
relay and the engine's own HTTP API.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from firstlight.base.config import ModelSection, RunConfig
from firstlight.base.errors import ModelFileError, UsageError
from firstlight.base.resolve_config import Resolved, located
from firstlight.doctor.case.target import Engine
from firstlight.doctor.logs.grammar import covers, load_grammar
from firstlight.doctor.servers.options import sizes
from firstlight.launch.backends.installed import Installed, find_installed
from firstlight.launch.backends.kinds import COUNTERS, Kind, arguments, require_known
from firstlight.launch.backends.log_follower import LogFollower
from firstlight.launch.backends.protocol import BoxSpec, Plan
from firstlight.launch.processes.commands import API, ChildSpec, rank_name, relay_spec, run_token
from firstlight.serve.foreign.upstream import Place, read_place, write_place

ENGINE_SOCKET = "engine.sock"


class ForeignBackend:
    """See `protocol.Backend`."""

    reads_model = False

    def __init__(self, kind: Kind, resolved: Resolved) -> None:
        self._kind = kind
        self._resolved = resolved
        self._grammar = load_grammar(kind.name)
        self._installed: Installed | None = None

    def find_model(self, asked: str | None, locate: Callable[[str | None], Path]) -> ModelSection:
        """A local path, or the name under which the engine itself fetches it from the hub."""
        name, model = self._kind.name, self._resolved.model
        if asked is None:
            raise UsageError(
                f"{name} needs to be told which model it shall serve.",
                "Give a Hugging Face folder or a hub id; `firstlight convert` makes one from a GGUF file.",
            )
        path = Path(os.path.expanduser(asked))
        if path.exists():
            return located(model, asked, path.absolute(), asked)
        if asked.startswith((".", "/", "~")):
            raise ModelFileError(f"{asked} does not exist.", "Check the path.")
        return msgspec.structs.replace(model, path=asked, served_names=model.served_names or (asked,))

    def require_servable(self, model: ModelSection) -> None:
        """Looks for the engine and at the options; what the model is, the engine finds out itself."""
        launch = self._resolved.launch
        require_known(self._kind, self._resolved.given, launch.backend_args, len(model.served_names))
        self._installed = find_installed(self._kind.name, launch.backend_python)

    def describe(self) -> str:
        """The version, and whether its log is known."""
        version = self._found().version
        name = f"{self._kind.name} {version or 'of unknown version'}"
        if version and covers(self._grammar.versions, version):
            return name
        return f"{name} (its log is known of {self._grammar.versions}: phases may be missing)"

    def plan(self, config: RunConfig, listener_fd: int, control_fd: int) -> Plan:
        """The engine, then the relay; boxes for both and for each rank."""
        place = self._place(config)
        write_place(config.run_dir, place)
        command = (self._found().python, *arguments(self._kind, config, self._resolved.given, place))
        engine = ChildSpec(self._kind.name, command, self._variables(config))
        ranks = range(sizes(Engine(self._kind.name), command).ranks_here)
        boxes = (
            BoxSpec(self._kind.name, "server"),
            BoxSpec(API, "api"),
            *(BoxSpec(rank_name(rank), "rank", rank) for rank in ranks),
        )
        return Plan((engine, relay_spec(config, listener_fd, control_fd)), boxes)

    def follow(self, config: RunConfig) -> LogFollower:
        """Reads its log."""
        place = read_place(config.run_dir)
        command = arguments(self._kind, config, self._resolved.given, place)
        return LogFollower(config, self._grammar, sizes(Engine(self._kind.name), command), place)

    def _found(self) -> Installed:
        assert self._installed is not None, "require_servable comes first"
        return self._installed

    def _place(self, config: RunConfig) -> Place:
        name = self._kind.name
        if name == "vllm":
            uds = str(Path(config.run_dir) / ENGINE_SOCKET)
            return Place(engine=name, uds=uds, counters=COUNTERS[name])
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        return Place(engine=name, port=port, key=secrets.token_hex(16), counters=COUNTERS[name])

    def _variables(self, config: RunConfig) -> dict[str, str]:
        """Unbuffered, no module of the current folder, and the token by which the janitor knows its own."""
        threads = {"OMP_NUM_THREADS": str(config.engine.threads)} if "threads" in self._resolved.given else {}
        own = self._kind.variables(config)
        return {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", **threads, **own, **run_token(config)}
