"""The package as a wheel: with the native library in it, and only for systems that can run it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from firstlight.ops.cpu.build import library_name

REPOSITORY = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".*", "build", "docs", "tests", "benchmarks", "*.egg-info", "__pycache__")


@pytest.mark.slow
def test_a_wheel_brings_the_library_along_and_is_for_this_platform(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(REPOSITORY, source, ignore=LEFT_OUT)
    stale = source / "build" / "lib" / "firstlight" / "ops" / "cpu" / "native" / "libfirstlight-0123.so"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"of an older source")
    drafter = source / "drafters" / "some"
    drafter.mkdir(parents=True)
    (drafter / "config.json").write_text("{}")
    command = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path))
    subprocess.run((*command, str(source)), check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    libraries = [Path(name).name for name in names if name.endswith(".so")]
    assert libraries == [library_name()]
    assert [name for name in names if name.endswith("/firstlight/drafters/some/config.json")]
