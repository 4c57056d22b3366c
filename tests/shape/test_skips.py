"""The suite's own rule: a skip without the `gpu` or the `needs` marker fails the run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shape.source import REPOSITORY

GPU_SKIP = """
import pytest
@pytest.mark.gpu
def test_on_a_gpu():
    import torch
    assert torch.cuda.is_available()
"""
ABILITY_SKIP = """
import pytest
from support import abilities
abilities.ABILITIES["wings"] = lambda: "no wings"
@pytest.mark.needs("wings")
def test_that_flies():
    raise AssertionError
"""
ACCIDENTAL_SKIP = """
import pytest
@pytest.mark.skipif(True, reason="forgotten")
def test_that_never_runs():
    raise AssertionError
"""
MISSING_PACKAGE = """
import pytest
pytest.importorskip("a_package_that_is_not_there")
"""
GREEN = "def test_fine():\n    pass\n"


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (GREEN, 0),
        (GREEN + GPU_SKIP, 0),
        (GREEN + ABILITY_SKIP, 0),
        (GREEN + ACCIDENTAL_SKIP, 1),
        (MISSING_PACKAGE, 1),
    ],
)
def test_only_the_markers_may_skip(tmp_path: Path, content: str, code: int) -> None:
    shutil.copy(REPOSITORY / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(content)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: needs a GPU\n    needs: an ability\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-ra", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "tests")},
        capture_output=True,
        text=True,
        check=False,
    )
    expected = (code, 5) if content == MISSING_PACKAGE else (code,)  # 5: pytest found no test at all
    assert done.returncode in expected, done.stdout
    assert (done.returncode == 0) == (code == 0)
    if code:
        assert "skipped without the gpu or the needs marker" in done.stdout
