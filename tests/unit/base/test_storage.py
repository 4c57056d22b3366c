"""Mounts as text: where a path lies, who serves it, what to do when nobody answers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from firstlight.base.apart import run_apart
from firstlight.base.errors import EngineError, ModelFileError
from firstlight.base.storage import Mount, mount_of, read_mounts

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
