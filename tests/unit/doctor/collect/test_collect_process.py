"""Collectors about processes: real sleepers, spinners, stopped ones, zombies, and those of another user."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from firstlight.doctor.case.target import RUN
from firstlight.doctor.case.values_host import Compilers, Pipes, Tree
from firstlight.doctor.case.values_process import (
    Descriptors,
    Environment,
    InputOutput,
    Libraries,
    Limits,
    Memory,
    ProcessState,
    PythonStacks,
    Threads,
)
from firstlight.doctor.collect.descriptors import DESCRIPTORS, PIPES
from firstlight.doctor.collect.environment import ENVIRONMENT, LIBRARIES
from firstlight.doctor.collect.process_state import INPUT_OUTPUT, LIMITS, MEMORY, STATE
from firstlight.doctor.collect.scene import Scene
from firstlight.doctor.collect.stacks import STACKS, find_tool, parse_dump
from firstlight.doctor.collect.threads import THREADS, parse_syscall
from firstlight.doctor.collect.tree import COMPILERS, TREE
from firstlight.doctor.servers.procfs import ProcFs, parse_stat
from support.doctor_scenes import (
    child,
    decode_case,
    encode_case,
    in_state,
    living,
    look,
    recorded,
    target,
    the,
    tree,
    until,
)

SLEEPS = "import time; print('up', flush=True); time.sleep(60)"
SPINS = "print('up', flush=True)\nwhile True: pass"


def test_a_name_with_brackets_and_blanks() -> None:
    stat = parse_stat("7 (a) (b c) S 1 7 7 0 -1 0 10 0 3 0 250 50 0 0 20 0 4 0 99 0 0")
    assert (stat.comm, stat.state, stat.major_faults, stat.start_ticks) == ("a) (b c", "S", 3, 99)
    assert stat.cpu_s == 300 / os.sysconf("SC_CLK_TCK")


def test_system_calls_are_named_with_their_descriptor() -> None:
    assert parse_syscall("running") == ("running", None)
    assert parse_syscall("-1 0x1 0x2") == ("", None)
    assert parse_syscall("99999 0x3") == ("99999", None)


def test_a_sleeper() -> None:
    with child(SLEEPS, ready="up") as process:
        until(in_state(process.pid, "S"))
        found = look(
            target(living(process.pid, "rank-0")),
            [STATE, THREADS, INPUT_OUTPUT, MEMORY, LIMITS, ENVIRONMENT, LIBRARIES, DESCRIPTORS],
            num_looks=2,
        )
    threads = found.pair(Threads, "rank-0")
    assert threads is not None
    before, after = threads.first.value.threads[0], threads.second.value.threads[0]
    assert (after.state, after.syscall) == ("S", "clock_nanosleep")
    assert after.cpu_s - before.cpu_s < 0.01
    state, memory = the(found, ProcessState, "rank-0"), the(found, Memory, "rank-0")
    assert state.state == "S"
    assert state.caught_signals is not None
    assert 0 < memory.resident_bytes <= memory.virtual_bytes
    assert the(found, Limits, "rank-0").num_open_files == the(found, Descriptors, "rank-0").num_open == 3
    assert found.of(InputOutput, "rank-0") is not None
    assert found.of(Environment, "rank-0") is not None
    assert found.of(Libraries, "rank-0") is not None
    assert decode_case(encode_case(found)) == found


def test_a_spinner_uses_a_core() -> None:
    with child(SPINS, ready="up") as process:
        found = look(target(living(process.pid, "rank-0")), [THREADS], num_looks=2, interval_s=0.6)
    pair = found.pair(Threads, "rank-0")
    assert pair is not None
    used_s = pair.second.value.threads[0].cpu_s - pair.first.value.threads[0].cpu_s
    assert used_s / pair.seconds > 0.1  # other work may share the core


def test_stopped_zombie_and_gone() -> None:
    code = (
        "import os, sys\npid = os.fork()\nif pid == 0: os._exit(3)\nprint(pid, flush=True); sys.stdin.read()"
    )
    with child(code) as process, child(SLEEPS, ready="up") as sleeper:
        assert process.stdout is not None
        zombie = int(process.stdout.readline())
        until(in_state(zombie, "Z"))
        os.kill(sleeper.pid, signal.SIGSTOP)
        until(in_state(sleeper.pid, "T"))
        gone = msgspec.structs.replace(living(process.pid, "rank-2"), start_ticks=1)
        people = target(living(zombie, "rank-0"), living(sleeper.pid, "rank-1"), gone)
        found = look(people, [STATE, TREE, MEMORY, THREADS])
    states = [found.of(ProcessState, f"rank-{rank}") for rank in range(3)]
    assert [state and (state.is_zombie, state.is_stopped, state.is_gone) for state in states] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]
    members = found.of(Tree, RUN)
    assert members is not None
    assert [member.key for member in members.with_state("Z")] == ["rank-0"]
    assert [member.key for member in members.gone] == ["rank-2"]
    assert found.of(Memory, "rank-0") is None, "a zombie has no memory, which is not the same as zero"
    assert [failure.value.is_gone for failure in found.failures(subject="rank-2")] == [True, True]


def test_a_pipe_and_its_ends() -> None:
    code = (
        "import os, sys\n"
        "reading, writing = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.close(writing); os.read(reading, 1)\n"
        "os.close(reading); print('up', flush=True); sys.stdin.read()"
    )
    with child(code, ready="up") as process:
        (reader,) = _children(process.pid)
        people = target(living(process.pid, "rank-0"), living(reader, "rank-1"))
        until(lambda: _waits_in(reader, "read"))
        found = look(people, [PIPES, DESCRIPTORS, THREADS])
    ends = [(pipe.readers, pipe.writers) for pipe in the(found, Pipes, RUN).pipes]
    assert (("rank-1",), ("rank-0",)) in ends
    fd = the(found, Threads, "rank-1").threads[0].fd
    waits_on = the(found, Descriptors, "rank-1").inode_of(-1 if fd is None else fd)
    assert waits_on is not None
    assert (waits_on.kind, waits_on.mode) == ("pipe", "r")


def test_compilers_are_found_for_the_process_that_builds(tmp_path: Path) -> None:
    """From a recorded tree, as real compilers take seconds."""
    files = {**recorded(10, ("python",), "python"), **recorded(11, ("sh",), "sh", parent=10)}
    files |= recorded(12, ("ninja",), "ninja", parent=11) | recorded(13, ("nvcc",), "nvcc", parent=12)
    files |= recorded(14, ("cicc",), "cicc", parent=13, state="Z")
    procfs = ProcFs(tree(tmp_path, files))
    stat = procfs.stat(10)
    assert stat is not None
    rank = msgspec.structs.replace(living(os.getpid(), "rank-0"), pid=10, start_ticks=stat.start_ticks)
    (seen,) = COMPILERS.collect(Scene(target(rank), procfs))
    assert isinstance(seen.value, Compilers)
    assert [(compiler.name, compiler.parent) for compiler in seen.value.running] == [
        ("ninja", "rank-0"),
        ("nvcc", "rank-0"),
    ]


def test_python_stacks_or_the_reason_why_not() -> None:
    assert find_tool() is not None
    code = "import time\ndef wait_here():\n    print('up', flush=True); time.sleep(60)\nwait_here()"
    with child(code, ready="up") as process, child(SLEEPS, ready="up") as other:
        dead = msgspec.structs.replace(living(other.pid, "rank-1"), start_ticks=1)
        found = look(target(living(process.pid, "rank-0"), dead), [STACKS])
    stacks = found.of(PythonStacks, "rank-0")
    assert stacks is not None, found.failures("stacks")
    assert stacks.threads[0].frames[0].function == "wait_here"
    assert [failure.value.is_gone for failure in found.failures("stacks", "rank-1")] == [True]
    with pytest.raises(ValueError, match="no list"):
        parse_dump("{}")


def test_secrets_of_the_environment_are_never_kept() -> None:
    code = "import sys; print('up', flush=True); sys.stdin.read()"
    variables = {**os.environ, "HF_TOKEN": "s3cret", "NCCL_DEBUG": "INFO", "HTTPS_PROXY": "http://u:s3cret@p"}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        found = look(target(living(process.pid, "rank-0")), [ENVIRONMENT])
        process.kill()
    seen = found.of(Environment, "rank-0")
    assert seen is not None
    assert "HF_TOKEN" in seen.hidden
    assert seen.variables["NCCL_DEBUG"] == "INFO"
    assert b"s3cret" not in encode_case(found)


def test_another_users_process_gives_evidence_and_refusals() -> None:
    """As an unprivileged user looking at a process of root: its own child, or the first process."""
    script = Path(__file__).with_name("examine_as_nobody.py")
    with child(SLEEPS, ready="up") as process:
        pid = process.pid if os.geteuid() == 0 else 1
        done = subprocess.run(
            [sys.executable, str(script), str(pid)], capture_output=True, text=True, timeout=30, check=False
        )
    assert done.returncode == 0, done.stderr
    found = decode_case(done.stdout.encode())
    assert the(found, ProcessState, "rank-0").state in "SR"
    assert the(found, Threads, "rank-0").is_hidden
    refused = {failure.value.collector for failure in found.failures() if failure.value.is_refused}
    assert {"io", "environment", "libraries", "descriptors", "stacks"} <= refused
    limits = found.of(Limits, "rank-0")
    assert limits is None or limits.num_open_files is None
    assert the(found, Pipes, RUN).num_hidden > 0


def _children(pid: int) -> list[int]:
    return [int(word) for word in ProcFs().text(pid, "task", pid, "children").split()]


def _waits_in(pid: int, call: str) -> bool:
    return parse_syscall(ProcFs().text(pid, "syscall"))[0] == call
