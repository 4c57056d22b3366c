"""The real vLLM of `make test-vllm`: where it is, how it is started by hand, and patience with it.

Used by tests/foreign. Invariant: every process that is started here is gone when its block ends.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from support.ports import free_port

REPOSITORY = Path(__file__).parents[2]
PYTHON = REPOSITORY / ".venv-vllm" / "bin" / "python"
READY_S = 600.0
VERDICT_S = 30.0
NAME = "SmolLM2"
SIZES = ("--max-model-len", "512", "--max-num-seqs", "2")
THEIRS = ("--max-num-batched-tokens", "256", "--gpu-memory-utilization", "0.2", "--enforce-eager")


def until(look: Callable[[], Any], deadline_s: float = VERDICT_S) -> Any:
    """What `look` says, once it says anything."""
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        with contextlib.suppress(httpx.TransportError, psutil.Error):
            if found := look():
                return found
        time.sleep(0.1)
    raise AssertionError("it did not happen in time")


@contextlib.contextmanager
def vllm_by_hand(model: Path, folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A vLLM that nobody supervises, and its URL; it may still be starting. Its log: `folder`/vllm.log."""
    port = free_port()
    where = ("--host", "127.0.0.1", "--port", str(port), "--served-model-name", NAME)
    module = ("-m", "vllm.entrypoints.openai.api_server", "--model", str(model))
    with (folder / "vllm.log").open("wb") as log:
        process = subprocess.Popen(
            [str(PYTHON), *module, *where, *SIZES, *THEIRS, *flags], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        rest = psutil.Process(process.pid).children(recursive=True)
        for one in rest:
            one.resume()
        process.terminate()
        psutil.wait_procs(rest, timeout=30)
        process.kill()
        process.wait()
