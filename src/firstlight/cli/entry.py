"""The first lines of the program: for `serve` the public socket answers before all else is imported.

Entry point of the package and of `python -m firstlight`. Invariant: until that socket listens nothing is
imported beyond the standard library, and for other commands none is opened.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the program and leave with its exit code."""
    early = None
    if sys.argv[1:2] == ["serve"]:
        from firstlight.cli.first_answer import open_for

        early = open_for(sys.argv[2:])
    try:
        from firstlight.cli.main import main as run  # everything else comes with it

        run()
    finally:
        if early is not None:
            early.close()
