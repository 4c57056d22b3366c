"""A folder mounted through FUSE that stops answering where a test wants it to, and answers again when told.

Used by the tests of storage that does not answer. Runs as a process of its own (this file as a program), so
that no test ever waits for it. Invariant: leaving the `with` block aborts the connection, which wakes
everybody who waits for it, and unmounts; so does the end of the process, whatever ended it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_OPS = {1: "lookup", 3: "getattr", 14: "open", 15: "read", 17: "statfs", 27: "opendir", 28: "readdir"}
_SILENT = (2, 36, 42)  # forget, interrupt and batch-forget have no answer
_ENOENT, _ENOSYS = 2, 38
_MNT_DETACH = 2
_LIFE_S = 400
_PR_SET_PDEATHSIG = 1


class FrozenMount:
    """A mounted folder; `path` is where it is."""

    def __init__(self, path: Path, process: subprocess.Popen[bytes]) -> None:
        self.path = path
        self._process = process
        self.number = self._line().split()[1]

    def wait_frozen(self) -> None:
        """Until a request has come that is not answered."""
        assert self._line() == "frozen"

    def thaw(self) -> None:
        """Answer what waits, and everything from then on."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"thaw\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Abort, unmount, end."""
        self._process.kill()  # closes /dev/fuse, which aborts the connection
        self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        _LIBC.umount2(os.fsencode(self.path), _MNT_DETACH)
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode().strip()


@contextlib.contextmanager
def mounted(source: Path, freeze: str) -> Iterator[FrozenMount]:
    """`source` mounted read-only. `freeze`: "OPERATION NAME [OFFSET]", the request that gets no answer, nor
    does any after it; for a read: the first one that reaches the offset. "never": it always answers.
    """
    Path("/tmp/mounts").mkdir(exist_ok=True)
    path = Path(tempfile.mkdtemp(dir="/tmp/mounts"))
    process = subprocess.Popen(
        [sys.executable, __file__, str(source), str(path), freeze],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    mount = FrozenMount(path, process)
    try:
        yield mount
    finally:
        mount.close()


class _Server:
    """Answers the kernel."""

    def __init__(self, fd: int, source: str, freeze: str) -> None:
        self._fd = fd
        self._paths = {1: source}
        self._numbers = {source: 1}
        words = freeze.split()
        self._rule = (words[0], words[1], int(words[2]) if len(words) > 2 else 0) if len(words) > 1 else None

    def run(self) -> None:
        while True:
            data = os.read(self._fd, 1 << 21)
            length, op, unique, node = struct.unpack_from("<IIQQ", data)
            body = data[40:length]
            if op in _SILENT:
                continue
            if op == 26:
                self._answer(unique, self._init(body))
                continue
            self._maybe_freeze(_OPS.get(op, ""), self._paths.get(node, ""), body)
            try:
                self._answer(unique, self._reply(op, self._paths[node], body))
            except OSError as error:
                self._answer(unique, b"", error.errno or _ENOENT)

    def _maybe_freeze(self, op: str, path: str, body: bytes) -> None:
        if self._rule is None or op != self._rule[0]:
            return
        name, end = os.path.basename(path), 1
        if op == "lookup":
            name = os.fsdecode(body.rstrip(b"\0"))
        if op == "read":
            offset, size = struct.unpack_from("<QI", body, 8)
            end = offset + size
        if name == self._rule[1] and end > self._rule[2]:
            print("frozen", flush=True)
            self._rule = None
            if not sys.stdin.readline():
                sys.exit()

    def _answer(self, unique: int, body: bytes, error: int = 0) -> None:
        with contextlib.suppress(OSError):  # it was interrupted meanwhile
            os.write(self._fd, struct.pack("<IiQ", 16 + len(body), -error, unique) + body)

    def _init(self, body: bytes) -> bytes:
        _, minor, readahead, _ = struct.unpack_from("<IIII", body)
        return struct.pack("<IIIIHHII", 7, min(minor, 31), readahead, 0, 12, 9, 1 << 17, 1) + bytes(36)

    def _reply(self, op: int, path: str, body: bytes) -> bytes:
        if op == 1:
            child = os.path.join(path, os.fsdecode(body.rstrip(b"\0")))
            attributes, number = self._attributes(child), self._number(child)
            return struct.pack("<QQQQII", number, 0, 0, 0, 0, 0) + attributes
        if op == 3:
            return struct.pack("<QII", 0, 0, 0) + self._attributes(path)
        if op in (14, 27):
            return struct.pack("<QII", 0, 0, 0)
        if op == 15:
            offset, size = struct.unpack_from("<QI", body, 8)
            with open(path, "rb") as file:
                return os.pread(file.fileno(), size, offset)
        if op == 17:
            return struct.pack("<QQQQQIIII", 1000, 500, 500, 100, 50, 4096, 255, 4096, 0) + bytes(24)
        if op == 28:
            offset, size = struct.unpack_from("<QI", body, 8)
            return self._names(path, offset, size)
        if op in (18, 25, 29):
            return b""
        raise OSError(_ENOSYS, "not here")

    def _names(self, path: str, offset: int, size: int) -> bytes:
        packed = b""
        for place, name in enumerate(sorted(os.listdir(path))[offset:], offset + 1):
            raw = os.fsencode(name)
            entry = struct.pack("<QQII", place + 1, place, len(raw), 0) + raw
            entry += bytes(-len(entry) % 8)
            if len(packed) + len(entry) > size:
                break
            packed += entry
        return packed

    def _number(self, path: str) -> int:
        number = self._numbers.setdefault(path, len(self._numbers) + 1)
        self._paths[number] = path
        return number

    def _attributes(self, path: str) -> bytes:
        found = os.stat(path)  # links are followed, as a mirror of the source's contents
        mode = (found.st_mode & ~0o777) | (0o555 if stat.S_ISDIR(found.st_mode) else 0o444)
        times = (int(found.st_atime), int(found.st_mtime), int(found.st_ctime))
        blocks = -(-found.st_size // 512)
        numbers = struct.pack("<6Q", self._number(path), found.st_size, blocks, *times)
        return numbers + struct.pack("<10I", 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def _serve(source: str, path: str, freeze: str) -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, 9)
    signal.alarm(_LIFE_S)  # a test that waits for who cannot be killed fails, and does not hang
    fd = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if _LIBC.mount(b"slowbox:/models", os.fsencode(path), b"fuse.testfs", 1, options):
        raise OSError(ctypes.get_errno(), "mount")
    minor = next(
        words[2].partition(":")[2]
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if (words := line.split())[4] == path
    )
    print("mounted", minor, flush=True)
    _Server(fd, source, freeze).run()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
