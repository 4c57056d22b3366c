"""The wait-for graph: sinks and cycles, from collectives, pipes, sockets and locks, made up and real."""

from __future__ import annotations

import os
from collections.abc import Sequence

from firstlight.base.blackbox.reader import Collective
from firstlight.doctor.case.target import RUN, Role
from firstlight.doctor.case.values import Value
from firstlight.doctor.case.values_host import FileLock, FileLocks, Member, PipeEnds, Pipes, Tree
from firstlight.doctor.case.values_process import BlackBoxSeen, Descriptor, Descriptors, Threads, ThreadState
from firstlight.doctor.collect.descriptors import DESCRIPTORS, PIPES
from firstlight.doctor.collect.sockets import SOCKETS
from firstlight.doctor.collect.threads import THREADS, parse_syscall
from firstlight.doctor.collect.tree import TREE
from firstlight.doctor.motion.waits import WaitGraph, wait_graph
from firstlight.doctor.servers.procfs import ProcFs
from support.doctor_scenes import box, case, child, living, look, made_up, target, until

RANKS = [made_up(f"rank-{number}", 10 + number, rank=number) for number in range(4)]


def graph(*seen: tuple[int, str, Value], ranks: int = 4) -> WaitGraph:
    return wait_graph(case(target(*RANKS[:ranks]), seen))


def in_collectives(*places: tuple[str, int, bool]) -> list[tuple[int, str, Value]]:
    """Of each rank: the collective's name and number, and whether it is still inside."""
    seen: list[tuple[int, str, Value]] = []
    for rank, (name, number, is_inside) in enumerate(places):
        left = Collective(name, number - 1 if is_inside else number)
        value = box(rank, collectives=(Collective(name, number), left))
        seen.append((0, f"rank-{rank}", BlackBoxSeen(path="/x", box=value, is_alive=True)))
    return seen


def edges(found: WaitGraph) -> list[tuple[str, str]]:
    return [(edge.waiter, edge.holder) for edge in found.edges]


def test_the_rank_that_did_not_come_is_the_sink() -> None:
    found = graph(*in_collectives(("mlp", 7, True), ("mlp", 7, True), ("mlp", 6, False), ("mlp", 7, True)))
    assert edges(found) == [("rank-0", "rank-2"), ("rank-1", "rank-2"), ("rank-3", "rank-2")]
    assert found.sinks == ("rank-2",)
    assert found.cycles == ()
    edge = found.edge("rank-0", "rank-2")
    assert edge is not None
    assert "'mlp' number 7" in edge.why
    assert "number 6" in edge.why
    assert found.waiters_of("rank-2") == ("rank-0", "rank-1", "rank-3")


def test_two_collectives_at_once_are_a_deadlock() -> None:
    found = graph(*in_collectives(("mlp", 7, True), ("attention", 7, True)), ranks=2)
    assert found.cycles == (("rank-0", "rank-1"),)
    assert found.sinks == ()


def test_ranks_inside_the_same_collective_wait_for_nobody() -> None:
    assert graph(*in_collectives(("mlp", 7, True), ("mlp", 7, True)), ranks=2).edges == ()
    assert graph(*in_collectives(("mlp", 7, False), ("mlp", 7, False)), ranks=2).edges == ()


def test_a_rank_that_died_inside_the_collective_is_waited_for() -> None:
    seen = in_collectives(("mlp", 7, True), ("mlp", 7, True))
    dead = box(1, collectives=(Collective("mlp", 7), Collective("mlp", 6)))
    seen[1] = (0, "rank-1", BlackBoxSeen(path="/x", box=dead, is_alive=False))
    found = graph(*seen, ranks=2)
    assert edges(found) == [("rank-0", "rank-1")]
    never_came = in_collectives(("mlp", 1, True), ("", 0, False))
    assert graph(*never_came, ranks=2).sinks == ("rank-1",)


def waiting(key: str, call: str = "", fd: int | None = None, wchan: str = "") -> tuple[int, str, Value]:
    pid = next(rank.pid for rank in RANKS if rank.key == key)
    thread = ThreadState(
        tid=pid, name="x", state="S", cpu_s=0, major_faults=0, wchan=wchan, syscall=call, fd=fd
    )
    return 0, key, Threads(threads=(thread,), cpu_source="stat")


def holding(key: str, *pipes: tuple[int, int, str]) -> tuple[int, str, Value]:
    found = [
        Descriptor(fd=fd, kind="pipe", target=f"pipe:[{inode}]", inode=inode, mode=mode)
        for fd, inode, mode in pipes
    ]
    return 0, key, Descriptors(open=tuple(found), num_open=len(found))


def pipes(*ends: tuple[int, Sequence[str], Sequence[str]]) -> tuple[int, str, Value]:
    shown = [PipeEnds(inode=inode, readers=tuple(r), writers=tuple(w)) for inode, r, w in ends]
    return 0, RUN, Pipes(pipes=tuple(shown))


