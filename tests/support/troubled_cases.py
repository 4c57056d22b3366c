"""Made-up cases, one for each trouble that needs no GPU: only the evidence that its rule asks for."""

from __future__ import annotations

import msgspec

from firstlight.base.blackbox.reader import Collective, Odometer
from firstlight.doctor.case.evidence import Case
from firstlight.doctor.case.target import HOST, RUN, Engine, Role
from firstlight.doctor.case.values import Failed
from firstlight.doctor.case.values_device import KernelLog
from firstlight.doctor.case.values_host import (
    CgroupMemory,
    CheckpointFiles,
    Compiler,
    Compilers,
    FileLock,
    FileLocks,
    FileProblem,
    FreeSpace,
    Generation,
    HttpProbe,
    JitLocks,
    LockFile,
    PipeEnds,
    Pipes,
    Pressure,
    SocketEnd,
    Sockets,
    Stall,
)
from firstlight.doctor.case.values_process import (
    BlackBoxSeen,
    Descriptor,
    Descriptors,
    Environment,
    ExitRecord,
    InputOutput,
    Limits,
    ProcessState,
    PythonStacks,
    StorageWait,
    Threads,
)
from support.case_rows import (
    Rows,
    asleep,
    both,
    boxed,
    busy,
    native,
    one_rank,
    stack,
    stack_thread,
    thread,
    two_ranks,
)
from support.doctor_scenes import box, case, made_up, target


def stopped() -> Case:
    return two_ranks(asleep("rank-0", 10), both("rank-1", ProcessState(state="T")), boxed("rank-1", 1))


def killed_for_memory() -> Case:
    record = ExitRecord(name="rank-1", signal=9, was_told=False, is_oom=True)
    return two_ranks(asleep("rank-0", 10), both("rank-1", ProcessState(state="")), [(0, "rank-1", record)])


def killed_for_memory_by_the_kernels_log() -> Case:
    line = "[950.000] Memory cgroup out of memory: Killed process 11 (python) total-vm:1kB"
    return two_ranks(
        asleep("rank-0", 10),
        both("rank-1", ProcessState(state="Z", num_threads=1)),
        [(0, HOST, KernelLog(lines=(line,)))],
    )


def killed_by_somebody() -> Case:
    record = ExitRecord(name="rank-1", signal=9, was_told=False, is_oom=False)
    group = CgroupMemory(path="/", version=2, current_bytes=1, max_bytes=None, oom_kills=3)
    return two_ranks(
        asleep("rank-0", 10),
        both("rank-1", ProcessState(state="")),
        [(0, "rank-1", record), (0, HOST, group)],
    )


def refused_memory() -> Case:
    words = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9000 bytes"
    record = ExitRecord(name="rank-0", code=1, was_told=False, message=words)
    return one_rank(both("rank-0", ProcessState(state="")), [(0, "rank-0", record)])


def zombie() -> Case:
    return two_ranks(asleep("rank-0", 10), both("rank-1", ProcessState(state="Z", num_threads=1)))


def absent() -> Case:
    waiting = boxed("rank-0", 0, phase="rendezvous", odometer=Odometer(1, 2, "ranks"))
    late = boxed("rank-1", 1, phase="imports")
    return two_ranks(asleep("rank-0", 10), asleep("rank-1", 11), waiting, late)


def desync() -> Case:
    here = boxed(
        "rank-0",
        0,
        phase="serving",
        requests=(1, 0),
        collectives=(Collective("plan", 5), Collective("plan", 4)),
    )
    there = boxed("rank-1", 1, phase="serving", collectives=(Collective("plan", 4), Collective("plan", 4)))
    return two_ranks(asleep("rank-0", 10), asleep("rank-1", 11), here, there)


def deadlock() -> Case:
    ends = (
        SocketEnd(protocol="unix", inode=5, state="ESTABLISHED", owners=("rank-0",), peers=("api",)),
        SocketEnd(protocol="unix", inode=6, state="ESTABLISHED", owners=("api",), peers=("rank-0",)),
    )
    opened = [
        (5, "rank-0"),
        (6, "api"),
    ]
    rows = [
        (look, key, Descriptors(open=(Descriptor(fd=3, kind="socket", target="", inode=inode),), num_open=4))
        for inode, key in opened
        for look in (0, 1)
    ]
    return one_rank(
        asleep("rank-0", 10, syscall="recvfrom", fd=3),
        asleep("api", 20, syscall="recvfrom", fd=3),
        rows,
        both(RUN, Sockets(sockets=ends, has_unix_peers=True)),
    )


