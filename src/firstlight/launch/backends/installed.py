"""Which Python on this machine has vLLM or SGLang, and which version of it.

Called when a foreign backend is chosen, and by `firstlight grammar`. The interpreter is asked in a process of
its own, which finds the package without importing it. Invariant: what is returned was found to be there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from firstlight.base.environment import child_environment
from firstlight.base.errors import UsageError
from firstlight.doctor.logs.grammar import load_grammar

_ASK_S = 30.0
_QUESTION = """
import importlib.metadata as metadata, importlib.util as util, json, os, sys
spec, version = util.find_spec(sys.argv[1]), ""
for name in sys.argv[2:]:
    try:
        version = version or metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
folder = os.path.dirname(spec.origin) if spec and spec.origin else ""
print(json.dumps({"folder": folder, "version": version}))
"""


class Installed(msgspec.Struct, frozen=True):
    """An engine's package. `version` is empty when its metadata are missing."""

    python: str
    folder: str
    version: str


class _Answer(msgspec.Struct):
    folder: str
    version: str


def find_installed(engine: str, python: str | None = None) -> Installed:
    """The engine that `python` has, or the first interpreter on PATH that has it. Raises `UsageError`."""
    if python is not None:
        path = shutil.which(str(Path(os.path.expanduser(python))))
        if path is None:
            raise UsageError(
                f"--backend-python {python} is no program that can be run.",
                f"Name the python of the environment that has {engine}, such as venv/bin/python.",
            )
        found = _ask(path, engine)
        if found is None:
            raise UsageError(
                f"{python} has no package {engine}.",
                f"Install it there: {python} -m pip install {engine}",
            )
        return found
    candidates = list(dict.fromkeys(_candidates(engine)))
    for candidate in candidates:
        if (found := _ask(candidate, engine)) is not None:
            return found
    raise UsageError(
        f"{engine} is not installed in any Python on PATH (asked: {', '.join(candidates)}).",
        f"Install it into an environment of its own (python3 -m venv {engine}-env; "
        f"{engine}-env/bin/pip install {engine}) and add --backend-python {engine}-env/bin/python.",
    )


def _candidates(engine: str) -> Iterator[str]:
    script = shutil.which(engine)
    if script is not None and (python := _interpreter_of(Path(script))) is not None:
        yield python
    for name in ("python3", "python"):
        if (path := shutil.which(name)) is not None:
            yield path
    yield sys.executable


def _interpreter_of(script: Path) -> str | None:
    """The Python in the first line of an installed command."""
    try:
        with script.open("rb") as file:
            first = file.readline(4096).decode("utf-8", "replace")
    except OSError:
        return None
    found = re.match(r"#!\s*(\S*python[\w.]*)\s*$", first)
    return found[1] if found else None


def _ask(python: str, engine: str) -> Installed | None:
    grammar = load_grammar(engine)
    command = [python, "-c", _QUESTION, grammar.package, *grammar.distributions]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=_ASK_S, check=False, env=child_environment({})
        )
        answer = msgspec.json.decode(done.stdout, type=_Answer)
    except (OSError, subprocess.TimeoutExpired, msgspec.DecodeError):
        return None
    return Installed(python, answer.folder, answer.version) if answer.folder else None
