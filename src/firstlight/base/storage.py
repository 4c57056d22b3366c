"""Mounts: where a path lies, who serves it, and who waits in the kernel for it, told without touching it.

Standard library only. Invariant: nothing here opens, lists or stats anything below a mount that may stop
answering: names are followed as text, and links only where the file system is this machine's own.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from pathlib import Path
from typing import NamedTuple

from firstlight.base.errors import ResourceError

# Served by somebody else than this machine's kernel: a daemon, or a server at the other end of a wire.
_REMOTE = re.compile(
    r"fuse(\.|$)|nfs|cifs|smb3|9p$|ceph|lustre|gpfs|beegfs|afs$|glusterfs|orangefs|virtiofs|wekafs"
)
# Where the kernel says that a thread waits for such a server. Not all of these are in state D: a request to
# a FUSE daemon may be interrupted until the daemon has taken it.
REMOTE_WAITS = re.compile(
    r"request_wait_answer|fuse_|nfs|rpc_wait|cifs|smb2?_|wait_for_response|p9_|ceph|lustre"
)
# Where it says that a thread waits for a page or a block.
_LOCAL_WAITS = re.compile(r"folio_wait|wait_on_page|filemap|io_schedule|bit_wait|blk_|blkdev|jbd2")
# System calls that wait for a file: the place of the path among their arguments, and those with a descriptor.
_X86_64 = (
    {2: 0, 4: 0, 6: 0, 21: 0, 59: 0, 89: 0, 137: 0, 257: 1, 262: 1, 267: 1, 269: 1, 322: 1, 332: 1, 437: 1}
    | {439: 1},
    frozenset((0, 1, 3, 5, 17, 18, 19, 20, 74, 75, 78, 138, 217, 295, 296, 327, 328)),
)
_AARCH64 = (
    {43: 0, 48: 1, 56: 1, 78: 1, 79: 1, 221: 0, 281: 1, 291: 1, 437: 1, 439: 1},
    frozenset((44, 57, 61, 63, 64, 65, 66, 67, 68, 69, 70, 80, 82, 83, 286, 287)),
)
_PATH_CALLS, _FD_CALLS = _AARCH64 if platform.machine() == "aarch64" else _X86_64
_LINKS = 40
_PATH_MAX = 4096
_PAGE_BYTES = 4096
_MAX_BYTES = 4 << 20


class Mount(NamedTuple):
    """One line of /proc/PID/mountinfo. `number`: the minor of its device, which names a FUSE connection."""

    point: str
    kind: str
    source: str
    number: int

    @property
    def is_remote(self) -> bool:
        """Whether it answers only if somebody else does."""
        return bool(_REMOTE.match(self.kind))

    @property
    def server(self) -> str:
        """The machine at the other end, as in "server:/export" or "//server/share"; else empty."""
        if self.source.startswith("//"):
            return self.source[2:].partition("/")[0]
        host, colon, _ = self.source.rpartition(":/")
        return host if colon and not self.kind.startswith("fuse") else ""

    def describe(self) -> str:
        """As in a sentence: what it is, from where, by whom."""
        server = f", server {self.server}" if self.server else ""
        return f"the mount {self.point} ({self.kind}, {self.source}{server})"

    def remedy(self) -> str:
        """What to do about it when it does not answer."""
        if self.kind.startswith("fuse"):
            return (
                f"restart the daemon that serves {self.point}; if that does not help, end all that waits "
                f"(`echo 1 > /sys/fs/fuse/connections/{self.number}/abort`), `umount -l {self.point}` and "
                "mount again; or serve a copy on a local disk."
            )
        if self.kind.startswith("nfs"):
            return (
                f"see whether {self.server or 'its server'} answers (`nfsstat -m`, `rpcinfo -t "
                f"{self.server or 'SERVER'} nfs`, `dmesg`); if not, `umount -f -l {self.point}`; mounted "
                "with softerr,timeo=100,retrans=3 reads fail instead; or serve a copy on a local disk."
            )
        if self.is_remote:
            return (
                f"see whether {self.server or 'its server'} answers, and `dmesg`; if not, `umount -f -l "
                f"{self.point}` and mount again; or serve a copy on a local disk."
            )
        return (
            f"look for errors of the disk: `dmesg`, `smartctl -a {self.source}`; serve a copy on another one."
        )


def read_mounts(text: str) -> tuple[Mount, ...]:
    """The mounts of a mountinfo file, later ones over earlier ones."""
    found = []
    for line in text.splitlines():
        fields, _, rest = line.partition(" - ")
        words, ends = fields.split(), rest.split()
        if len(words) >= 5 and len(ends) >= 2:
            number = int(words[2].partition(":")[2] or 0)
            found.append(Mount(_plain(words[4]), ends[0], _plain(ends[1]), number))
    return tuple(found)


def mounts_of(pid: int | str = "self") -> tuple[Mount, ...]:
    """Those that a process sees; none where it is not told."""
    try:
        return read_mounts(Path(f"/proc/{pid}/mountinfo").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ()


def mount_of(path: str, mounts: tuple[Mount, ...]) -> tuple[str, Mount] | None:
    """Where a path leads to, and the mount it lies on. Links are followed up to the first remote mount."""
    done, todo = "/", [part for part in os.path.abspath(path).split("/") if part]
    links = 0
    while todo:
        done = os.path.join(done, todo.pop(0))
        mount = _holder(done, mounts)
        if mount is not None and mount.is_remote:
            return os.path.join(done, *todo), mount
        if links < _LINKS and os.path.islink(done):
            links += 1
            target = os.path.normpath(os.path.join(os.path.dirname(done), os.readlink(done)))
            done, todo = "/", [*(part for part in target.split("/") if part), *todo]
    mount = _holder(done, mounts)
    return (done, mount) if mount is not None else None


def _holder(path: str, mounts: tuple[Mount, ...]) -> Mount | None:
    found = None
    for mount in mounts:
        inside = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        if inside and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def _plain(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


class Wait(NamedTuple):
    """A thread that waits in the kernel. `mark` changes when it was woken or read anything in between."""

    tid: int
    mark: tuple[str, ...]


def waits_of(pid: int) -> tuple[Wait, ...]:
    """The threads of a process that wait for storage at this moment, the main one first."""
    found = []
    try:
        tids = sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:
        return ()
    for tid in tids:
        task = f"/proc/{pid}/task/{tid}"
        state, wchan = _text(f"{task}/stat").rpartition(")")[2][:2].strip(), _text(f"{task}/wchan")
        call = _text(f"{task}/syscall")
        if REMOTE_WAITS.search(wchan) or (state == "D" and is_for_storage(call, wchan)):
            runs = _text(f"{task}/schedstat").split()[-1:]
            found.append(Wait(tid, (*runs, call)))
    return tuple(found)


def is_for_storage(call: str, wchan: str) -> bool:
    """Whether a thread in state D waits for a file: others wait so for a driver, or for who has forked.

    `call`: its line of /proc/PID/syscall, which has -1 in a page fault and is empty where it is not told.
    """
    number = _number(call.split())
    is_call = number is None or number < 0 or number in _FD_CALLS or number in _PATH_CALLS
    return is_call or bool(_LOCAL_WAITS.search(wchan))


def waited_for(pid: int, tid: int) -> str:
    """The path that a thread waits for, by its system call, else by what it has mapped; empty: not told."""
    words = _text(f"/proc/{pid}/task/{tid}/syscall").split()
    number = _number(words)
    try:
        if number in _FD_CALLS:
            return os.readlink(f"/proc/{pid}/fd/{int(words[1], 16)}")
        if number in _PATH_CALLS:
            return _named(pid, words, _PATH_CALLS[number])
    except (OSError, IndexError, ValueError):
        return ""
    mounts = mounts_of(pid)
    mapped = dict.fromkeys(line.split(maxsplit=5)[5] for line in _maps(pid) if line.count("/"))
    found = (path for path in mapped if (at := _holder(path, mounts)) is not None and at.is_remote)
    return next(found, "")


def _number(words: list[str]) -> int | None:
    return int(words[0]) if words and words[0].lstrip("-").isdigit() else None


def _maps(pid: int) -> list[str]:
    lines = _text(f"/proc/{pid}/maps").splitlines()
    return [line for line in lines if len(line.split(maxsplit=5)) == 6]


def _named(pid: int, words: list[str], place: int) -> str:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        at = int(words[1 + place], 16)
        memory.seek(at)
        # Page by page: a path may go on in the next one, and what lies behind its end may not be mapped.
        raw = memory.read(min(_PATH_MAX, _PAGE_BYTES - at % _PAGE_BYTES)) or b""
        while b"\0" not in raw and len(raw) < _PATH_MAX and (more := memory.read(_PAGE_BYTES)):
            raw += more
    path = os.fsdecode(raw.partition(b"\0")[0])
    folder = ctypes.c_int(int(words[1], 16) & 0xFFFFFFFF).value if place else -100
    base = os.readlink(f"/proc/{pid}/cwd" if folder == -100 else f"/proc/{pid}/fd/{folder}")
    return os.path.normpath(os.path.join(base, path))


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def silent_storage(path: str, seconds: float, pid: int | str = "self") -> ResourceError:
    """The error of a path that was waited for in vain."""
    found = mount_of(path, mounts_of(pid)) if path else None
    after = f"nothing came within {seconds:.0f} s"
    if found is None:
        what = f"{path}: " if path else ""
        return ResourceError(
            f"storage does not answer: {what}{after}.",
            "See which mounts answer (`stat -f MOUNT`, one at a time), and `dmesg`.",
        )
    where, mount = found
    return ResourceError(f"storage does not answer: {where} on {mount.describe()}: {after}.", mount.remedy())