def file_lock() -> Case:
    lock = FileLock(
        kind="FLOCK",
        mode="WRITE",
        holder="pid-99",
        holder_pid=99,
        taker_pid=98,
        is_taker_alive=False,
        inode=7,
        path="/cache/x.lock",
        waiters=("rank-0",),
    )
    return one_rank(asleep("rank-0", 10, syscall="flock"), both(RUN, FileLocks(locks=(lock,))))


def full_pipe() -> Case:
    opened = Descriptors(
        open=(Descriptor(fd=2, kind="pipe", target="pipe:[8]", inode=8, mode="w"),), num_open=3
    )
    return one_rank(
        asleep("rank-0", 10, syscall="write", fd=2, wchan="pipe_write"),
        both("rank-0", opened),
        both(RUN, Pipes(pipes=(PipeEnds(inode=8, readers=("pid-77",), writers=("rank-0",)),))),
    )


def locked_threads() -> Case:
    first = stack_thread(10, ("engine/worker/rank_loop.py", "step", "with self._pages_lock:"))
    second = stack_thread(12, ("engine/worker/rank_loop.py", "evict", "with self._queue_lock:"))
    seen = PythonStacks(threads=(first, second), tool="py-spy")
    return one_rank(asleep("rank-0", 10), both("rank-0", seen))


def gil() -> Case:
    frames = stack("rank-0", ("ops/native.py", "call", "library.sleep(100)"), owns_gil=True)
    return one_rank(asleep("rank-0", 10, syscall="clock_nanosleep"), frames)


def spins() -> Case:
    serving = boxed("rank-0", 0, phase="serving", requests=(1, 0))
    frames = stack("rank-0", ("engine/worker/rank_loop.py", "_loop", "while not done:"), is_active=True)
    return one_rank(busy("rank-0", 10), serving, frames)


def compiling() -> Case:
    looks = [
        (look, RUN, Compilers(running=(Compiler(pid=5, name="nvcc", cpu_s=1.0 + look, parent="rank-0"),)))
        for look in (0, 1)
    ]
    return one_rank(asleep("rank-0", 10), looks)


def waits_for_a_build() -> Case:
    looks = [
        (look, RUN, Compilers(running=(Compiler(pid=5, name="nvcc", cpu_s=1.0 + look, parent="rank-0"),)))
        for look in (0, 1)
    ]
    frames = stack("rank-1", ("torch/utils/file_baton.py", "FileBaton.wait", "time.sleep(0.1)"))
    return two_ranks(asleep("rank-0", 10), asleep("rank-1", 11), frames, looks)


def stale_lock() -> Case:
    lock = LockFile(
        cache="torch_extensions",
        path="/cache/op/lock",
        age_s=900.0,
        is_existence_lock=True,
        is_older_than_launch=True,
        is_older_than_boot=False,
    )
    return one_rank(
        asleep("rank-0", 10),
        stack("rank-0", ("torch/utils/file_baton.py", "FileBaton.wait", "time.sleep(self.wait_seconds)")),
        [(0, RUN, JitLocks(locks=(lock,), folders=("/cache",)))],
        both(RUN, Compilers(running=())),
    )


def killed_compiler() -> Case:
    words = "FAILED: op.cuda.o code=137 ninja: build stopped: subcommand failed"
    record = ExitRecord(name="rank-0", code=1, was_told=False, message=words)
    return one_rank(both("rank-0", ProcessState(state="")), [(0, "rank-0", record)])


def slow_disk() -> Case:
    rows: Rows = []
    for look in (0, 1):
        size = 10**6 * (1 + look)
        rows.append((look, "rank-0", InputOutput(rchar=0, wchar=0, read_bytes=size, write_bytes=0)))
    return one_rank(asleep("rank-0", 10), rows, boxed("rank-0", 0, phase="weights"))


def waits_for_a_disk() -> Case:
    state = {"state": "D", "syscall": "pread64", "wchan": "folio_wait_bit_common"}
    young = msgspec.structs.replace(
        BlackBoxSeen(path="b", box=box(0, phase="weights"), is_alive=True), age_s=4.0
    )
    return one_rank(asleep("rank-0", 10, **state), both("rank-0", young))


def dead_mount(*, answers: bool = False, marks: tuple[str, str] = ("7", "7"), owns_gil: bool = False) -> Case:
    state = {"state": "D", "syscall": "pread64", "wchan": "folio_wait_bit_common"}
    if owns_gil:  # a request to a daemon may be interrupted until the daemon has taken it
        state = {"state": "S", "syscall": "openat", "wchan": "request_wait_answer"}
    frames = stack("rank-0", ("text/folder.py", "_read_json", "path.read_text()"), owns_gil=owns_gil)
    young = msgspec.structs.replace(
        BlackBoxSeen(path="b", box=box(0, phase="weights"), is_alive=True), age_s=4.0
    )
    waits: Rows = [
        (
            look,
            "rank-0",
            StorageWait(
                tid=10,
                mark=(mark,),
                path="/mnt/m/a.gguf",
                mount="the mount /mnt/m (nfs4, filer:/m, server filer)",
                remedy="see whether filer answers.",
                answers=answers,
            ),
        )
        for look, mark in enumerate(marks)
    ]
    return one_rank(asleep("rank-0", 10, **state), both("rank-0", young), frames, waits)


