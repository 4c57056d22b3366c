"""Entry point of the api process: `python -m firstlight.serve.api --run-dir D --fd N --control-fd M`.

Opens its black box before it imports anything that can hang. Invariant: it never ends silently: its last
words are in the run directory.
"""

from __future__ import annotations

import argparse
import signal
import sys
import traceback
from pathlib import Path

from firstlight.base.allow_ptrace import allow_examination
from firstlight.base.blackbox.store import open_own_box
from firstlight.base.config import read_config
from firstlight.base.errors import FirstlightError
from firstlight.base.failure import write_failure
from firstlight.base.imports import counted_imports


def main() -> int:
    """Runs the api process; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--control-fd", type=int, required=True)
    arguments = parser.parse_args()
    box = open_own_box(arguments.run_dir, "api", role="api")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides; a terminal sends it to all of us
    allow_examination(arguments.run_dir, "api")
    config = read_config(arguments.run_dir)
    try:
        with counted_imports(box, "fastapi, tokenizers"):
            from firstlight.serve.process import run_api
        run_api(config, arguments.fd, arguments.control_fd, box)
    except Exception as error:  # noqa: BLE001 - the top of the process: it becomes the last words
        write_failure(arguments.run_dir, "api", error)
        if config.debug:
            traceback.print_exc()
        return error.exit_code if isinstance(error, FirstlightError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
