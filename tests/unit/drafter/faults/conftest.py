"""The run that all faults are planted in: made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.fault_runs import FaultRun, make_run


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> FaultRun:
    return make_run(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def run(sound: FaultRun, tmp_path: Path) -> FaultRun:
    return sound.copy(tmp_path)
