"""A container in small: a root that cannot be written to, processes of its own, a user without a name.

Made with `unshare` where mounting is allowed (`needs("mount namespace")`). Its root has the system's
programs, the interpreter, our sources and the folders that it is given, all read-only; /dev/shm is the only
place to write to. The environment is empty but for what it is given. Invariant: when the first process has
ended, all others have, and nothing is left mounted.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
UID = 54321
_DEVICES = ("null", "zero", "full", "random", "urandom")
_SCRIPT = """
set -e
root={root}
mount --make-rprivate /
mount -t tmpfs -o mode=755 none "$root"
cd "$root"
mkdir -p proc dev/shm tmp sys
for name in {devices}; do touch dev/$name; mount --bind /dev/$name dev/$name; done
mount -t tmpfs -o size={shm_mb}m,mode=1777 none dev/shm
mount -t proc none proc
{mounts}
mount -o remount,ro,bind "$root"
mount -o remount,ro "$root"
exec chroot --userspec={uid}:{uid} --groups= "$root" /usr/bin/env -i {variables} {command}
"""


def start(
    folder: Path,
    command: Sequence[str],
    *,
    shown: Sequence[Path] = (),
    variables: Mapping[str, str] | None = None,
    groups: Sequence[Path] = (),
    shm_mb: int = 64,
    **popen: object,
) -> subprocess.Popen[str]:
    """Start `command` as the first process of a container. `folder` is where its root is mounted.

    `shown`: files and folders that it sees; `groups`: control groups that it is put into.
    """
    root = folder / "root"
    root.mkdir()
    script = _SCRIPT.format(
        root=shlex.quote(str(root)),
        devices=" ".join(_DEVICES),
        shm_mb=shm_mb,
        mounts="\n".join(_mounts(shown)),
        uid=UID,
        variables=" ".join(shlex.quote(f"{name}={value}") for name, value in (variables or {}).items()),
        command=shlex.join(command),
    )
    joins = "".join(f"echo $$ > {shlex.quote(str(group / 'cgroup.procs'))}; " for group in groups)
    outside = f"{joins}exec unshare --mount --pid --ipc --fork sh -c {shlex.quote(script)}"
    return subprocess.Popen(["sh", "-c", outside], text=True, **popen)  # type: ignore[call-overload, no-any-return]


def first_process(process: subprocess.Popen[str]) -> int:
    """The first process of a container, as it is called outside. Raises `OSError` before there is one."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    if not children:
        raise ProcessLookupError("it has not started")
    return int(children[0])


def end(process: subprocess.Popen[str]) -> None:
    """Kill its first process, with which the kernel kills all others."""
    with contextlib.suppress(OSError):
        os.kill(first_process(process), signal.SIGKILL)
    process.kill()
    process.wait()


def _mounts(shown: Sequence[Path]) -> Iterator[str]:
    """The system's folders as links where they are links, everything else bound in its own place."""
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            yield f"ln -s {os.readlink(path)} {name}"
        elif path.is_dir():
            yield _bound(path)
    system = [Path("/usr"), Path("/etc/ld.so.cache"), Path("/etc/alternatives")]
    python = {Path(sys.base_prefix), Path(sys.prefix), REPOSITORY / "src", REPOSITORY / "drafters"}
    outside = {path for path in python if not path.is_relative_to("/usr")}
    for path in (*system, *sorted(outside), *shown):
        if path.exists():
            yield _bound(path)


def _bound(path: Path) -> str:
    place = shlex.quote(f".{path}")
    made = f"mkdir -p {place}" if path.is_dir() else f"mkdir -p $(dirname {place}); touch {place}"
    return f"{made}; mount --bind {shlex.quote(str(path))} {place}; mount -o remount,bind,ro {place}"
