"""Every kind of value that evidence can have, as one tagged union.

The kinds stand in `values_process` (one process), `values_host` (the machine or the run) and `values_device`
(adapters, PCIe, the kernel's log). `Failed` is evidence too: what a collector could not learn, and why.
Invariant: each kind is a frozen struct with a tag of its own, so that a bundle read elsewhere is the same
case.
"""

from __future__ import annotations

import msgspec

from firstlight.doctor.case import values_device as device
from firstlight.doctor.case import values_host as host
from firstlight.doctor.case import values_process as process


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A collector learnt nothing about its subject."""

    collector: str
    reason: str
    is_timeout: bool = False
    is_refused: bool = False  # for want of a right: another user, ptrace, seccomp
    is_gone: bool = False  # the process ended meanwhile


Value = (
    Failed
    | process.ProcessState
    | process.Threads
    | process.InputOutput
    | process.Memory
    | process.StorageWait
    | process.Descriptors
    | process.Limits
    | process.Environment
    | process.Libraries
    | process.PythonStacks
    | process.BlackBoxSeen
    | process.LogTail
    | process.ExitRecord
    | process.SupervisorVerdict
    | process.Listed
    | host.Tree
    | host.CgroupMemory
    | host.CgroupPids
    | host.Pressure
    | host.HostMemory
    | host.Sockets
    | host.Pipes
    | host.FileLocks
    | host.JitLocks
    | host.Compilers
    | host.FreeSpace
    | host.HttpProbe
    | host.Generation
    | host.RequestLoad
    | host.NcclRas
    | host.Gpus
    | host.CheckpointFiles
    | device.NicCounters
    | device.PciPaths
    | device.KernelLog
)


def kind_of(value: Value) -> str:
    """The tag, as it stands in an evidence id."""
    return str(value.__struct_config__.tag)
