"""Abilities of a machine that only some tests need: a name, and why it is missing here if it is.

Used by `tests/conftest.py` for the marker `needs`. Invariant: a question changes nothing on the machine that
is still there when it is answered.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from functools import cache

_ASK_S = 10.0


def _program(name: str, package: str) -> str:
    return "" if shutil.which(name) else f"no {name} (Debian: {package})"


def _fuse() -> str:
    if not os.path.exists("/dev/fuse"):
        return "no /dev/fuse"
    return (
        "" if os.access("/dev/fuse", os.R_OK | os.W_OK) and os.geteuid() == 0 else "may not mount with FUSE"
    )


def _mount_namespace() -> str:
    if missing := _program("unshare", "util-linux"):
        return missing
    asked = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"],
        capture_output=True,
        text=True,
        timeout=_ASK_S,
        check=False,
    )
    return "" if asked.returncode == 0 else f"may not mount: {asked.stderr.strip()}"


def _memory_cgroup() -> str:
    group = f"/sys/fs/cgroup/memory/firstlight-ask-{os.getpid()}"
    try:
        os.mkdir(group)
        os.rmdir(group)
    except OSError as error:
        return f"no control group of memory (version 1) can be made: {error.strerror}"
    return ""


ABILITIES: dict[str, Callable[[], str]] = {
    "fuse": _fuse,
    "mount namespace": _mount_namespace,
    "memory cgroup": _memory_cgroup,
    "tmux": lambda: _program("tmux", "tmux"),
    "screen": lambda: _program("screen", "screen"),
    "systemd-analyze": lambda: _program("systemd-analyze", "systemd"),
    "promtool": lambda: _program("promtool", "prometheus"),
}


@cache
def missing(name: str) -> str:
    """Why this machine lacks the ability; empty where it has it. Raises `KeyError` for an unknown name."""
    return ABILITIES[name]()
