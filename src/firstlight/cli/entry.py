"""The first lines of the program: for `serve` the public socket answers before all else is imported.

Entry point of the package and of `python -m firstlight`. Invariants: until that socket listens nothing is
imported beyond the standard library, and for other commands none is opened; a Ctrl-C in these first moments
ends the program without a traceback, and the three standard descriptors are open, whoever started us.
"""

from __future__ import annotations

import os
import signal
import sys

from firstlight.base.environment import complete
from firstlight.cli.mount_guard import GUARDED, run_guarded

_INTERRUPTED = 130


def main() -> None:
    """Run the program and leave with its exit code."""
    _open_standard_descriptors()
    complete()
    if sys.argv[1:2] and sys.argv[1] in GUARDED and hasattr(signal, "sigtimedwait"):
        run_guarded(sys.argv[1], _main)
    else:
        _main()


def _main() -> None:
    interrupts: list[int] = []
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is to be ignored
    if is_ours:  # noted only: an import that is broken off in the middle says so in many lines
        signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    if os.getpid() == 1:  # a container's first process ends by no signal that it does not handle
        signal.signal(signal.SIGTERM, lambda number, _: interrupts.append(number))
    early = None
    try:
        if sys.argv[1:2] == ["serve"]:
            from firstlight.cli.first_answer import open_for

            early = open_for(sys.argv[2:])
        from firstlight.cli.main import main as run  # everything else comes with it

        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if os.getpid() == 1:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        if interrupts:
            raise KeyboardInterrupt
        run()
    except KeyboardInterrupt:
        print("interrupted.", file=sys.stderr)
        sys.exit(_INTERRUPTED)
    finally:
        if early is not None:
            early.close()


def _open_standard_descriptors() -> None:
    """The null device where one is closed (`>&-`): else a socket would get its number, and our words."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", errors="replace", closefd=False))
