"""Grandchildren whose parents died, in a process of its own: adoption is for the whole process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).parents[4] / "src"
SCRIPT = """
import json, os, signal, subprocess, sys, time
from firstlight.launch.processes.orphans import adopt_orphans, reap_orphans
adopt_orphans()
grandchild = "import os, time; time.sleep(0.3); os._exit(7)"
parent = subprocess.Popen(
    [sys.executable, "-c", "import subprocess as s, sys; s.Popen([sys.executable, '-c', %r])" % grandchild],
    start_new_session=True,
)
bystander = subprocess.Popen([sys.executable, "-c", "raise SystemExit(5)"])
parent.wait()
found = []
deadline = time.monotonic() + 10
while not found and time.monotonic() < deadline:
    found = reap_orphans({parent.pid})
    time.sleep(0.02)
ends = [[orphan.cause.code, orphan.session == parent.pid] for orphan in found]
print(json.dumps([*ends, bystander.wait()]))
"""


def test_an_orphan_is_adopted_and_its_end_is_known() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": str(SOURCES)}, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == [[7, True], 5]
