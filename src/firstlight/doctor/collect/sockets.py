"""The sockets of the target: state, queues, and which process is at the other end.

The tables are read in the network namespace of the target. Invariant: `peers` names only processes whose
socket is the other end of this one by the kernel's own word.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import msgspec

from firstlight.doctor.case.evidence import Observation
from firstlight.doctor.case.target import RUN
from firstlight.doctor.case.values_host import SocketEnd, Sockets
from firstlight.doctor.collect.scene import Collector, Scene
from firstlight.doctor.servers.network import held_sockets, tcp_sockets, unix_peers, unix_sockets

MAX_SOCKETS = 4096


def collect_sockets(scene: Scene) -> Iterator[Observation]:
    """All of them, with their peers on this machine."""
    owners = _owners(scene)
    mine = {
        inode for inode, keys in owners.items() for process in scene.target.processes if process.key in keys
    }
    ports = {str(port) for _, port in scene.target.addresses}
    peers_of = unix_peers()
    found: dict[int, SocketEnd] = {}
    tables = _tables(scene)
    for end in tables.values():
        is_port = end.state == "LISTEN" and end.protocol == "tcp" and end.local.rpartition(":")[2] in ports
        if end.inode in mine or is_port:
            found[end.inode] = end
    by_ends = {(end.local, end.remote): end.inode for end in tables.values() if end.protocol == "tcp"}
    sockets = tuple(
        _with_people(end, owners, peers_of.get(end.inode) or by_ends.get((end.remote, end.local), 0))
        for end in list(found.values())[:MAX_SOCKETS]
    )
    source = f"{scene.procfs.root}/*/net/tcp, tcp6, unix"
    value = Sockets(sockets=sockets, has_unix_peers=bool(peers_of))
    yield Observation(subject=RUN, source=source, value=value)


def _with_people(end: SocketEnd, owners: dict[int, tuple[str, ...]], peer: int) -> SocketEnd:
    is_connected = end.state != "LISTEN" and peer
    return msgspec.structs.replace(
        end,
        owners=owners.get(end.inode, ()),
        peers=owners.get(peer, ()) if is_connected else (),
        peer_inode=peer if is_connected else 0,
    )


def _owners(scene: Scene) -> dict[int, tuple[str, ...]]:
    """Inode to the keys of its holders, of every process that we may look into."""
    me = os.getpid()
    owners: dict[int, tuple[str, ...]] = {}
    for pid in scene.procfs.pids():
        key = "doctor" if pid == me else scene.target.key_of(pid)
        for inode in held_sockets(scene.procfs, pid):
            owners[inode] = (*owners.get(inode, ()), key)
    return owners


def _tables(scene: Scene) -> dict[int, SocketEnd]:
    """The tables of each network namespace in which the target lives, and of ours."""
    spaces: dict[str, int | str] = {_namespace(scene, "self"): "self"}
    for process in scene.target.processes:
        spaces.setdefault(_namespace(scene, process.pid), process.pid)
    found: dict[int, SocketEnd] = {}
    for pid in spaces.values():
        with contextlib.suppress(OSError):  # it ended, or is another user's in a namespace of its own
            found.update(tcp_sockets(scene.procfs, pid))
            found.update(unix_sockets(scene.procfs, pid))
    return found


def _namespace(scene: Scene, pid: int | str) -> str:
    """Unreadable for another user's process, which then counts as one in ours."""
    try:
        return os.readlink(scene.procfs.path(pid, "ns", "net"))
    except OSError:
        return "" if pid == "self" else _namespace(scene, "self")


SOCKETS = Collector("sockets", collect_sockets, deadline_s=5.0)
