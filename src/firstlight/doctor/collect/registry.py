"""All collectors, in the order in which their evidence is numbered.

Invariant: the order is part of a case's ids, so a new collector goes to the end of its group.
"""

from __future__ import annotations

from firstlight.doctor.collect.blackboxes import BOXES
from firstlight.doctor.collect.cgroup import CGROUPS
from firstlight.doctor.collect.checkpoints import CHECKPOINTS
from firstlight.doctor.collect.descriptors import DESCRIPTORS, PIPES
from firstlight.doctor.collect.environment import ENVIRONMENT, LIBRARIES
from firstlight.doctor.collect.exits import EXITS
from firstlight.doctor.collect.file_locks import LOCKS
from firstlight.doctor.collect.gpus import GPUS
from firstlight.doctor.collect.host import HOST_MEMORY, PRESSURE, SPACE
from firstlight.doctor.collect.jit_locks import JIT_LOCKS
from firstlight.doctor.collect.kernel_log import KERNEL_LOG
from firstlight.doctor.collect.logs import LOGS
from firstlight.doctor.collect.nics import NICS
from firstlight.doctor.collect.pci import PCI
from firstlight.doctor.collect.probes import GENERATION, HTTP, LOAD
from firstlight.doctor.collect.process_state import INPUT_OUTPUT, LIMITS, MEMORY, STATE
from firstlight.doctor.collect.ras import RAS
from firstlight.doctor.collect.run_verdicts import RUN_VERDICTS
from firstlight.doctor.collect.scene import Collector
from firstlight.doctor.collect.sockets import SOCKETS
from firstlight.doctor.collect.stacks import STACKS
from firstlight.doctor.collect.storage import STORAGE
from firstlight.doctor.collect.threads import THREADS
from firstlight.doctor.collect.tree import COMPILERS, TREE

COLLECTORS: tuple[Collector, ...] = (
    TREE,
    STATE,
    THREADS,
    INPUT_OUTPUT,
    MEMORY,
    STORAGE,
    BOXES,
    STACKS,
    COMPILERS,
    EXITS,
    LOGS,
    HTTP,
    GENERATION,
    DESCRIPTORS,
    PIPES,
    SOCKETS,
    LOCKS,
    JIT_LOCKS,
    CGROUPS,
    HOST_MEMORY,
    PRESSURE,
    SPACE,
    LIMITS,
    ENVIRONMENT,
    LIBRARIES,
    CHECKPOINTS,
    RAS,
    GPUS,
    NICS,
    PCI,
    KERNEL_LOG,
    LOAD,
    RUN_VERDICTS,
)

# For who watches all the time and wants a verdict within seconds: nothing that asks a process which may not
# answer, and nothing that explains only why a start was slow.
QUICK: tuple[Collector, ...] = (
    TREE,
    STATE,
    THREADS,
    INPUT_OUTPUT,
    STORAGE,
    BOXES,
    STACKS,
    COMPILERS,
    EXITS,
    DESCRIPTORS,
    PIPES,
    SOCKETS,
    LOCKS,
)
