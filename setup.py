"""Brings the drafters along, and the native library where a C++ compiler is there at installation; everything
else is in pyproject.toml.

Without a compiler the package installs all the same: the first start tries again, or uses stock operators.
"""

from __future__ import annotations

import runpy
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path("src/firstlight/ops/cpu")
DRAFTERS = Path("drafters")


class BuildWithLibrary(build_py):
    """Adds the library to the built package; an editable installation compiles into the cache instead."""

    def run(self) -> None:
        super().run()
        if DRAFTERS.is_dir() and not self.editable_mode:
            shutil.copytree(DRAFTERS, Path(self.build_lib) / "firstlight" / DRAFTERS, dirs_exist_ok=True)
        build = runpy.run_path(str(NATIVE / "build.py"))
        parent = _cache() if self.editable_mode else Path(self.build_lib) / NATIVE.relative_to("src")
        target = parent / "native" / build["library_name"]()
        for other in {*target.parent.glob("*.so")} - {target}:
            if not self.editable_mode:
                other.unlink()  # of an older source, left from an earlier build here
        try:
            if not target.exists():
                build["compile_library"](target.absolute())
        except build["BuildError"] as error:
            self.warn(f"no native library: {error}")


class WheelOfThisPlatform(bdist_wheel):
    """A wheel with the library is for this kind of system, and for any Python: it has a plain C interface.

    One that could not be compiled is for every system.
    """

    def run(self) -> None:
        self.run_command("build_py")
        self.root_is_pure = not list((Path(self.get_finalized_command("build_py").build_lib)).rglob("*.so"))
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


def _cache() -> Path:
    """Where the first start would compile to."""
    sys.path.insert(0, "src")
    from firstlight.base.environment import cache_directory

    return cache_directory()


setup(cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": WheelOfThisPlatform})
