"""How many instructions the native library takes for a fixed small step, counted by callgrind.

Used by `tests/native`; `make instructions` writes the budget anew. Counts do not depend on the load of the
machine, nor on its processor: it is always the AVX2 kernels, one thread, the same values. They do depend on
the compiler, so the budget names it. Invariant: what is counted is the library that would be served with.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from firstlight.ops.cpu.build import SOURCES
from firstlight.ops.cpu.library import open_library

NATIVE_TESTS = Path(__file__).parents[1] / "native"
BUDGET = NATIVE_TESTS / "instructions.json"
PARTS = ("norms", "products", "attention", "gates", "ends", "choice")
NO_AVX2 = 3  # exit code of the program
LIMIT_S = 100.0


class Budget(msgspec.Struct):
    """Instructions of each part of the step, as one compiler makes them."""

    compiler: str
    instructions: dict[str, int]


def compiler() -> str:
    """The compiler and its major version; "" if there is none."""
    found = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if found is None:
        return ""
    version = subprocess.run([found, "-dumpversion"], capture_output=True, text=True, check=True).stdout
    return f"{Path(found).name} {version.strip().split('.')[0]}"


def build(folder: Path) -> Path:
    """The program that runs the step, linked with the library of the sources as they are."""
    library, program = Path(open_library()._name), folder / "count"
    flags = ["-std=c++17", "-O1", "-Wno-psabi", f"-I{SOURCES}", f"-Wl,-rpath,{library.parent}"]
    command = [
        compiler().split()[0],
        *flags,
        str(NATIVE_TESTS / "count.cpp"),
        str(library),
        "-o",
        str(program),
    ]
    subprocess.run(command, check=True, timeout=LIMIT_S)
    return program


def count(program: Path, part: str) -> int:
    """Instructions inside `fl_run`."""
    tool = ["valgrind", "--tool=callgrind", "--toggle-collect=fl_run", "--callgrind-out-file=/dev/null"]
    done = subprocess.run(
        [*tool, str(program), part], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    found = re.search(r"Collected : (\d+)", done.stderr)
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr}"
    assert found is not None, done.stderr
    return int(found[1])


def stored() -> Budget:
    return msgspec.json.decode(BUDGET.read_bytes(), type=Budget)


def main() -> None:
    """Writes the budget of this compiler."""
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        budget = Budget(compiler(), {part: count(program, part) for part in PARTS})
    BUDGET.write_bytes(msgspec.json.format(msgspec.json.encode(budget), indent=2) + b"\n")
    print(BUDGET.read_text())


if __name__ == "__main__":
    sys.exit(main())
