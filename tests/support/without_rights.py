"""Runs a command in which looking into other processes is refused, as in a container without rights.

`python -m support.without_rights COMMAND...`: a filter answers EPERM to ptrace and to reads of another
process's memory; and root loses its capabilities, so that the kernel refuses it any look into a process that
has them. Every child inherits both.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

_PR_CAPBSET_DROP, _LAST_CAPABILITY = 24, 63
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_LOAD_NUMBER = struct.pack("HBBI", 0x20, 0, 0, 0)  # BPF_LD | BPF_W | BPF_ABS: the call's number
_NUMBERS = {  # ptrace, process_vm_readv, process_vm_writev
    "x86_64": (101, 310, 311),
    "aarch64": (117, 270, 271),
}


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def refuse() -> None:
    """For this process and all that it becomes or starts."""
    calls = _NUMBERS[platform.machine()]
    code = _LOAD_NUMBER
    for index, number in enumerate(calls):  # BPF_JMP | BPF_JEQ: to the last instruction
        code += struct.pack("HBBI", 0x15, len(calls) - index, 0, number)
    code += struct.pack("HBBI", 0x06, 0, 0, _ALLOW) + struct.pack("HBBI", 0x06, 0, 0, _REFUSE)
    program = _Program(len(code) // 8, code)
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(_LAST_CAPABILITY + 1):  # they are gone with the next exec; no effect without root
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    refuse()
    os.execvp(sys.argv[1], sys.argv[1:])