def test_a_reader_of_a_pipe_waits_for_its_only_writer() -> None:
    held = holding("rank-0", (5, 77, "r"))
    ends = pipes((77, ["rank-0"], ["rank-0", "rank-1"]))
    assert edges(graph(waiting("rank-0", "read", 5), held, ends)) == [("rank-0", "rank-1")]
    several = pipes((77, ["rank-0"], ["rank-1", "rank-2"]))
    assert graph(waiting("rank-0", "read", 5), held, several).edges == ()
    assert graph(waiting("rank-0", "epoll_wait", 5), held, ends).edges == ()


def test_with_the_call_hidden_the_kernels_place_and_a_single_pipe_suffice() -> None:
    ends = pipes((77, ["rank-0"], ["rank-1"]), (78, ["rank-0"], ["rank-2"]))
    one = holding("rank-0", (5, 77, "r"), (6, 79, "w"))
    assert edges(graph(waiting("rank-0", wchan="pipe_read"), one, ends)) == [("rank-0", "rank-1")]
    two = holding("rank-0", (5, 77, "r"), (6, 78, "r"))
    assert graph(waiting("rank-0", wchan="pipe_read"), two, ends).edges == ()


def test_a_full_pipe_waits_for_its_reader_also_outside_of_the_target() -> None:
    held = holding("rank-0", (2, 77, "w"))
    found = graph(waiting("rank-0", "write", 2), held, pipes((77, ["pid-4711"], ["rank-0"])))
    assert found.sinks == ("pid-4711",)


def test_locks_and_parents() -> None:
    lock = FileLock(
        kind="FLOCK",
        mode="WRITE",
        holder="rank-1",
        holder_pid=11,
        taker_pid=11,
        is_taker_alive=True,
        inode=5,
        path="/cache/x.lock",
        waiters=("rank-0", "rank-2"),
    )
    found = graph((0, RUN, FileLocks(locks=(lock,))))
    assert found.sinks == ("rank-1",)
    assert "/cache/x.lock" in found.edges[0].why
    members = Tree(members=(Member(key="rank-1", pid=11, parent=10, state="S"),))
    parent = graph(waiting("rank-0", "wait4"), (0, RUN, members))
    assert [(edge.holder, edge.kind) for edge in parent.edges] == [("rank-1", "child")]


def test_a_chain_ends_at_one_sink_and_the_most_waited_for_comes_first() -> None:
    chain = [
        waiting("rank-0", "read", 3),
        holding("rank-0", (3, 77, "r")),
        waiting("rank-1", "read", 3),
        holding("rank-1", (3, 78, "r")),
        pipes((77, ["rank-0"], ["rank-1"]), (78, ["rank-1"], ["rank-2"])),
    ]
    found = graph(*chain)
    assert found.sinks == ("rank-2",)
    assert set(found.waiters_of("rank-2")) == {"rank-0", "rank-1"}


def test_two_real_processes_that_read_from_each_other() -> None:
    code = (
        "import os, sys\n"
        "a, b = os.pipe(); c, d = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.close(a); os.close(d); os.close(1); os.read(c, 1); os._exit(0)\n"
        "os.close(b); os.close(c); print('up', flush=True); os.read(a, 1)"
    )
    with child(code, ready="up") as process:
        (other,) = map(int, ProcFs().text(process.pid, "task", process.pid, "children").split())
        until(lambda: all(_call(pid) == "read" for pid in (process.pid, other)))
        people = living(process.pid, "rank-0"), living(other, "rank-1")
        found = look(target(*people), [THREADS, DESCRIPTORS, PIPES, TREE])
    assert wait_graph(found).cycles == (("rank-0", "rank-1"),)


def test_a_real_parent_that_receives_from_a_stopped_child() -> None:
    code = (
        "import os, signal, socket, sys\n"
        "mine, theirs = socket.socketpair()\n"
        "if os.fork() == 0:\n"
        "    mine.close(); os.kill(os.getpid(), signal.SIGSTOP)\n"
        "theirs.close(); print('up', flush=True); mine.recv(1)"
    )
    with child(code, ready="up") as process:
        (other,) = map(int, ProcFs().text(process.pid, "task", process.pid, "children").split())
        until(lambda: _call(process.pid) == "recvfrom")
        people = living(process.pid, "api", Role.API), living(other, "rank-0")
        found = look(target(*people), [THREADS, DESCRIPTORS, SOCKETS])
        os.kill(other, 9)
    drawn = wait_graph(found)
    assert edges(drawn) == [("api", "rank-0")]
    assert drawn.edges[0].kind == "socket"
    assert drawn.sinks == ("rank-0",)


def _call(pid: int) -> str:
    return parse_syscall(ProcFs().text(pid, "syscall"))[0]
