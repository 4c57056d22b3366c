"""What a foreign engine leaves running when it ends: found by the run's token, by session and by descent.

Called by `log_follower` when the engine's first process has ended. Invariant: it ends nothing but members of
the run, and none of those that it is told to spare.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Mapping

from firstlight.launch.janitor import members, read_stat

_DEADLINE_S = 3.0
_PAUSE_S = 0.02


def end_leftovers(
    run_id: str, named: Mapping[int, int], leaders: Collection[int], spared: Collection[int]
) -> list[int]:
    """Kill what is left; the pids that were. `named`: pid and start ticks of known members; `leaders`: those
    of them that had opened a session.
    """
    ended: set[int] = set()
    give_up_s = time.monotonic() + _DEADLINE_S
    while True:
        living = members(run_id, dict(named), set(leaders))
        found = {pid: stat for pid, stat in living.items() if pid not in spared}
        for pid, stat in found.items():
            now = read_stat(pid)
            if now is not None and now.start_ticks == stat.start_ticks:  # its number is still its own
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                ended.add(pid)
        for pid in ended:  # orphans are ours to wait for: a zombie keeps its number
            with contextlib.suppress(OSError):
                os.waitpid(pid, os.WNOHANG)
        if not found or time.monotonic() > give_up_s:
            return sorted(ended)
        time.sleep(_PAUSE_S)
