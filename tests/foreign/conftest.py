"""What the tests with foreign engines share: the default model in a form that every engine reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("models") / "smollm2"
    command = [sys.executable, "-m", "firstlight", "convert", "default", str(folder)]
    subprocess.run(command, check=True, timeout=120)
    return folder
