"""Run by a test: looks at a process as a user who has no right to, and prints the case."""

from __future__ import annotations

import os
import sys

import msgspec

from firstlight.doctor.case.target import Engine, Role, Target, TargetProcess
from firstlight.doctor.collect.descriptors import DESCRIPTORS, PIPES
from firstlight.doctor.collect.environment import ENVIRONMENT, LIBRARIES
from firstlight.doctor.collect.process_state import INPUT_OUTPUT, LIMITS, MEMORY, STATE
from firstlight.doctor.collect.run import examine
from firstlight.doctor.collect.scene import Scene
from firstlight.doctor.collect.stacks import STACKS
from firstlight.doctor.collect.threads import THREADS
from firstlight.doctor.servers.procfs import ProcFs

NOBODY = 65534
COLLECTORS = [STATE, THREADS, INPUT_OUTPUT, MEMORY, LIMITS] + [
    ENVIRONMENT,
    LIBRARIES,
    DESCRIPTORS,
    PIPES,
    STACKS,
]


def main() -> None:
    if os.geteuid() == 0:  # everything is imported by now
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    pid = int(sys.argv[1])
    stat = ProcFs().stat(pid)
    assert stat is not None
    process = TargetProcess(
        key="rank-0",
        pid=pid,
        start_ticks=stat.start_ticks,
        parent=stat.parent,
        session=stat.session,
        role=Role.RANK,
        uid=0,
    )
    target = Target(engine=Engine.UNKNOWN, processes=(process,))
    sys.stdout.buffer.write(msgspec.json.encode(examine(Scene(target), COLLECTORS, num_looks=1)))


main()
