"""What is done when logits are not numbers: the weights are looked at, before an engine serves or beside it.

The sequence whose logits they are has ended by then, with an error of its own; the others go on. Invariant:
the weights are looked at once at most, whoever asks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from firstlight.base.errors import EngineError, FirstlightError
from firstlight.engine.messages import NOT_NUMBERS
from firstlight.facts.checkpoint.checkpoint import Checkpoint
from firstlight.loading.finite import Progress, bad_weights, find_not_finite

SOUND = "all weights of the model are numbers, so a value left the range of the arithmetic"
WIDER = "Run with --dtype float32, whose range is wider, and report which model and prompt it was."


def gave_up(checkpoint: Checkpoint, error: str, remedy: str) -> FirstlightError:
    """The error of who needs every answer, and lost one: about the weights where they are to blame."""
    if error != NOT_NUMBERS:
        return EngineError(f"the engine gave up a request: {error}", remedy)
    inspection = Inspection(checkpoint)
    said = inspection.explain(error)
    return inspection.fault or EngineError(f"the engine gave up a request: {said}", WIDER)


class Inspection:
    """Of the weights of one checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._thread: threading.Thread | None = None
        self.is_done = False  # all weights were looked at
        self.fault: FirstlightError | None = None  # what is wrong with the weights, once that is known

    def look(self, progress: Progress | None = None) -> None:
        """Looks now. Raises the `ModelFileError` that names tensor and file."""
        if not self.is_done:
            self._look(progress)
        if self.fault is not None:
            raise self.fault

    def explain(self, error: str) -> str:
        """A sequence's error, with what the weights have to do with it where it is about numbers."""
        if error != NOT_NUMBERS:
            return error
        try:
            self.look()
        except FirstlightError as fault:
            return f"{error}: {fault}"
        return f"{error}, though {SOUND}"

    def begin(self, when_done: Callable[[], None]) -> None:
        """Looks in a thread of its own; once, however often it is called."""
        if self._thread is None and not self.is_done:
            self._thread = threading.Thread(
                target=self._run, args=(when_done,), name="firstlight-weights", daemon=True
            )
            self._thread.start()

    def _run(self, when_done: Callable[[], None]) -> None:
        self._look(None)
        when_done()

    def _look(self, progress: Progress | None) -> None:
        try:
            found = find_not_finite(self._checkpoint, progress)
            self.fault = bad_weights(found) if found else None
        except FirstlightError as error:  # a file that went away, or changed
            self.fault = error
        self.is_done = True
