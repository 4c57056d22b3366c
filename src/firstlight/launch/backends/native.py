"""Our own engine as a backend: a process for each rank, all of which write their boxes themselves.

Invariant: nothing of it reads a log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from firstlight.base.blackbox.reader import Box, read_box
from firstlight.base.blackbox.store import boxes_of
from firstlight.base.config import ModelSection, RunConfig
from firstlight.base.failure import Failure
from firstlight.base.phases import READY, SERVING
from firstlight.base.resolve_config import Resolved, located
from firstlight.doctor.case.target import Target
from firstlight.doctor.motion.states import Thresholds
from firstlight.facts.sources import DEFAULT_NAME
from firstlight.launch.backends.protocol import BoxSpec, Lost, Plan
from firstlight.launch.processes.commands import child_specs
from firstlight.launch.processes.output import OutputLine
from firstlight.launch.timeline.progress import BoxFollower, ProgressLine
from firstlight.launch.timeline.progress_watch import is_serving, longest_step_s

_SPIN_STARTING_S = 60.0
_SPIN_SERVING_S = 10.0
_SPIN_FACTOR = 3.0  # times the expected duration


class NativeBackend:
    """See `protocol.Backend`. `cores`: those we may use."""

    reads_model = True

    def __init__(self, resolved: Resolved, cores: Sequence[int]) -> None:
        self._resolved = resolved
        self._cores = cores

    def find_model(self, asked: str | None, locate: Callable[[str | None], Path]) -> ModelSection:
        """A local file or folder; what is named on the hub is fetched first."""
        return located(self._resolved.model, asked, locate(asked), DEFAULT_NAME)

    def require_servable(self, model: ModelSection) -> None:
        """Reads headers only."""
        from firstlight.facts.checkpoint.checkpoint import (
            open_checkpoint,  # these bring numpy; the socket comes first
        )
        from firstlight.facts.machine.machine import inspect_machine
        from firstlight.loading.fit import require_fit, require_memory

        checkpoint, engine = open_checkpoint(Path(model.path)), self._resolved.engine
        require_fit(checkpoint, engine)
        if engine.device == "cpu":
            require_memory(checkpoint, engine.tensor_parallel, inspect_machine(with_gpus=False))

    def describe(self) -> str:
        """The device says it."""
        return ""

    def plan(self, config: RunConfig, listener_fd: int, control_fd: int) -> Plan:
        """The ranks and the api process, a box for each."""
        specs = child_specs(config, listener_fd, control_fd, self._cores)
        boxes = (BoxSpec(spec.name, "api" if spec.rank is None else "rank", spec.rank) for spec in specs)
        return Plan(specs, tuple(boxes))

    def follow(self, config: RunConfig) -> NativeFollower:
        """Reads the boxes."""
        return NativeFollower(config)


class NativeFollower:
    """See `protocol.Follower`."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._boxes = BoxFollower(boxes_of(Path(config.run_dir)))

    def started(self, name: str, pid: int) -> None:
        """A process of ours says so itself."""

    def output(self, name: str, line: OutputLine) -> None:
        """Where it is stands in its box."""

    def read(self, now_s: float) -> list[ProgressLine]:
        """What has changed in the boxes."""
        return self._boxes.read(now_s)

    def can_answer(self, lines: Sequence[ProgressLine]) -> bool:
        """Rank 0 has generated a token for itself."""
        return any(line.rank == 0 and line.phase in (READY, SERVING) for line in lines)

    def answered(self) -> None:
        """The ranks have told it before."""

    def ended(self, name: str) -> None:
        """Its process group ends with it."""

    def lost(self, now_s: float) -> Sequence[Lost]:
        """All of them are the supervisor's own children."""
        return ()

    def last_words(self, name: str) -> Failure | None:
        """Those are a file."""
        return None

    def target(self) -> Target:
        """By the run directory in their arguments."""
        from firstlight.doctor.servers.discover import target_of_run  # not before something stands still

        return target_of_run(self._config.run_dir)

    def thresholds(self, boxes: Mapping[str, Box]) -> Thresholds:
        """A multiple of the slowest step that there was."""
        expected_s = 0.0
        path = boxes_of(Path(self._config.run_dir)).get("rank-0")
        if path is not None and is_serving(boxes["rank-0"]):
            expected_s = longest_step_s(read_box(path), self._config.engine.max_batched_tokens)
        return Thresholds(
            spin_after_s=_SPIN_STARTING_S,
            spin_serving_after_s=max(_SPIN_SERVING_S, _SPIN_FACTOR * expected_s),
        )
