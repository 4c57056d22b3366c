"""`python -m support.as_nobody PID`: the doctor's JSON on a server, as a user without rights where root asks.

Everything is imported before the user changes, as nobody may not read our folders. Invariant: nothing is done
as root but the imports.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys

import firstlight.doctor
from firstlight.cli.doctor import doctor
from firstlight.cli.doctor_options import DoctorOptions

NOBODY = 65534


def main(pid: int) -> int:
    """Become nobody and look; the exit code of the command."""
    for found in pkgutil.walk_packages(firstlight.doctor.__path__, "firstlight.doctor."):
        importlib.import_module(found.name)
    for name in ("doctor_output", "doctor_targets"):
        importlib.import_module(f"firstlight.cli.{name}")
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    return doctor(DoctorOptions(pid=pid, json=True))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
