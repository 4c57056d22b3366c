"""A control group for the processes of a run, where the system lets us make one: all of it ends at one word.

Used by `janitor_process`. Version 2 only, as only that has `cgroup.kill`. The group has no controllers of its
own, so memory and processors are counted where they were. Invariant: without the right to make a group
everything works as before.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from firstlight.launch.janitor import remove_tree

_PREFIX = "firstlight-"
_REMOVAL_S = 1.0


def make_group(run_id: str, proc: Path = Path("/proc")) -> Path | None:
    """A new group below our own; None where there is none, or we may not write."""
    parent = _own_group(proc)
    if parent is None:
        return None
    group = parent / (run_id if run_id.startswith(_PREFIX) else _PREFIX + run_id)
    try:
        group.mkdir()
    except OSError:
        return None
    if (group / "cgroup.kill").exists():
        return group
    remove_group(group)
    return None


def join_group(group: Path, pid: int) -> None:
    """Move a process, whose children to come follow it. What cannot be moved stays where it is."""
    with contextlib.suppress(OSError):
        (group / "cgroup.procs").write_text(str(pid))


def remove_group(group: Path) -> None:
    """With the groups that its processes have made; one where somebody still runs stays."""
    remove_tree(str(group), _REMOVAL_S)


def _own_group(proc: Path) -> Path | None:
    """Our folder in the version 2 hierarchy."""
    with contextlib.suppress(OSError):
        mounts = [line.split() for line in (proc / "self" / "mountinfo").read_text().splitlines()]
        roots = [words[4] for words in mounts if "-" in words and words[words.index("-") + 1] == "cgroup2"]
        lines = (proc / "self" / "cgroup").read_text().splitlines()
        paths = [line[3:] for line in lines if line.startswith("0::")]
        if roots and paths:
            return Path(roots[0] + paths[0].rstrip("/"))
    return None
