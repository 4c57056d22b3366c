"""The real vLLM and llama.cpp of `make test-vllm` and `make judges`: where they are, how they are started by
hand, and patience with them.

Used by tests/foreign. Invariant: every process that is started here is gone when its block ends.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from support.ports import free_port

REPOSITORY = Path(__file__).parents[2]
LLAMA = REPOSITORY / ".peers" / "llama.cpp"
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
    with _process([str(PYTHON), *module, *where, *SIZES, *THEIRS, *flags], folder / "vllm.log") as process:
        yield process, f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def llama_by_hand(model: Path, folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """llama.cpp's server with a GGUF file, and its URL; it may still be starting. Log: `folder`/llama.log."""
    port = free_port()
    where = ("--host", "127.0.0.1", "--port", str(port), "--alias", NAME, "-np", "1", "-c", "1024")
    server = LLAMA / "build" / "bin" / "llama-server"
    with _process([str(server), "-m", str(model), *where, *flags], folder / "llama.log") as process:
        yield process, f"http://127.0.0.1:{port}"


def to_gguf(folder: Path, target: Path, *flags: str) -> None:
    """llama.cpp's own converter, in bfloat16; its packages are among vLLM's, and its gguf is beside it."""
    vendored = LLAMA / "source" / "vendor" / "llama.cpp"
    command = [str(PYTHON), str(vendored / "convert_hf_to_gguf.py"), str(folder)]
    options = ["--outtype", "bf16", "--outfile", str(target), *flags]
    done = subprocess.run(
        [*command, *options],
        env={**os.environ, "PYTHONPATH": str(vendored / "gguf-py")},
        capture_output=True,
        text=True,
        timeout=READY_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@contextlib.contextmanager
def _process(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        rest = psutil.Process(process.pid).children(recursive=True)
        for one in rest:
            one.resume()
        process.terminate()
        psutil.wait_procs(rest, timeout=30)
        process.kill()
        process.wait()