def slow_mount() -> Case:
    return dead_mount(answers=True)


def mount_that_trickles() -> Case:
    return dead_mount(answers=True, marks=("7", "9"))


def thrashes() -> Case:
    rows: Rows = []
    for look in (0, 1):
        group = CgroupMemory(
            path="/a", version=2, current_bytes=99, max_bytes=100, file_refaults=1000 * look, oom_kills=0
        )
        rows.append((look, HOST, group))
        faults = ProcessState(state="S", num_threads=1, major_faults=1000 * look)
        rows.append((look, "rank-0", faults))
        rows.append((look, "rank-0", Threads(threads=(thread(10),), cpu_source="schedstat")))
    return one_rank(rows, boxed("rank-0", 0, phase="weights"))


def truncated() -> Case:
    problem = FileProblem(kind="truncated", path="/m/a.safetensors", detail="ends at 10 of 20 bytes")
    files = CheckpointFiles(path="/m", num_files=2, total_bytes=30, problems=(problem,))
    return one_rank(both("rank-0", ProcessState(state="Z", num_threads=1)), [(0, RUN, files)])


def downloading() -> Case:
    supervisor = made_up("supervisor", 10, Role.SUPERVISOR)
    end = SocketEnd(
        protocol="tcp", inode=1, state="SYN_SENT", local="a:1", remote="10.0.0.1:443", owners=("supervisor",)
    )
    rows = [
        *asleep("supervisor", 10),
        *stack("supervisor", ("huggingface_hub/file_download.py", "hf_hub_download", "get()")),
        *both(RUN, Sockets(sockets=(end,))),
    ]
    return case(native(supervisor, expected_ranks=1), rows)


def starved() -> Case:
    pressure = Pressure(
        scope="host", cpu=Stall(some_percent=90.0, full_percent=0.0, some_total_us=1, full_total_us=0)
    )
    rows: Rows = []
    for look in (0, 1):
        seen = BlackBoxSeen(
            path="b", box=box(0, phase="build", odometer=Odometer(look, 9, "layers")), is_alive=True
        )
        rows.append((look, "rank-0", seen))
    return one_rank(busy("rank-0", 10, 0.3, queued=0.6), rows, both(HOST, pressure))


def port_taken() -> Case:
    other = SocketEnd(protocol="tcp", inode=1, state="LISTEN", local="127.0.0.1:8000", owners=("pid-9",))
    return one_rank(
        asleep("rank-0", 10), both(RUN, Sockets(sockets=(other,))), addresses=(("127.0.0.1", 8000),)
    )


def proxy() -> Case:
    variables = {"HTTP_PROXY": "http://10.1.1.1:3128"}
    end = SocketEnd(
        protocol="tcp", inode=1, state="ESTABLISHED", local="a:1", remote="10.1.1.1:3128", owners=("api",)
    )
    return one_rank(
        asleep("rank-0", 10),
        [(0, "api", Environment(variables=variables))],
        both(RUN, Sockets(sockets=(end,))),
    )


def out_of_files() -> Case:
    limits = Limits(
        max_open_files=64,
        num_open_files=64,
        max_processes=None,
        num_user_threads=None,
        max_locked_bytes=None,
        max_address_bytes=None,
        num_threads=1,
    )
    return one_rank(asleep("rank-0", 10), [(0, "rank-0", limits)])


def small_shm() -> Case:
    space = FreeSpace(purpose="shm", path="/dev/shm", total_bytes=1 << 20, free_bytes=0)
    record = ExitRecord(name="rank-0", signal=7, was_told=False)
    return one_rank(both("rank-0", ProcessState(state="")), [(0, HOST, space), (0, "rank-0", record)])


def green() -> Case:
    probe = HttpProbe(url="http://h/health", address="127.0.0.1", outcome="answered", status=200)
    tried = Generation(url="http://h/v1/completions", has_token=False, status=None, seconds=10.0)
    rank = made_up("rank-0", 10, rank=0)
    rows = [*asleep("rank-0", 10), *both(RUN, probe), (0, RUN, tried)]
    return case(target(rank, engine=Engine.VLLM, expected_ranks=1), rows)


def hidden() -> Case:
    refused = Failed(collector="stacks", reason="Permission denied", is_refused=True)
    return one_rank(asleep("rank-0", 10), both("rank-0", refused))
