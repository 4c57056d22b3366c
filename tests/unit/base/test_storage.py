"""Mounts as text: where a path lies, who serves it, what to do when nobody answers."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from firstlight.base.disposable_child import require_answer, run_apart
from firstlight.base.errors import EngineError, ModelFileError, ResourceError
from firstlight.base.storage import Mount, _named, is_for_storage, mount_of, read_mounts, waits_of
from support.doctor_scenes import until

TEXT = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
40 22 0:52 / /mnt/big\\040models rw,relatime shared:9 - nfs4 filer.lab:/export/models rw,hard
41 22 0:57 / /s3 rw,nosuid shared:10 - fuse.s3fs bucket rw,user_id=0
42 22 0:58 / /win rw - cifs //nas/share rw
"""
MOUNTS = read_mounts(TEXT)


def test_the_mount_of_a_path_is_the_innermost() -> None:
    found = mount_of("/mnt/big models/a/model.gguf", MOUNTS)
    assert found == ("/mnt/big models/a/model.gguf", MOUNTS[1])
    assert found[1].server == "filer.lab"
    assert "nfsstat -m" in found[1].remedy()
    assert "umount -f -l /mnt/big models" in found[1].remedy()


def test_a_name_that_only_begins_like_a_mount_is_elsewhere() -> None:
    found = mount_of("/s3backup/x", MOUNTS)
    assert found is not None
    assert found[1].point == "/"
    assert "smartctl -a /dev/vda1" in found[1].remedy()


def test_a_fuse_mount_is_known_by_its_connection() -> None:
    found = mount_of("/s3/x", MOUNTS)
    assert found is not None
    assert "/sys/fs/fuse/connections/57/abort" in found[1].remedy()
    assert found[1].server == ""


def test_a_windows_share_names_its_server() -> None:
    assert MOUNTS[3].server == "nas"


def test_links_are_followed_up_to_a_mount_that_may_not_answer(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/s3/models")
    found = mount_of(str(tmp_path / "link" / "x"), MOUNTS)
    assert found is not None
    assert found[0] == "/s3/models/x"


@pytest.mark.parametrize("kind", ["ext4", "xfs", "overlay", "tmpfs", "fuseblk", "fusectl"])
def test_what_the_kernel_serves_itself_is_not_remote(kind: str) -> None:
    assert not Mount("/", kind, "/dev/sda", 1).is_remote


def test_work_apart_returns_its_text_or_raises_its_error() -> None:
    assert run_apart(lambda: str(os.getpid()), 5.0) != str(os.getpid())

    def refuse() -> str:
        raise ModelFileError("it is no model", "Take another.")

    with pytest.raises(ModelFileError, match="it is no model") as caught:
        run_apart(refuse, 5.0)
    assert caught.value.hint == "Take another."


def test_work_apart_that_dies_is_said() -> None:
    with pytest.raises(EngineError, match="was ended"):
        run_apart(lambda: os._exit(9), 5.0)


@pytest.mark.parametrize(
    ("call", "wchan"),
    [
        ("0 0x3 0x7f 0x10", ""),  # read
        ("257 0xffffff9c 0x7f 0x0", "d_alloc_parallel"),  # openat
        ("-1 0x7ffd 0x7f", "folio_wait_bit_common"),  # a page fault
        ("9 0x0 0x10", "folio_wait_bit_common"),  # mmap that fetches its pages
        ("", "0"),  # not told to us
    ],
)
def test_a_wait_for_a_file_is_known(call: str, wchan: str) -> None:
    if platform.machine() == "x86_64":
        assert is_for_storage(call, wchan)


@pytest.mark.parametrize(
    ("call", "wchan"),
    [("16 0x9 0xc0", "os_acquire_rwlock_write"), ("58 0x0", "wait_for_vfork_done"), ("11 0x7f", "0")],
)
def test_a_wait_for_a_driver_or_a_fork_is_none_for_storage(call: str, wchan: str) -> None:
    assert not is_for_storage(call, wchan)


def test_who_waits_for_a_fork_in_state_d_does_not_wait_for_storage(tmp_path: Path) -> None:
    """Its child stands in the open of a FIFO before it has become another program."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    code = (
        "import os, sys\n"
        "opens = (os.POSIX_SPAWN_OPEN, 5, sys.argv[1], os.O_WRONLY, 0)\n"
        "os.posix_spawn('/bin/true', ['true'], {}, file_actions=[opens])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(fifo)])
    try:
        stat = Path(f"/proc/{process.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "D")
        assert waits_of(process.pid) == ()
    finally:
        with fifo.open("rb"):  # its child goes on
            process.wait(60)


def test_a_child_that_answered_leaves_no_zombie() -> None:
    before = children()
    with pytest.raises(ResourceError):
        run_apart(lambda: _raise(ResourceError("no.", "x")), 5.0)
    assert children() == before


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def _raise(error: Exception) -> str:
    raise error


@pytest.mark.parametrize("start", [4096 - 9, 4096 - 1, 4096, 0])
def test_a_path_is_read_whole_where_it_crosses_into_the_next_page(start: int) -> None:
    """Seen: `/tmp/mounts/tmpv` of a longer name, which lay on another mount."""
    path = b"/mnt/big models/a/model.gguf"
    with mmap.mmap(-1, 2 * 4096) as memory:
        memory[start : start + len(path) + 1] = path + b"\0"
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + start
        assert _named(os.getpid(), ["257", "0xffffff9c", hex(at)], 1) == path.decode()


def test_a_file_of_this_machine_is_read_without_a_child() -> None:
    require_answer("/etc/hostname", "/no/such/file", "~/none")
