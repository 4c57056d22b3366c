"""The quality of our answers, by `firstlight bench quality --full` in a process of its own.

Called by `__main__` after the rounds. Invariant: it is the same command that a user would run.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from firstlight.base.errors import EngineError


def bench_quality(gguf: Path, threads: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Its report, as it is stored by --json. Raises `EngineError` where it gives none."""
    say("quality: KL, perplexity on a long text, answers to questions")
    with tempfile.TemporaryDirectory(prefix="quality-") as folder:
        target = Path(folder) / "quality.json"
        command = [sys.executable, "-P", "-m", "firstlight", "bench", "quality", str(gguf), "--full"]
        command += ["--cpu-kernels", "auto", "--threads", str(threads), "--json", str(target)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        if not target.exists():
            raise EngineError(
                f"the quality could not be measured (exit code {done.returncode})",
                "Run `firstlight bench quality --full` by itself.",
            )
        report: dict[str, Any] = msgspec.json.decode(target.read_bytes())
    return report
