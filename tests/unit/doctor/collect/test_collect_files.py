"""Collectors about files and the machine: locks, caches, logs, checkpoints, control groups, pressure."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec
import pytest

from firstlight.base.blackbox.store import box_path, make_box_folder
from firstlight.base.blackbox.writer import BlackBox, create_box
from firstlight.base.errors import ModelFileError
from firstlight.base.exit_notes import ExitNote, write_exit_note
from firstlight.base.failure import write_failure
from firstlight.doctor.case.evidence import Observation
from firstlight.doctor.case.target import HOST, RUN, TargetProcess
from firstlight.doctor.case.values_host import (
    CgroupMemory,
    CgroupPids,
    FileLocks,
    FreeSpace,
    HostMemory,
    JitLocks,
    Pressure,
)
from firstlight.doctor.case.values_process import BlackBoxSeen, ExitRecord, LogTail
from firstlight.doctor.collect.blackboxes import BOXES
from firstlight.doctor.collect.cgroup import CGROUPS
from firstlight.doctor.collect.checkpoints import check, locate
from firstlight.doctor.collect.exits import EXITS
from firstlight.doctor.collect.file_locks import LOCKS, parse_lock
from firstlight.doctor.collect.host import HOST_MEMORY, PRESSURE, SPACE, parse_pressure
from firstlight.doctor.collect.jit_locks import JIT_LOCKS
from firstlight.doctor.collect.logs import LOGS, read_tail
from firstlight.doctor.collect.scene import Scene
from firstlight.doctor.servers.procfs import ProcFs
from support.doctor_scenes import child, living, look, recorded, target, the, tree, until

HOLDS = (
    "import fcntl, sys\nfile = open({path!r}, 'w')\nfcntl.flock(file, fcntl.LOCK_EX)\n"
    "print('up', flush=True); sys.stdin.read()"
)


def recorded_process(root: Path, cgroup: str) -> TargetProcess:
    tree(root, {**recorded(10, ("x",), "x"), "10/cgroup": cgroup})
    stat = ProcFs(root).stat(10)
    assert stat is not None
    return msgspec.structs.replace(living(os.getpid(), "rank-0"), pid=10, start_ticks=stat.start_ticks)


def test_a_lock_with_its_holder_and_its_waiter(tmp_path: Path) -> None:
    path = str(tmp_path / "cache.lock")
    code = HOLDS.format(path=path)
    with child(code, ready="up") as holder, child(code) as waiter:
        until(lambda: "flock" in ProcFs().text(waiter.pid, "wchan") or _is_waiting(waiter.pid))
        people = target(living(holder.pid, "rank-0"), living(waiter.pid, "rank-1"))
        found = look(people, [LOCKS])
    (lock,) = [lock for lock in the(found, FileLocks, RUN).locks if lock.path == path]
    assert (lock.kind, lock.holder, lock.waiters) == ("FLOCK", "rank-0", ("rank-1",))
    assert lock.is_taker_alive


def test_a_lock_kept_by_the_child_of_a_dead_process(tmp_path: Path) -> None:
    path = str(tmp_path / "cache.lock")
    code = (
        f"import fcntl, os, sys\nfile = open({path!r}, 'w')\nfcntl.flock(file, fcntl.LOCK_EX)\n"
        "if os.fork() == 0:\n    print(os.getpid(), flush=True); sys.stdin.read()\n"
        "else:\n    os._exit(0)"
    )
    with child(code) as process:
        assert process.stdout is not None
        heir = int(process.stdout.readline())
        process.wait(5)
        found = look(target(living(heir, "rank-0")), [LOCKS])
    (lock,) = [lock for lock in the(found, FileLocks, RUN).locks if lock.path == path]
    assert (lock.holder, lock.held_through, lock.is_taker_alive) == ("rank-0", ("rank-0",), False)


def _is_waiting(pid: int) -> bool:
    return f" {pid} " in "".join(
        line for line in Path("/proc/locks").read_text().splitlines() if "->" in line
    )


def test_lines_of_the_lock_table() -> None:
    line = parse_lock("1: -> FLOCK  ADVISORY  WRITE 77 fd:00:1234 0 EOF")
    assert line is not None
    assert (line.is_waiting, line.kind, line.mode, line.pid, line.inode) == (True, "FLOCK", "WRITE", 77, 1234)
    assert parse_lock("2: LEASE  ACTIVE    READ 7 fd:00:1 0 EOF") is None


def test_a_baton_that_nobody_holds(tmp_path: Path) -> None:
    tree(tmp_path, {"ext/build/lock": "", "flash/.cache/flashinfer/old.lock": ""})
    old_s = time.time() - 86400
    os.utime(tmp_path / "ext/build/lock", (old_s, old_s))
    variables = {
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "ext"),
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path / "flash"),
        "HOME": str(tmp_path),
    }
    with child("import sys; print('up', flush=True); sys.stdin.read()", ready="up") as process:
        rank = living(process.pid, "rank-0")
        environ = "".join(f"{name}={value}\0" for name, value in variables.items())
        procfs = ProcFs(tree(tmp_path / "proc", {f"{process.pid}/environ": environ, "stat": "btime 1\n"}))
        scene = Scene(target(rank, started_wall_s=time.time() - 60), procfs)
        (seen,) = JIT_LOCKS.collect(scene)
    assert isinstance(seen.value, JitLocks)
    (lock,) = seen.value.locks
    assert (lock.cache, lock.is_existence_lock, lock.openers) == ("torch_extensions", True, ())
    assert (lock.is_older_than_launch, lock.is_older_than_boot) == (True, False)
    assert lock.age_s > 80000


def test_the_end_of_a_log_with_a_bar_and_a_secret(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_bytes(b"x" * 100_000 + b"\napi_key=verysecret\nshards: 10%\rshards: 100%\rdone\npart")
    log = read_tail(path)
    assert log.lines[-4:] == ("shards: 10%", "shards: 100%", "done", "part")
    assert log.has_partial
    assert "verysecret" not in str(log)
    found = look(target(run_dir=str(tmp_path)), [LOGS])
    assert the(found, LogTail, "rank-0").size_bytes == path.stat().st_size


def test_a_log_that_standard_error_leads_to(tmp_path: Path) -> None:
    path = tmp_path / "server.txt"
    code = (
        f"import os, sys; os.dup2(os.open({str(path)!r}, os.O_WRONLY | os.O_CREAT), 2)\n"
        "os.write(2, b'loading\\n'); print('up', flush=True); sys.stdin.read()"
    )
    with child(code, ready="up") as process:
        found = look(target(living(process.pid, "rank-0")), [LOGS])
    assert the(found, LogTail, "rank-0").lines == ("loading",)


def test_a_black_box_of_a_dead_process_and_its_last_words(tmp_path: Path) -> None:
    make_box_folder(tmp_path, shared_memory=tmp_path / "absent")
    for rank in range(2):
        create_box(box_path(tmp_path, f"rank-{rank}"), role="rank", rank=rank, run_id="run")
    box = BlackBox(box_path(tmp_path, "rank-0"))
    box.claim()
    box.enter_phase("weights", 100, "bytes")
    box.advance(40)
    write_failure(tmp_path, "rank-1", MemoryError("too much"))
    (tmp_path / "boxes" / "broken.box").write_bytes(b"short")
    found = look(target(run_dir=str(tmp_path)), [BOXES, EXITS])
    box.close()
    alive, dead = the(found, BlackBoxSeen, "rank-0"), the(found, BlackBoxSeen, "rank-1")
    assert (alive.is_alive, dead.is_alive) == (True, False)
    assert alive.box.phase is not None
    assert alive.box.phase.odometer.done == 40
    assert "too much" in the(found, ExitRecord, "rank-1").message
    assert found.failures("blackbox", "broken")


def test_how_a_process_ended_and_its_last_words_are_one_record(tmp_path: Path) -> None:
    cause = {"code": None, "signal": 9, "told": False, "time_s": 1.0, "is_oom": True}
    write_exit_note(tmp_path, ExitNote(name="rank-0", pid=7, **cause))
    write_exit_note(tmp_path, ExitNote(name="rank-1", pid=8, **{**cause, "signal": None, "code": 3}))
    write_failure(tmp_path, "rank-1", ModelFileError("cut short", "fetch it"))
    found = look(target(run_dir=str(tmp_path)), [EXITS])
    killed, failed = the(found, ExitRecord, "rank-0"), the(found, ExitRecord, "rank-1")
    assert (killed.signal, killed.is_oom, killed.was_told, killed.message) == (9, True, False, "")
    assert (failed.code, failed.message, failed.hint) == (3, "cut short.", "fetch it")


def test_a_checkpoint_and_all_that_is_wrong_with_it(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    whole = len(header).to_bytes(8, "little") + header + bytes(8)
    (tmp_path / "model-1.safetensors").write_bytes(whole)
    assert check(tmp_path).problems == ()
    (tmp_path / "model-2.safetensors").write_bytes(whole[:-3])
    (tmp_path / "model-3.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid x\n")
    (tmp_path / "tokenizer.json").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid x\n")
    shards = {f"t{number}": f"model-{number}.safetensors" for number in range(1, 5)}
    (tmp_path / "model.safetensors.index.json").write_bytes(msgspec.json.encode({"weight_map": shards}))
    tree(tmp_path, {".cache/huggingface/download/x.incomplete": ""})
    problems = {(problem.kind, Path(problem.path).name) for problem in check(tmp_path).problems}
    assert problems == {
        ("truncated", "model-2.safetensors"),
        ("lfs-pointer", "model-3.safetensors"),
        ("missing", "model-4.safetensors"),
        ("lfs-pointer", "tokenizer.json"),
        ("incomplete", "x.incomplete"),
    }


def test_a_hub_name_leads_to_its_newest_snapshot(tmp_path: Path) -> None:
    tree(tmp_path, {"models--org--m/snapshots/abc/config.json": "{}"})
    assert locate("org/m", [tmp_path]) == tmp_path / "models--org--m/snapshots/abc"
    assert locate("org/other", [tmp_path]) is None


def cgroup_values(tmp_path: Path, line: str, files: dict[str, str]) -> dict[type, object]:
    rank = recorded_process(tmp_path / "proc", line)
    scene = Scene(target(rank), ProcFs(tmp_path / "proc"), tree(tmp_path / "cgroup", files))
    return {type(seen.value): seen.value for seen in CGROUPS.collect(scene)}


def test_control_groups_version_2(tmp_path: Path) -> None:
    values = cgroup_values(
        tmp_path,
        "0::/pod/server\n",
        {
            "pod/memory.max": "1000\n",
            "pod/memory.current": "900\n",
            "pod/memory.events": "low 0\nmax 7\noom 2\noom_kill 1\n",
            "pod/server/memory.max": "max\n",
            "pod/server/memory.current": "800\n",
            "pod/server/memory.events": "max 0\noom_kill 3\n",
            "pod/server/memory.stat": "file 10\nworkingset_refault_file 5\n",
            "pod/server/memory.pressure": "some avg10=1.50 avg60=0 total=9\nfull avg10=0.5 total=4\n",
            "pod/server/pids.current": "64\n",
            "pod/server/pids.max": "64\n",
            "pod/server/pids.events": "max 12\n",
        },
    )
    memory, pids, pressure = values[CgroupMemory], values[CgroupPids], values[Pressure]
    assert isinstance(memory, CgroupMemory)
    assert (memory.version, memory.current_bytes, memory.max_bytes) == (2, 900, 1000)
    assert (memory.oom_kills, memory.failures) == (3, 7)
    assert isinstance(pids, CgroupPids)
    assert (pids.current, pids.max_pids, pids.denied) == (64, 64, 12)
    assert isinstance(pressure, Pressure)
    assert pressure.memory is not None
    assert (pressure.memory.some_percent, pressure.memory.full_total_us) == (1.5, 4)


def test_control_groups_version_1_seen_from_inside_a_container(tmp_path: Path) -> None:
    """The path is that of the host, and not there; the mount itself is the group."""
    values = cgroup_values(
        tmp_path,
        "4:memory:/docker/abc\n3:pids:/docker/abc\n",
        {
            "memory/memory.limit_in_bytes": "1000\n",
            "memory/memory.usage_in_bytes": "990\n",
            "memory/memory.failcnt": "17\n",
            "memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 1\noom_kill 2\n",
            "pids/pids.current": "5\n",
            "pids/pids.max": "max\n",
        },
    )
    memory, pids = values[CgroupMemory], values[CgroupPids]
    assert isinstance(memory, CgroupMemory)
    assert (memory.version, memory.max_bytes, memory.oom_kills, memory.failures) == (1, 1000, 2, 17)
    assert memory.is_under_oom is True
    assert isinstance(pids, CgroupPids)
    assert (pids.current, pids.max_pids) == (5, None)


def test_the_host_here_and_an_old_kernel(tmp_path: Path) -> None:
    found = look(target(run_dir=str(tmp_path)), [HOST_MEMORY, SPACE])
    assert the(found, HostMemory, HOST).total_bytes > 0
    assert {seen.value.purpose for seen in found.all(FreeSpace)} >= {"tmp", "run directory"}
    old = ProcFs(tree(tmp_path / "proc", {"meminfo": "MemTotal: 10 kB\nMemAvailable: 5 kB\n"}))
    (seen,) = HOST_MEMORY.collect(Scene(target(), old))
    assert isinstance(seen, Observation)
    assert isinstance(seen.value, HostMemory)
    assert (seen.value.total_bytes, seen.value.oom_kills) == (10240, None)
    with pytest.raises(FileNotFoundError):
        list(PRESSURE.collect(Scene(target(), old)))
    stall = parse_pressure("some avg10=2.00 avg60=1 avg300=0 total=5\n")
    assert stall is not None
    assert (stall.some_percent, stall.full_percent) == (2.0, 0.0)


def test_nothing_is_signalled_or_removed(tmp_path: Path) -> None:
    """The scene of all this is as it was: a lock file stays, a stopped process stays stopped."""
    tree(tmp_path, {"ext/lock": ""})
    with child("import sys; print('up', flush=True); sys.stdin.read()", ready="up") as process:
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: (stat := ProcFs().stat(process.pid)) is not None and stat.state == "T")
        look(target(living(process.pid, "rank-0"), run_dir=str(tmp_path)), [JIT_LOCKS, LOCKS, LOGS])
        stat = ProcFs().stat(process.pid)
        assert stat is not None
        assert stat.state == "T"
    assert (tmp_path / "ext/lock").exists()
