"""Brings the native library along where a C++ compiler is there at installation; everything else is in
pyproject.toml.

Without a compiler the package installs all the same: the first start tries again, or uses stock operators.
"""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

NATIVE = Path("src/firstlight/ops/cpu")


class BuildWithLibrary(build_py):
    """Adds the library to the built package; an editable installation compiles into the cache instead."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        build = runpy.run_path(str(NATIVE / "build.py"))
        target = Path(self.build_lib) / NATIVE.relative_to("src") / "native" / build["library_name"]()
        try:
            build["compile_library"](target.absolute())
        except build["BuildError"] as error:
            self.warn(f"no native library: {error}")


setup(cmdclass={"build_py": BuildWithLibrary})
