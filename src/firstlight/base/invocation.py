"""How a person calls this program again: printed in hints, so that they can be copied as they are.

Invariant: what is printed works in the shell that started us.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

_NAME = "firstlight"


def program(invoked: str | None = None) -> str:
    """ "firstlight" where the shell finds this very program by that name, else how we were called."""
    path = Path(sys.argv[0] if invoked is None else invoked)
    if path.name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m {_NAME}"
    if path.name != _NAME:  # inside another program, as a library
        return _NAME
    found = shutil.which(_NAME)
    is_found = found is not None and path.exists() and os.path.samefile(found, path)
    return _NAME if is_found else shlex.quote(str(path))
