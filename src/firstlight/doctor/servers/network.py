"""The kernel's tables of sockets: /proc/P/net/tcp{,6} and unix, and who is connected with whom.

The tables are those of a process's own network namespace, so they are read below that process's folder.
Invariant: addresses are written as `host:port`, IPv6 in brackets.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import struct
import sys

from firstlight.doctor.case.values_host import SocketEnd
from firstlight.doctor.servers.procfs import ProcFs

_TCP_STATES = (
    "",
    "ESTABLISHED",
    "SYN_SENT",
    "SYN_RECV",
    "FIN_WAIT1",
    "FIN_WAIT2",
    "TIME_WAIT",
    "CLOSE",
    "CLOSE_WAIT",
    "LAST_ACK",
    "LISTEN",
    "CLOSING",
    "NEW_SYN_RECV",
)
_UNIX_STATES = {1: "UNCONNECTED", 2: "CONNECTING", 3: "ESTABLISHED", 4: "DISCONNECTING"}
_UNIX_LISTENS = 0x10000
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_DUMP_REQUEST = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_SHOW_PEER = 4
_ATTRIBUTE_PEER = 2
_NLMSG_ERROR, _NLMSG_DONE = 2, 3


def socket_inode(link: str) -> int:
    """The inode in "socket:[17]", or 0."""
    match = _SOCKET.fullmatch(link)
    return int(match[1]) if match else 0


def tcp_sockets(procfs: ProcFs, pid: int | str = "self") -> dict[int, SocketEnd]:
    """The TCP sockets of a process's namespace by inode; those without an inode (TIME_WAIT) are left out."""
    found: dict[int, SocketEnd] = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # no IPv6
            for line in procfs.text(pid, "net", name).splitlines()[1:]:
                end = _tcp(line.split())
                if end is not None:
                    found[end.inode] = end
    return found


def unix_sockets(procfs: ProcFs, pid: int | str = "self") -> dict[int, SocketEnd]:
    """The Unix sockets of a process's namespace by inode."""
    found: dict[int, SocketEnd] = {}
    for line in procfs.text(pid, "net", "unix").splitlines()[1:]:
        fields = line.split(None, 7)
        if len(fields) < 7:
            continue
        listens = int(fields[3], 16) & _UNIX_LISTENS
        state = "LISTEN" if listens else _UNIX_STATES.get(int(fields[5], 16), fields[5])
        inode = int(fields[6])
        found[inode] = SocketEnd(
            protocol="unix", inode=inode, state=state, local=fields[7] if len(fields) > 7 else ""
        )
    return found


def listeners(procfs: ProcFs, port: int) -> list[int]:
    """The processes that hold a listening TCP socket of this port and whose descriptors we may see."""
    inodes = {
        inode
        for inode, end in tcp_sockets(procfs).items()
        if end.state == "LISTEN" and end.local.rpartition(":")[2] == str(port)
    }
    return [pid for pid in procfs.pids() if inodes and inodes & held_sockets(procfs, pid)]


def held_sockets(procfs: ProcFs, pid: int) -> set[int]:
    """Inodes of the sockets that a process has open; empty when we may not look."""
    with contextlib.suppress(OSError):
        return {inode for _, link in procfs.links(pid) if (inode := socket_inode(link))}
    return set()


def unix_peers() -> dict[int, int]:
    """Inode to inode of connected Unix sockets in our own namespace, asked of the kernel; may be empty."""
    if sys.platform != "linux":
        return {}
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as connection:
            connection.settimeout(1.0)
            request = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _SHOW_PEER, 0, 0)
            header = struct.pack("=IHHII", 16 + len(request), _SOCK_DIAG_BY_FAMILY, _DUMP_REQUEST, 1, 0)
            connection.send(header + request)
            return _read_peers(connection)
    except OSError:
        return {}


def _read_peers(connection: socket.socket) -> dict[int, int]:
    peers: dict[int, int] = {}
    while True:
        data = connection.recv(1 << 18)
        offset = 0
        while offset + 16 <= len(data):
            length, kind = struct.unpack_from("=IH", data, offset)
            if kind in (_NLMSG_DONE, _NLMSG_ERROR) or length < 16:
                return peers
            peers.update(_peer(data[offset + 16 : offset + length]))
            offset += (length + 3) & ~3


def _peer(message: bytes) -> dict[int, int]:
    """One `unix_diag_msg` (16 bytes) with its attributes."""
    (inode,) = struct.unpack_from("=I", message, 4)
    offset = 16
    while offset + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, offset)
        if kind == _ATTRIBUTE_PEER and length >= 8:
            return {inode: struct.unpack_from("=I", message, offset + 4)[0]}
        offset += max(4, (length + 3) & ~3)
    return {}


def _tcp(fields: list[str]) -> SocketEnd | None:
    if len(fields) < 10 or fields[9] == "0":
        return None
    send, _, receive = fields[4].partition(":")
    state = int(fields[3], 16)
    return SocketEnd(
        protocol="tcp",
        inode=int(fields[9]),
        state=_TCP_STATES[state] if state < len(_TCP_STATES) else str(state),
        local=_address(fields[1]),
        remote=_address(fields[2]),
        receive_bytes=int(receive, 16),
        send_bytes=int(send, 16),
    )


def _address(text: str) -> str:
    """ "0100007F:1F90" is 127.0.0.1:8080: words of the machine's own byte order."""
    host, _, port = text.partition(":")
    words = [int(host[start : start + 8], 16) for start in range(0, len(host), 8)]
    data = struct.pack(f"={len(words)}I", *words)
    if len(words) == 1:
        return f"{ipaddress.IPv4Address(data)}:{int(port, 16)}"
    address = ipaddress.IPv6Address(data)
    shown = str(address.ipv4_mapped) if address.ipv4_mapped else f"[{address}]"
    return f"{shown}:{int(port, 16)}"
