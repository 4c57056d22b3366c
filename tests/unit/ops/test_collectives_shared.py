"""Collectives through shared memory: all ranks get the same bits; whoever cannot share says why.

The ranks are threads here, each with its own mapping and its own handle of the library.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch._C._distributed_c10d import FileStore

from firstlight.base.errors import ResourceError
from firstlight.ops.collectives import Group, Wish, join
from firstlight.ops.collectives_shared import TOPIC, SharedMemory, Word, open_shared
from firstlight.ops.cpu.library import MissingLibraryError, open_library
from firstlight.ops.rendezvous import Rendezvous
from firstlight.ops.transport import Call, CollectiveError

# Floats: around the size from which ranks share the work, around that of a slot, and several slots.
SIZES = (1, 7, 1024, 16_383, 16_384, 65_535, 65_536, 65_537, 300_001)


class Notes(dict[str, bytes]):
    """A rendezvous's store in memory."""

    def set(self, key: str, value: str, /) -> None:
        self[key] = value.encode()

    def get(self, key: str, /) -> bytes:  # type: ignore[override]
        return self[key]

    def check(self, keys: list[str], /) -> bool:
        return all(key in self for key in keys)


def meeting_of(rank: int, word: Word | None = None, size: int = 2) -> Rendezvous:
    """The meeting as a rank finds it when the other one of two has left its word."""
    notes = Notes()
    if word is not None:
        notes.set(f"{TOPIC}-{1 - rank}", msgspec.json.encode(word).decode())
    return Rendezvous(notes, rank, size, 20.0)


def run(size: int, work: Callable[[SharedMemory, int], Any]) -> list[Any]:
    """`work` by `size` ranks."""
    notes, library = Notes(), open_library()

    def rank(number: int) -> Any:
        memory = open_shared(Rendezvous(notes, number, size, 30.0), lambda: library)
        assert isinstance(memory, SharedMemory), memory
        try:
            return work(memory, number)
        finally:
            memory.leave()

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank, range(size)))


def values(number: int, rank: int, size: int) -> torch.Tensor:
    """Floats of very different sizes: their sum depends on its order."""
    random = torch.Generator().manual_seed(1000 * number + rank)
    exponents = torch.randint(-8, 9, (size,), generator=random).float()
    return torch.randn(size, generator=random) * 10**exponents


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_all_ranks_get_the_bits_of_the_sum_in_rank_order(num_ranks: int) -> None:
    def work(memory: SharedMemory, rank: int) -> None:
        for number, size in enumerate(SIZES):
            own = [values(number, each, size) for each in range(num_ranks)]
            whole = own[rank].clone()
            memory.sum(Call("sum", 3 * number + 1, 60.0), whole)
            assert torch.equal(whole, functools.reduce(torch.add, own)), size
            columns = [part.view(1, -1)[:, each:].contiguous() for each, part in enumerate(own)]
            widths = [part.shape[1] for part in columns]
            joined = memory.join_columns(Call("columns", 3 * number + 2, 60.0), columns[rank], widths)
            assert torch.equal(joined, torch.cat(columns, 1)), size
            assert memory.least(Call("least", 3 * number + 3, 60.0), rank - size) == -size

    run(num_ranks, work)


def test_columns_of_several_rows_come_to_their_places() -> None:
    widths = [257, 0, 256]
    parts = [torch.arange(700.0 * width).view(700, width) + 1e6 * rank for rank, width in enumerate(widths)]

    def work(memory: SharedMemory, rank: int) -> torch.Tensor:
        return memory.join_columns(Call("logits", 1, 60.0), parts[rank], widths)

    for joined in run(3, work):
        assert torch.equal(joined, torch.cat(parts, 1))


def test_a_rank_that_stops_inside_is_not_said_to_be_absent() -> None:
    """Three ranks share the summing: one puts its values there and never sums its share."""
    has_put, is_over = threading.Event(), threading.Event()

    def work(memory: SharedMemory, rank: int) -> str:
        if rank == 2:
            ones, sign = torch.ones(16_384), memory._sign("s")
            memory._library.fl_exchange_sum(memory._handle, ones.data_ptr(), len(ones), sign, 1, 0)
            has_put.set()
            is_over.wait(60)
            return ""
        assert has_put.wait(60)
        with pytest.raises(CollectiveError) as failed:
            memory.sum(Call("s", 1, 1.0), torch.ones(16_384))
        if rank == 0:
            is_over.set()
        return str(failed.value)

    for said in run(3, work)[:2]:
        assert said == "did not complete within 1 s: rank 2 came to it and stopped inside"


@pytest.mark.parametrize(
    ("maker", "trouble"),
    [
        (Word(os.getpid(), 0, "no memory can be made"), "as rank 0 says: no memory can be made"),
        (Word(2**22 + 1, 0, "", 7, "00" * 16), "as rank 1 says: it cannot open rank 0's memory"),
    ],
)
def test_memory_that_cannot_be_shared_is_a_reason(maker: Word, trouble: str) -> None:
    said = open_shared(meeting_of(1, maker), open_library)
    assert isinstance(said, str)
    assert said.startswith(trouble)


@pytest.mark.parametrize(
    ("num_bytes", "words"), [(8 * 2**20, "another machine"), (4096, "no memory of this run")]
)
def test_another_process_s_file_is_not_taken_for_the_memory(
    tmp_path: Path, num_bytes: int, words: str
) -> None:
    """As a process of the same number in another container may have one."""
    path = tmp_path / "other"
    path.write_bytes(bytes(num_bytes))
    with path.open("rb+") as file:
        maker = Word(os.getpid(), 0, "", file.fileno(), "ab" * 16)
        said = open_shared(meeting_of(1, maker), open_library)
    assert isinstance(said, str)
    assert words in said


def test_the_memory_has_no_name_and_nobody_can_cut_it() -> None:
    memory = open_shared(meeting_of(0, Word(os.getpid(), 0)), open_library)
    assert isinstance(memory, SharedMemory)
    files = {path: os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    own = next(path for path, name in files.items() if "firstlight-collectives" in name)  # the mapping's
    assert files[own] == "/memfd:firstlight-collectives (deleted)"
    status = own.stat()
    assert (status.st_mode & 0o777, status.st_nlink) == (0o600, 0)
    with pytest.raises(PermissionError):
        os.truncate(own, 0)
    memory.leave()


def missing() -> Any:
    raise MissingLibraryError("no C++ compiler was found")


def test_a_wish_that_cannot_be_met_is_an_error(tmp_path: Path) -> None:
    other = Rendezvous(FileStore(str(tmp_path / "rendezvous"), 2), 1, 2, 5.0)
    other.say("rank", "here")
    other.say(TOPIC, msgspec.json.encode(Word(os.getpid(), 0)).decode())
    wish = Wish(means="shared-memory", library=missing)
    with pytest.raises(ResourceError, match="cannot share memory: as rank 0 says: no C\\+\\+ compiler was"):
        join(Group(0, 2, deadline_s=20.0), tmp_path / "rendezvous", wish)
