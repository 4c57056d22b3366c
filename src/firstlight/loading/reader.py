"""Reads the planned bytes, each once, and delivers every tensor as soon as it is complete.

A thread reads ahead (positioned reads straight into each tensor's own memory) while the consumer, which may
take long, repacks what came before. Invariant: every `Wanted` is delivered exactly once, from the calling
thread, in file order; or an error names tensor and file.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from firstlight.base.errors import ModelFileError
from firstlight.facts.checkpoint.checkpoint import Checkpoint
from firstlight.facts.checkpoint.remedies import CHECK_FILE
from firstlight.loading.plan import ReadPlan, Segment, Wanted, make_plan
from firstlight.quant.packings import Window, assemble
from firstlight.quant.weight import Weight

BATCH_BYTES = 8 * 1024 * 1024  # neighbouring tensors are read in one call up to this size
READ_BYTES = 64 * 1024 * 1024  # and no single call asks for more
MAX_GAP_BYTES = 64 * 1024  # a smaller hole between two tensors is read over
MAX_BUFFERS = 512  # of one call; the system's limit is 1024
BATCHES_AHEAD = 2  # read and waiting for the consumer: bounds the memory of loading
AHEAD_BYTES = BATCHES_AHEAD * BATCH_BYTES  # of that, unless a single tensor is larger

Deliver = Callable[[Wanted, Weight], None]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class LoadReport:
    """What loading did. `resident_bytes` were delivered; `read_bytes` adds holes and columns of other
    ranks."""

    read_bytes: int
    resident_bytes: int
    seconds: float
    num_tensors: int
    unused: tuple[str, ...]


@dataclass
class _Batch:
    """Segments of one file read by one call; filled by the reading thread."""

    path: str
    segments: list[Segment] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.segments[-1].end

    @property
    def span_bytes(self) -> int:
        return self.end - self.segments[0].offset


def read_tensors(
    checkpoint: Checkpoint,
    wanted: Sequence[Wanted],
    deliver: Deliver,
    progress: Progress | None = None,
    others: Collection[str] = frozenset(),
) -> LoadReport:
    """Reads all of `wanted` and calls `deliver(wanted, weight)` for each, in file order.

    The weight's memory belongs to the receiver. `others`: tensors of the model that other ranks read.
    `progress(done, total)` counts bytes that were delivered, that is: taken over by their final place; it is
    called before the first read too. Raises `ModelFileError` or `UsageError` before the first read where the
    plan shows the fault, `ModelFileError` for a file that ends early; an error of `deliver` passes through.
    """
    started_s = time.monotonic()
    plan = make_plan(checkpoint, wanted, others)
    done_bytes, total_bytes, read_bytes = 0, plan.resident_bytes, 0
    finish = _Finisher(checkpoint.description.head_size)
    if progress is not None:
        progress(0, total_bytes)  # from a slow disk, the first bytes take long
    with _ReadAhead(plan) as batches:
        for batch in batches:
            read_bytes += batch.span_bytes
            while batch.segments:
                segment, buffer = batch.segments.pop(0), batch.buffers.pop(0)
                weight = finish(segment, buffer)
                del buffer  # so that nothing but the receiver keeps the bytes alive
                if weight is not None:
                    deliver(segment.wanted, weight)
                del weight
                done_bytes += segment.resident_bytes
                if progress is not None:
                    progress(done_bytes, total_bytes)
    return LoadReport(
        read_bytes=read_bytes,
        resident_bytes=done_bytes,
        seconds=time.monotonic() - started_s,
        num_tensors=len(wanted),
        unused=plan.unused,
    )


class _Finisher:
    """Makes the weights of segments: this rank's columns, rows in Hugging Face order.

    Of a matrix that is stored in several tensors the parts wait for each other.
    """

    def __init__(self, head_size: int) -> None:
        self._head_size = head_size
        self._waiting: dict[str, dict[str, torch.Tensor]] = {}

    def __call__(self, segment: Segment, buffer: torch.Tensor) -> Weight | None:
        raw = buffer.view(segment.num_rows, segment.row_bytes)
        if segment.kept_bytes < segment.row_bytes:
            raw = raw[:, segment.skipped_bytes : segment.skipped_bytes + segment.kept_bytes].contiguous()
        facts, wanted = segment.facts, segment.wanted
        if segment.part is not None:
            parts = self._waiting.setdefault(wanted.name, {})
            parts[segment.part.role] = raw
            if len(parts) < len(facts.parts):
                return None
            return assemble(facts, Window(wanted.rows, wanted.columns), self._waiting.pop(wanted.name))
        if facts.rope_permuted:
            raw = _restore_row_order(raw, segment, self._head_size)
        return Weight(facts.format, wanted.slice_shape, raw)


def _restore_row_order(raw: torch.Tensor, segment: Segment, head_size: int) -> torch.Tensor:
    # GGUF keeps the two halves of each head interleaved: row 2j + s of a head is row s * half + j in HF
    # order.
    num_values = segment.wanted.slice_shape[0]
    item_bytes = raw.numel() // num_values  # a row's bytes, or a bias value's
    paired = raw.view(num_values // head_size, head_size // 2, 2, item_bytes)
    return paired.transpose(1, 2).reshape(raw.shape)


def _batches(plan: ReadPlan) -> Iterator[_Batch]:
    batch: _Batch | None = None
    for segment in plan.segments:
        if batch is not None and _joins(batch, segment):
            batch.segments.append(segment)
            continue
        if batch is not None:
            yield batch
        batch = _Batch(segment.path, [segment])
    if batch is not None:
        yield batch


def _joins(batch: _Batch, segment: Segment) -> bool:
    return (
        batch.path == segment.path
        and 0 <= segment.offset - batch.end <= MAX_GAP_BYTES
        and segment.end - batch.segments[0].offset <= BATCH_BYTES
        and 2 * len(batch.segments) < MAX_BUFFERS
    )


def _read_batch(descriptor: int, batch: _Batch) -> None:
    """Fills the batch: one scattered read into the tensors' own memory, holes into scratch."""
    position = batch.segments[0].offset
    targets: list[memoryview] = []
    for segment in batch.segments:
        if segment.offset > position:
            targets.append(memoryview(bytearray(segment.offset - position)))
        buffer = torch.empty(segment.nbytes, dtype=torch.uint8)
        batch.buffers.append(buffer)
        targets.append(buffer.numpy().data)
        position = segment.end
    offset = batch.segments[0].offset
    while targets:
        asked = _at_most(targets, READ_BYTES)
        count = os.preadv(descriptor, asked, offset)
        if count == 0:
            raise _ended_early(batch, offset)
        offset += count
        targets = _advance(targets, count)


