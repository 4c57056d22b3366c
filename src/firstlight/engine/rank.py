"""Entry point of an engine rank: `python -m firstlight.engine.rank --run-dir D --rank R`.

Opens its black box before it imports anything that can hang, torch above all. Invariant: it never ends
silently: where it was is in its box, and its last words are in the run directory.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from firstlight.base.allow_ptrace import allow_examination
from firstlight.base.blackbox.store import open_own_box
from firstlight.base.blackbox.writer import BlackBox
from firstlight.base.config import RunConfig, read_config
from firstlight.base.errors import FirstlightError
from firstlight.base.failure import write_failure
from firstlight.base.imports import counted_imports, put_off


def main() -> int:
    """Runs one rank to its end; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    arguments = parser.parse_args()
    run_dir, rank = arguments.run_dir, arguments.rank
    name = f"rank-{rank}"
    box = open_own_box(run_dir, name, role="rank", rank=rank)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides; a terminal sends it to all of us
    allow_examination(run_dir, name)
    config = read_config(run_dir)
    try:
        _run(config, rank, box)
    except Exception as error:  # noqa: BLE001 - the top of the process: it becomes the last words
        write_failure(run_dir, name, error)
        code = error.exit_code if isinstance(error, FirstlightError) else FirstlightError.exit_code
        if config.debug or code == FirstlightError.exit_code:
            traceback.print_exc()  # not seen without --debug, but kept in its log
        return code
    return 0


def _run(config: RunConfig, rank: int, box: BlackBox) -> None:
    with counted_imports(box, "headers"):
        from firstlight.facts.checkpoint.checkpoint import open_checkpoint

        # Only headers: what is no model is said before torch is imported.
        checkpoint = open_checkpoint(config.model.path)
    # Half a second and 20 MB for tensors without data and for exported graphs: we have neither.
    put_off("torch._meta_registrations", "torch.export")
    with counted_imports(box, "torch"):
        from firstlight.engine.worker.rank_loop import follow, lead
    if rank == 0:
        lead(config, checkpoint, box)
    else:
        follow(config, checkpoint, rank, box)


def _end(exit_code: int) -> NoReturn:
    """Ends the process as it stands: gloo's threads may still wait for a rank that died, and tearing them
    down would abort instead of giving the exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    try:
        _end(main())
    except SystemExit as leaving:  # asked to by SIGTERM, or wrong arguments
        _end(leaving.code if isinstance(leaving.code, int) else 1)
