"""What may happen to a run, and what may be done about it: the words of the supervisor's decisions.

Events are made by `children` and `watch`, actions by `control`. Invariant: they are values, and do nothing.
"""

from __future__ import annotations

import msgspec

from firstlight.base.errors import EngineError, FirstlightError
from firstlight.base.failure import Failure
from firstlight.base.process import ExitCause

# Nobody's mistake but ours: what a rank says when it loses another one, or when something unforeseen broke.
FAILURE_CODES = frozenset({EngineError.exit_code, FirstlightError.exit_code})


class Death(msgspec.Struct, frozen=True):
    """The end of a child: when, how, its last words if it left any, and its last lines of output.

    `is_oom`: the kernel ended it for want of memory; None: not known. `told`: we had asked it to end, or it
    left in peace when the run was asked to; filled in by `step`.
    """

    name: str
    time_s: float
    cause: ExitCause
    failure: Failure | None = None
    last_lines: tuple[str, ...] = ()
    told: bool = False
    is_oom: bool | None = None


class EngineReady(msgspec.Struct, frozen=True):
    """Rank 0 generated its first token."""


class Probed(msgspec.Struct, frozen=True):
    """A token was asked for through the api process."""

    healthy: bool


class StopAsked(msgspec.Struct, frozen=True):
    """SIGINT, SIGTERM or SIGHUP came, or `firstlight stop`."""


class Stalled(msgspec.Struct, frozen=True):
    """Nothing moves although there is work: the verdict on it, and who is to blame if that is known.

    `cause` and `grade` as the doctor names them.
    """

    failure: Failure
    name: str = ""
    cause: str = ""
    grade: str = ""


class Recovered(msgspec.Struct, frozen=True):
    """What stood still moves again."""


class Tick(msgspec.Struct, frozen=True):
    """Time passed."""


Event = EngineReady | Probed | StopAsked | Stalled | Recovered | Tick | Death


class Probe(msgspec.Struct, frozen=True):
    """Ask for a token through the api process."""


class HandOver(msgspec.Struct, frozen=True):
    """The front stops to accept and the api process begins; say that the server is ready."""


class TakeBack(msgspec.Struct, frozen=True):
    """The api process ends at once, and the front answers with the verdict."""


class Refuse(msgspec.Struct, frozen=True):
    """The api process ends its open requests and refuses new ones with the verdict.

    `for_good`: the engine is lost and does not come back.
    """

    for_good: bool = False


class Accept(msgspec.Struct, frozen=True):
    """The verdict is withdrawn: the api process takes requests again."""


class Terminate(msgspec.Struct, frozen=True):
    """Ask these children to end."""

    names: tuple[str, ...]


class Kill(msgspec.Struct, frozen=True):
    """End these children."""

    names: tuple[str, ...]


Action = Probe | HandOver | TakeBack | Refuse | Accept | Terminate | Kill
