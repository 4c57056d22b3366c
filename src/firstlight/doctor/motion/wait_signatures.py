"""How a process stands when its counters do: in a disk's queue, in a loop that polls, in a full pipe.

Pure. Invariant: what is said holds in both looks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from firstlight.base.phases import RENDEZVOUS
from firstlight.doctor.case.evidence import Case, Pair, Seen
from firstlight.doctor.case.target import RUN
from firstlight.doctor.case.values_host import Compilers
from firstlight.doctor.case.values_process import (
    BlackBoxSeen,
    PythonStacks,
    StackThread,
    StorageWait,
    Threads,
    ThreadState,
)
from firstlight.doctor.motion.progress import Progress

_READS = ("read", "readv", "pread64", "preadv", "preadv2")
# What the kernel calls a thread that waits for a page or a request of a disk or of a network file system.
_DISK = re.compile(r"folio_wait|wait_on_page|blk_|rq_qos|io_schedule|nfs|fuse|request_wait|filemap")
_POLLS = re.compile(r"(^|[_.])(wait|acquired?|sleep|poll|select|recv|recv_bytes|get|join|barrier)$")
_BATON = re.compile(r"file_baton\.py$")
FULL_PIPE = ("pipe_write", "anon_pipe_write", "pipe_wait_writable")


def disk_wait(case: Case, key: str) -> Progress | None:
    """A thread that waits for a disk, and did or ran in the look before: it has asked for bytes that have
    not come yet.

    The kernel counts bytes when a read is sent to the disk, so a slow one stands still between large reads.
    """
    pair = case.pair(Threads, key)
    storage = same_wait(case, key)
    if pair is None or (storage is not None and storage.second.value.answers is False):
        return None
    before = {t.tid for t in pair.first.value.threads if t.state == "R" or _waits_for_disk(t)}
    found = [t for t in pair.second.value.threads if t.tid in before and _waits_for_disk(t)]
    if not found:
        return None
    call = found[0].syscall or "a page fault"
    detail = f"{len(found)} threads wait for the disk ({call}, {found[0].wchan or 'state D'})"
    return Progress(what="disk wait", per_s=0.0, detail=detail, evidence=pair.ids)


def same_wait(case: Case, key: str) -> Pair[StorageWait] | None:
    """A thread that was not woken between the looks: it waits for the same file, and not a byte came."""
    pair = case.pair(StorageWait, key)
    if pair is None:
        return None
    first, second = pair.first.value, pair.second.value
    return pair if (first.tid, first.mark) == (second.tid, second.mark) else None


def _waits_for_disk(thread: ThreadState) -> bool:
    is_read = thread.syscall in _READS or bool(_DISK.search(thread.wchan))
    return thread.state == "D" and is_read


def build_wait(case: Case, key: str) -> Progress | None:
    """It waits for a build of another process of the run, and a compiler of the run uses a processor."""
    stacks, pair = case.seen(PythonStacks, key), case.pair(Compilers, RUN)
    if stacks is None or pair is None or not pair.second.value.running:
        return None
    frames = (frame for thread in stacks.value.threads for frame in thread.frames[:8])
    if not any(_BATON.search(frame.file) for frame in frames):
        return None
    detail = f"it waits for a build that goes on ({len(pair.second.value.running)} compilers)"
    return Progress(what="compilers", per_s=0.0, detail=detail, evidence=(stacks.id, *pair.ids))


def polls(case: Case, key: str) -> str:
    """Why a process that uses a little of a processor only waits; empty when it may be working."""
    boxes = case.pair(BlackBoxSeen, key)
    first = boxes.first.value.box.phase if boxes else None
    second = boxes.second.value.box.phase if boxes else None
    if first is not None and second is not None and first.name == second.name == RENDEZVOUS:
        there, of = second.odometer.done, second.odometer.total
        if there < max(of, 1):
            return f"it polls for the other ranks ({there} of {of} are there)"
    pair = case.pair(PythonStacks, key)
    threads = zip(_mains(pair.first), _mains(pair.second), strict=False) if pair else ()
    for before, after in threads:
        same = before.frames[:2] == after.frames[:2] and after.frames
        if same and _POLLS.search(after.frames[0].function):
            frame = after.frames[0]
            return f"it polls in {frame.function} ({frame.file}:{frame.line})"
    return ""


def _mains(seen: Seen[PythonStacks]) -> tuple[StackThread, ...]:
    return seen.value.threads[:1]


def full_pipe_writers(case: Case, key: str) -> Iterator[tuple[tuple[str, str], ThreadState]]:
    """Threads inside a write to a full pipe in both looks, with the evidence."""
    pair = case.pair(Threads, key)
    if pair is None:
        return
    before = {thread.tid for thread in pair.first.value.threads if _writes(thread)}
    for thread in pair.second.value.threads:
        if thread.tid in before and _writes(thread):
            yield pair.ids, thread


def _writes(thread: ThreadState) -> bool:
    return thread.wchan in FULL_PIPE
