"""The run's own control group: with a recorded tree, and with a real one where we may mount it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from firstlight.launch.processes.janitor_process import join_group, make_group, remove_group

MOUNT = "30 20 0:27 / {root} rw - cgroup2 cgroup2 rw\n"
# In a mount namespace of its own: a group, a process that hides behind a fork and a session, and its end.
REAL = """
import os, subprocess, sys, time
from pathlib import Path
from firstlight.launch.processes.janitor_process import join_group, make_group, remove_group
from firstlight.launch.janitor import end_all
group = make_group("test-%d" % os.getpid())
if group is None:
    sys.exit(3)
nested = "import os, time; os.setsid(); os.fork(); os.environ.clear(); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.3); " + nested])
join_group(group, child.pid)
give_up = time.monotonic() + 20
while len((group / "cgroup.procs").read_text().split()) < 2 and time.monotonic() < give_up:
    time.sleep(0.02)
members = (group / "cgroup.procs").read_text().split()
left = end_all("nobody", {}, group=str(group))
child.wait(20)
while (group / "cgroup.procs").read_text() and time.monotonic() < give_up:
    time.sleep(0.02)
remove_group(group)
print(len(members), left, child.returncode, group.exists())
"""


def recorded(tmp_path: Path) -> tuple[Path, Path]:
    """A /proc whose process is in group /mine of a hierarchy that is a plain folder."""
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (root / "mine").mkdir(parents=True)
    (proc / "self" / "mountinfo").write_text(MOUNT.format(root=root))
    (proc / "self" / "cgroup").write_text("4:memory:/other\n0::/mine\n")
    return proc, root / "mine"


def test_without_the_right_file_there_is_no_group(tmp_path: Path) -> None:
    proc, mine = recorded(tmp_path)
    assert make_group("r1", proc) is None
    assert list(mine.iterdir()) == []


def test_without_version_2_there_is_no_group(tmp_path: Path) -> None:
    proc, _ = recorded(tmp_path)
    (proc / "self" / "mountinfo").write_text("30 20 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw\n")
    assert make_group("r1", proc) is None


def test_a_process_that_cannot_be_moved_stays(tmp_path: Path) -> None:
    join_group(tmp_path / "absent", os.getpid())
    remove_group(tmp_path / "absent")


def test_all_of_a_real_group_ends_at_one_word(tmp_path: Path) -> None:
    """In a hierarchy mounted for the test; where we may not mount, in the one that is there."""
    run = f"exec {sys.executable} -c '{REAL}'"
    place = tmp_path / "cg"
    mounted = f"mkdir {place} && mount -t cgroup2 none {place} || exit 4; {run}"
    done = subprocess.run(["unshare", "-m", "sh", "-c", mounted], capture_output=True, text=True, timeout=60)
    if done.returncode in (1, 4):
        done = subprocess.run(["sh", "-c", run], capture_output=True, text=True, timeout=60)
    if done.returncode == 3:  # no right to make a group: then there is none, and nothing else happens
        assert done.stdout == ""
        return
    assert done.stdout.split() == ["2", "[]", "-9", "False"], done.stderr
