"""The start that the README shows is today's: what does not depend on the machine is compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.engines import Harness

REPOSITORY = Path(__file__).resolve().parents[2]
README = REPOSITORY / "README.md"
DRAFTER = REPOSITORY / "drafters" / "smollm2-135m-instruct-eagle3"  # what `make serve` takes by itself


@pytest.mark.timeout(300)
def test_the_readme_shows_today_s_memory(real_path: Path) -> None:
    shown = README.read_text(encoding="utf-8")
    engine = Harness(real_path, dtype="auto", kv_memory_bytes=0, drafter=str(DRAFTER))
    notes: list[str] = engine.started.report["memory"]
    compared = [note for note in notes if note.startswith(("workspace", "kv cache"))]
    assert len(compared) == 2
    for note in compared:
        assert f"  memory    {note}\n" in shown
