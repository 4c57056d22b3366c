"""Who waits for whom: one graph instead of eight stacks. A sink is the suspect, a cycle is a deadlock.

Called by the hypotheses and the verdict. Pure. Invariant: an edge cites the evidence that shows it, and is
drawn only where a thread really waits: an event loop that polls all its clients waits for nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from firstlight.doctor.evidence import Case
from firstlight.doctor.wait_edges import Edge, find_edges


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
