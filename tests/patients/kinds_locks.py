"""Patients that wait for a lock: of a kernel cache, of a file, of a pipe that is full; and living builders.

Listed by `kinds`. Invariant: the lock is the real one (torch's FileBaton, flock), and its holder is as said.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from firstlight.doctor.case.evidence import Case
from firstlight.doctor.case.values_host import FileLocks
from firstlight.doctor.case.values_process import PythonStacks
from patients.foreign_servers import Foreign
from patients.models import TINY
from patients.native import SLOW_TO_JUDGE, Server, change
from patients.patient import Kind, Patient, Unavailable, Ward, until

_STUCK = frozenset({"stuck"})
_ON_ITS_WAY = frozenset({"starting", "slow"})
_COMPILING = frozenset({"jit-compiling"})
_LOCKED = frozenset({"file-lock-held"})
_SOURCE = """#include <torch/extension.h>
torch::Tensor twice(torch::Tensor x) { return x + x; }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("twice", &twice); }
"""


def _builds(ward: Ward, *flags: str, is_left: bool = False) -> Server:
    """A server that compiles an operator first; `is_left`: a builder that was killed left its lock."""
    if shutil.which("g++") is None or shutil.which("ninja") is None:
        raise Unavailable("torch compiles extensions with g++ and ninja, which are not both here")
    cache, name = ward.folder / "extensions", f"operators_{ward.random.randrange(100)}"
    (cache / name).mkdir(parents=True)
    if is_left:
        lock = cache / name / "lock"
        lock.touch()
        age_s = ward.random.uniform(60, 86400)
        os.utime(lock, (time.time() - age_s, time.time() - age_s))
    source = ward.folder / "operators.cpp"
    source.write_text(_SOURCE)
    mistake = change("rank", "firstlight.engine.worker.startup", "build_first", source=str(source), name=name)
    variables = {**mistake, "TORCH_EXTENSIONS_DIR": str(cache)}
    return Server(ward, ward.models / TINY, *SLOW_TO_JUDGE, *flags, variables=variables).started()


def _stale_baton(ward: Ward) -> Patient:
    server = _builds(ward, is_left=True)
    _until_called(server, "device")
    time.sleep(2.0)  # the extension module is imported
    time.sleep(ward.random.uniform(0.0, 1.0))
    return server.patient()


def _builder(ward: Ward) -> Patient:
    server = _builds(ward)
    until(lambda: _compilers(ward), "a compiler", every_s=0.05)
    time.sleep(ward.random.uniform(0.2, 8.0))
    return server.patient()


def _builder_and_waiter(ward: Ward) -> Patient:
    server = _builds(ward, "--tensor-parallel", "2")
    until(lambda: _compilers(ward), "a compiler", every_s=0.05)
    time.sleep(ward.random.uniform(0.5, 8.0))
    return server.patient()


def _killed_builder(ward: Ward) -> Patient:
    """The compiler is ended as the kernel ends it for want of memory; the engine gives up."""
    server = _builds(ward)
    pid = until(lambda: _compilers(ward), "a compiler", every_s=0.05)[0]
    time.sleep(ward.random.uniform(0.1, 3.0))
    os.kill(pid, signal.SIGKILL)
    at_s = time.monotonic()
    server.process.wait(60)
    return server.patient(fault_s=at_s)


def _compilers(ward: Ward) -> list[int]:
    """The compilers proper of this ward."""
    from patients.patient import marked

    found = []
    for pid in marked(ward.token):
        with open(f"/proc/{pid}/comm") as file:
            if file.read().strip() == "cc1plus":
                found.append(pid)
    return found


def _until_called(server: Server, phase: str) -> None:
    """Until rank 0 is in this phase or was."""
    from patients.native import box

    def is_there() -> bool:
        found = box(server.run_dir, "rank-0")
        return found is not None and any(record.name == phase for record in found.phases)

    until(is_there, f"phase {phase}", every_s=0.01)


def _locks_first(ward: Ward, path: Path, *, polls: bool = False) -> Server:
    mistake = change("rank", "firstlight.engine.worker.startup", "lock_first", path=str(path), polls=polls)
    server = Server(ward, ward.models / TINY, *SLOW_TO_JUDGE, variables=mistake).started()
    _until_called(server, "rendezvous")
    time.sleep(0.5)
    return server


def _path(ward: Ward) -> Path:
    folder = ward.folder / "cache"
    folder.mkdir()
    return folder / ward.random.choice(["kernels.lock", "shards.lock", "tuning.db", "index"])


def _held_by_another(ward: Ward) -> Patient:
    """Some other program has the lock, and lives."""
    path = _path(ward)
    code = (
        f"import fcntl, signal; f = open({str(path)!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX); signal.pause()"
    )
    holder = ward.python("-c", code)
    until(lambda: _is_locked(path), "the lock")
    server = _locks_first(ward, path)
    return server.patient(f"pid {holder.pid}")


def _held_and_polled(ward: Ward) -> Patient:
    """The same with the `filelock` package on both sides, which tries again and again instead of waiting."""
    path = ward.folder / "weights.lock"
    code = f"import filelock, signal; l = filelock.FileLock({str(path)!r}); l.acquire(); signal.pause()"
    holder = ward.python("-c", code)
    until(lambda: _is_locked(path), "the lock")
    server = _locks_first(ward, path, polls=True)
    return server.patient(f"pid {holder.pid}")


def _held_by_a_child_of_the_dead(ward: Ward) -> Patient:
    """The taker is dead; its child inherited the open file, and with it the lock."""
    path = _path(ward)
    code = (
        f"import fcntl, os, subprocess; f = open({str(path)!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
        "os.set_inheritable(f.fileno(), True); subprocess.Popen(['sleep', '600'], close_fds=False); "
        "os._exit(1)"
    )
    ward.python("-c", code).wait(20)
    assert _is_locked(path)
    return _locks_first(ward, path).patient()


def _is_locked(path: Path) -> bool:
    if not path.exists():
        return False
    with path.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _nobody_reads_the_supervisor(ward: Ward) -> Patient:
    """`firstlight serve 2>&1 | something` whose reader has stopped reading; the pipe is almost full."""
    read_fd, write_fd = os.pipe()
    ward.stack.callback(os.close, read_fd)
    size = fcntl.fcntl(write_fd, fcntl.F_SETPIPE_SZ, 4096)
    os.write(write_fd, b"." * (size - ward.random.randrange(100, 700)))
    server = Server(ward, ward.models / TINY, *SLOW_TO_JUDGE, stderr=write_fd, stdout=write_fd)
    os.close(write_fd)
    server.started()
    until(lambda: _is_writing(server.process.pid), "the full pipe", every_s=0.1)
    return server.patient()


def _nobody_reads_a_rank(ward: Ward) -> Patient:
    """The parent of a foreign server made a pipe for its log, and does not read it."""
    order = {"fault": "report", "rank": ward.random.randrange(2), "report_lines": 5000}
    read_fd, write_fd = os.pipe()
    holder = "import os, sys, signal; signal.pause()"
    ward.python("-c", holder, stdin=read_fd)  # somebody has it open, so that no write fails
    server = Foreign(ward, "sglang", ward.models / TINY, 2, order, stderr=write_fd, stdout=write_fd)
    os.close(read_fd)
    os.close(write_fd)
    pid = server.titled(f"sglang::scheduler_TP{order['rank']}")
    until(lambda: _is_writing(pid), "the full pipe", every_s=0.1)
    return server.patient(f"rank {order['rank']}", subject=f"rank-{order['rank']}")


def _is_writing(pid: int) -> bool:
    """Whether some thread sleeps in a write; the call has number 1 here and 64 there."""
    number = "1" if os.uname().machine == "x86_64" else "64"
    for task in Path(f"/proc/{pid}/task").iterdir():
        words = (task / "syscall").read_text().split()
        if words[0] == number and "pipe" in (task / "wchan").read_text():
            return True
    return False


def _in_baton(case: Case) -> bool:
    stacks = case.of(PythonStacks, "rank-0")
    frames = [frame for thread in stacks.threads for frame in thread.frames] if stacks else []
    return any("file_baton" in frame.file for frame in frames)


def _somebody_waits(case: Case) -> bool:
    locks = case.of(FileLocks, "run")
    return locks is not None and any("rank-0" in lock.waiters for lock in locks.locks)


assert sys.platform == "linux"
KINDS = (
    Kind(
        name="stale-jit-lock",
        is_quick=True,
        what="torch waits for the lock of a builder that was killed yesterday",
        start=_stale_baton,
        causes=frozenset({"stale-jit-lock"}),
        conditions=_STUCK,
        subject="rank-0",
        holds=_in_baton,
    ),
    Kind(
        name="jit-killed",
        what="the compiler of an extension is killed; the rank gives up",
        start=_killed_builder,
        causes=frozenset({"jit-killed"}),
        conditions=frozenset({"dead"}),
        subject="rank-0",
    ),
    Kind(
        name="builder-lives",
        what="torch compiles an extension: minutes without a word, and all is well",
        start=_builder,
        causes=_COMPILING,
        conditions=_ON_ITS_WAY,
    ),
    Kind(
        name="builder-and-waiter",
        what="one rank compiles an extension, the other waits for its lock: all is well",
        start=_builder_and_waiter,
        causes=_COMPILING,
        conditions=_ON_ITS_WAY,
    ),
    Kind(
        name="flock-held",
        is_quick=True,
        what="a living process of somebody else holds a file lock",
        start=_held_by_another,
        causes=_LOCKED,
        conditions=_STUCK,
        holds=_somebody_waits,
    ),
    Kind(
        name="flock-polled",
        what="the same, and both sides poll for the lock",
        start=_held_and_polled,
        causes=_LOCKED,
        conditions=_STUCK,
    ),
    Kind(
        name="flock-orphaned",
        what="a file lock whose taker is dead is kept by its child",
        start=_held_by_a_child_of_the_dead,
        causes=_LOCKED,
        conditions=_STUCK,
        holds=_somebody_waits,
    ),
    Kind(
        name="supervisor-pipe-full",
        what="nobody reads the standard error of `firstlight serve`",
        start=_nobody_reads_the_supervisor,
        causes=frozenset({"pipe-full"}),
        conditions=_STUCK,
        subject="supervisor",
    ),
    Kind(
        name="rank-pipe-full",
        what="nobody reads the standard error of a foreign server, and one rank says a lot",
        start=_nobody_reads_a_rank,
        causes=frozenset({"pipe-full"}),
        conditions=_STUCK,
    ),
)
