"""All processes of one moment, with what they say they are, and who descends from whom.

Invariant: it is never refreshed; a process that ended while it was taken is simply not in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from firstlight.doctor.case.target import Role
from firstlight.doctor.servers.identity import Identity, identify
from firstlight.doctor.servers.procfs import ProcFs, Stat

_SERVES = (Role.SUPERVISOR, Role.LAUNCHER, Role.API, Role.ENGINE, Role.RANK, Role.DETOKENIZER, Role.JANITOR)


class Census:
    """All processes of one moment, with what they say they are."""

    def __init__(self, procfs: ProcFs) -> None:
        self.procfs = procfs
        self.stats: dict[int, Stat] = {}
        self.commands: dict[int, tuple[str, ...]] = {}
        self.identities: dict[int, Identity] = {}
        for pid in procfs.pids():
            stat = procfs.stat(pid)
            if stat is not None:
                self._add(pid, stat)
        for pid in [pid for pid in self.identities if self._only_forked(pid)]:
            del self.identities[pid]

    def _add(self, pid: int, stat: Stat) -> None:
        command: tuple[str, ...] = ()
        with contextlib.suppress(OSError):
            command = self.procfs.cmdline(pid)
        self.stats[pid], self.commands[pid] = stat, command
        identity = identify(command, stat.comm)
        if identity is not None:
            self.identities[pid] = identity

    def _only_forked(self, pid: int) -> bool:
        """Whether its words are its parent's: a fork that has run no program of its own yet, as for a moment
        before every compiler or tracer that a server starts. It ends soon, and nothing is lost by that.
        """
        command = self.commands[pid]
        return bool(command) and command == self.commands.get(self.stats[pid].parent)

    def serves(self, pid: int) -> bool:
        """Whether a process says that it is a part of a model server."""
        identity = self.identities.get(pid)
        return identity is not None and identity.role in _SERVES

    def ancestors(self, pid: int) -> Iterable[int]:
        """The parent, its parent, and so on; not the first process of the machine."""
        seen = {pid}
        while (stat := self.stats.get(pid)) is not None and stat.parent > 1 and stat.parent not in seen:
            pid = stat.parent
            seen.add(pid)
            yield pid

    def root(self, pid: int) -> int:
        """The topmost process of the server that this one belongs to."""
        above = [ancestor for ancestor in self.ancestors(pid) if self.serves(ancestor)]
        return above[-1] if above else pid

    def members(self, roots: Iterable[int]) -> set[int]:
        """The roots, all below them, and the orphans of sessions that they opened."""
        found = set(roots)
        while True:
            sessions = {self.stats[pid].session for pid in found if pid in self.stats} & found
            more = {
                pid
                for pid, stat in self.stats.items()
                if pid not in found
                and (stat.parent in found or (stat.session in sessions and stat.parent == 1))
            }
            if not more:
                return found
            found |= more
