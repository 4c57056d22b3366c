"""Who waits for whom: one graph instead of eight stacks. A sink is the suspect, a cycle is a deadlock.

Pure. Invariant: an edge cites the evidence that shows it, and is drawn only where a thread really waits: an
event loop that polls all its clients waits for nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from firstlight.base.blackbox.reader import Collective
from firstlight.doctor.case.evidence import Case, Seen
from firstlight.doctor.case.target import RUN, Role
from firstlight.doctor.case.values_host import FileLocks, PipeEnds, Pipes, SocketEnd, Sockets, Tree
from firstlight.doctor.case.values_process import BlackBoxSeen, Descriptor, Descriptors, Threads, ThreadState
from firstlight.doctor.motion.wait_signatures import FULL_PIPE

# The single waits of a case: pipes, sockets, file locks, collectives, and parents that wait for a child.
# Where the other end is not certain, there is no edge.
_READS = frozenset(("read", "readv", "recvfrom", "recvmsg"))
_WRITES = frozenset(("write", "writev", "sendto", "sendmsg"))
_CHILD_WAITS = frozenset(("wait4", "waitid"))
# What the kernel calls these waits, where it hides the system call from us.
_PIPE_READ = ("pipe_read", "anon_pipe_read", "pipe_wait", "pipe_wait_readable")
_CHILD_WAIT = ("do_wait", "kernel_wait4")
DOCTOR = "doctor"


class Edge(msgspec.Struct, frozen=True, kw_only=True):
    """`waiter` waits for `holder`. `kind`: "pipe", "socket", "flock", "collective", "child"."""

    waiter: str
    holder: str
    kind: str
    why: str
    evidence: tuple[str, ...]


def find_edges(case: Case) -> Iterator[Edge]:
    """All edges of the latest look."""
    yield from _collective_edges(case)
    yield from _lock_edges(case)
    for process in case.target.processes:
        threads = case.seen(Threads, process.key)
        if threads is None or process.role is Role.JANITOR:  # which waits for the end of the run
            continue
        for thread in threads.value.threads:
            if thread.state in ("S", "D"):
                yield from _descriptor_edges(case, process.key, threads, thread)
        yield from _child_edges(case, process.key, threads)


def _descriptor_edges(case: Case, key: str, threads: Seen[Threads], thread: ThreadState) -> Iterator[Edge]:
    descriptors = case.seen(Descriptors, key)
    if descriptors is None:
        return
    is_read = thread.syscall in _READS or thread.wchan in _PIPE_READ
    is_write = thread.syscall in _WRITES or thread.wchan in FULL_PIPE
    if not (is_read or is_write):
        return
    evidence = (threads.id, descriptors.id)
    for descriptor in _candidates(descriptors.value, thread, "r" if is_read else "w"):
        if descriptor.kind == "pipe":
            yield from _pipe_edges(case, key, descriptor.inode, is_read, evidence)
        elif descriptor.kind == "socket":
            yield from _socket_edges(case, key, descriptor.inode, is_read, evidence)


def _candidates(descriptors: Descriptors, thread: ThreadState, mode: str) -> list[Descriptor]:
    """The descriptor a thread waits on; with the call hidden, the only pipe it can be."""
    if thread.fd is not None:
        found = descriptors.inode_of(thread.fd)
        return [found] if found else []
    pipes = [item for item in descriptors.open if item.kind == "pipe" and mode in item.mode]
    return pipes if len(pipes) == 1 else []


def _pipe_edges(case: Case, key: str, inode: int, is_read: bool, evidence: tuple[str, ...]) -> Iterator[Edge]:
    seen = case.seen(Pipes, RUN)
    pipe = _pipe(seen.value, inode) if seen else None
    if seen is None or pipe is None:
        return
    others = _others(pipe.writers if is_read else pipe.readers, key)
    if len(others) != 1:
        return  # any of several could end the wait
    action = "reads from a pipe whose only writer is" if is_read else "writes to a full pipe read by"
    yield Edge(
        waiter=key,
        holder=others[0],
        kind="pipe",
        why=f"{key} {action} {others[0]} (pipe {inode})",
        evidence=(*evidence, seen.id),
    )


def _pipe(pipes: Pipes, inode: int) -> PipeEnds | None:
    return next((pipe for pipe in pipes.pipes if pipe.inode == inode), None)


def _socket_edges(
    case: Case, key: str, inode: int, is_read: bool, evidence: tuple[str, ...]
) -> Iterator[Edge]:
    seen = case.seen(Sockets, RUN)
    end = _socket(seen.value, inode) if seen else None
    if seen is None or end is None or end.state != "ESTABLISHED":
        return
    if is_read and end.receive_bytes:
        return  # what it waits for is there already
    others = _others(end.peers, key)
    if len(others) == 1:
        action = "waits for data from" if is_read else "waits until data is taken by"
        yield Edge(
            waiter=key,
            holder=others[0],
            kind="socket",
            why=f"{key} {action} {others[0]} ({end.protocol} socket {inode})",
            evidence=(*evidence, seen.id),
        )


def _socket(sockets: Sockets, inode: int) -> SocketEnd | None:
    return next((end for end in sockets.sockets if end.inode == inode), None)


def _others(holders: tuple[str, ...], key: str) -> list[str]:
    return [holder for holder in dict.fromkeys(holders) if holder not in (key, DOCTOR)]


def _lock_edges(case: Case) -> Iterator[Edge]:
    seen = case.seen(FileLocks, RUN)
    for lock in seen.value.locks if seen else ():
        for waiter in lock.waiters:
            if seen is not None and waiter != lock.holder:
                where = lock.path or f"inode {lock.inode}"
                why = f"{waiter} waits for the lock on {where}, which {lock.holder} holds"
                yield Edge(waiter=waiter, holder=lock.holder, kind="flock", why=why, evidence=(seen.id,))


def _collective_edges(case: Case) -> Iterator[Edge]:
    """A rank inside a collective waits for every rank that has not come to it, or is in another one."""
    boxes = case.all(BlackBoxSeen, look=case.last_look)
    boxes = [seen for seen in boxes if seen.value.box.rank is not None]
    for waiter in boxes:
        entered = waiter.value.box.entered
        if entered == waiter.value.box.left or not entered.number or not waiter.value.is_alive:
            continue
        for other in boxes:
            place = None if other is waiter else _absence(entered, other.value)
            if place is not None:
                yield Edge(
                    waiter=waiter.subject,
                    holder=other.subject,
                    kind="collective",
                    why=f"{waiter.subject} is in {_collective(entered)}; {other.subject} {place}",
                    evidence=(waiter.id, other.id),
                )


def _absence(entered: Collective, other: BlackBoxSeen) -> str | None:
    """Why a collective cannot end because of another rank; None when it has done its part."""
    there, left = other.box.entered, other.box.left
    if not other.is_alive and left.number < entered.number:
        return f"ended before it could leave it (last in {_collective(there)})"
    if there.number < entered.number:
        return f"came only to {_collective(there)}" if there.number else "has not come to any"
    if there.number == entered.number and there.name != entered.name:
        return f"is in {_collective(there)}"
    return None


def _collective(collective: Collective) -> str:
    return f"collective {collective.name!r} number {collective.number}"


def _child_edges(case: Case, key: str, threads: Seen[Threads]) -> Iterator[Edge]:
    """A process whose main thread waits for the end of its children, if it has one living child only."""
    process, tree = case.target.process(key), case.seen(Tree, RUN)
    main = next((thread for thread in threads.value.threads if process and thread.tid == process.pid), None)
    if main is None or process is None or tree is None:
        return
    if main.syscall not in _CHILD_WAITS and main.wchan not in _CHILD_WAIT:
        return
    children = [
        member
        for member in (*tree.value.members, *tree.value.newcomers)
        if member.parent == process.pid and member.state and member.state not in "ZX"
    ]
    if len(children) == 1:
        why = f"{key} waits for the end of {children[0].key}"
        yield Edge(waiter=key, holder=children[0].key, kind="child", why=why, evidence=(threads.id, tree.id))


class WaitGraph(msgspec.Struct, frozen=True, kw_only=True):
    """`sinks`: waited for, and waiting for nobody; those for whom most wait come first."""

    edges: tuple[Edge, ...]
    sinks: tuple[str, ...]
    cycles: tuple[tuple[str, ...], ...]

    def waiters_of(self, key: str) -> tuple[str, ...]:
        """Everyone who waits for a process, directly or through others."""
        found: dict[str, None] = {}
        queue = [key]
        while queue:
            holder = queue.pop()
            for edge in self.edges:
                if edge.holder == holder and edge.waiter not in found and edge.waiter != key:
                    found[edge.waiter] = None
                    queue.append(edge.waiter)
        return tuple(found)

    def edge(self, waiter: str, holder: str) -> Edge | None:
        """The edge between two processes."""
        return next((e for e in self.edges if e.waiter == waiter and e.holder == holder), None)


def wait_graph(case: Case) -> WaitGraph:
    """The graph of a case, of its latest look."""
    edges = _unique(find_edges(case))
    follows: dict[str, list[str]] = {}
    for edge in edges:
        follows.setdefault(edge.waiter, []).append(edge.holder)
        follows.setdefault(edge.holder, [])
    graph = WaitGraph(edges=edges, sinks=(), cycles=tuple(_cycles(follows)))
    sinks = [key for key, holders in follows.items() if not holders]
    sinks.sort(key=lambda key: (-len(graph.waiters_of(key)), key))
    return msgspec.structs.replace(graph, sinks=tuple(sinks))


def _unique(edges: Iterable[Edge]) -> tuple[Edge, ...]:
    """One edge for each pair and kind of wait; several threads may wait alike."""
    found: dict[tuple[str, str, str], Edge] = {}
    for edge in edges:
        found.setdefault((edge.waiter, edge.holder, edge.kind), edge)
    return tuple(found.values())


def _cycles(follows: dict[str, list[str]]) -> Iterator[tuple[str, ...]]:
    """The strongly connected groups of more than one process, and those who wait for themselves."""
    done: set[str] = set()
    for key in follows:
        if key in done:
            continue
        below = _reachable(follows, key)
        group = tuple(sorted(other for other in below if key in _reachable(follows, other)))
        if group:  # a process reaches itself only through a cycle
            done.update(group)
            yield group


def _reachable(follows: dict[str, list[str]], key: str) -> set[str]:
    """What can be reached in at least one step."""
    found: set[str] = set()
    queue = list(follows[key])
    while queue:
        other = queue.pop()
        if other not in found:
            found.add(other)
            queue.extend(follows[other])
    return found