def _at_most(targets: list[memoryview], limit: int) -> list[memoryview]:
    if len(targets[0]) >= limit:
        return [targets[0][:limit]]
    chosen, total = [], 0
    for target in targets:
        total += len(target)
        if total > limit:
            break
        chosen.append(target)
    return chosen


def _advance(targets: list[memoryview], count: int) -> list[memoryview]:
    for index, target in enumerate(targets):
        if count < len(target):
            return [target[count:], *targets[index + 1 :]]
        count -= len(target)
    return []


def _ended_early(batch: _Batch, offset: int) -> ModelFileError:
    name = next(segment.wanted.name for segment in batch.segments if segment.end > offset)
    return ModelFileError(
        f"{batch.path} ended at byte {offset} while the tensor {name} was read: the file is truncated or was "
        "changed since it was opened.",
        "Download the file again, and do not replace it while it is loaded.",
    )


class _ReadAhead:
    """Batches from a reading thread, at most `BATCHES_AHEAD` unconsumed. Leaving the context ends it."""

    def __init__(self, plan: ReadPlan) -> None:
        self._plan = plan
        self._ready: queue.SimpleQueue[_Batch | BaseException | None] = queue.SimpleQueue()
        self._slots = threading.Semaphore(BATCHES_AHEAD)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="firstlight-reader", daemon=True)

    def __enter__(self) -> Iterator[_Batch]:
        self._thread.start()
        return self._delivered()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._slots.release()  # the thread may be waiting for room
        self._thread.join()

    def _delivered(self) -> Iterator[_Batch]:
        while (item := self._ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
            self._slots.release()

    def _run(self) -> None:
        try:
            self._read_files()
            self._ready.put(None)
        except OSError as error:
            self._ready.put(
                ModelFileError(
                    f"{error.filename or 'A file of the model'} cannot be read: {error.strerror}.", CHECK_FILE
                )
            )
        except BaseException as error:  # noqa: BLE001 - the top of a thread: the consumer raises it
            self._ready.put(error)

    def _read_files(self) -> None:
        for path, batches in groupby(_batches(self._plan), key=lambda batch: batch.path):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
                self._read_file(descriptor, batches)
            finally:
                os.close(descriptor)

    def _read_file(self, descriptor: int, batches: Iterable[_Batch]) -> None:
        for batch in batches:
            self._slots.acquire()
            if self._stop.is_set():
                return
            _read_batch(descriptor, batch)
            self._ready.put(batch)
