"""`firstlight blackbox` on a real run: while a rank of it is stopped, and after all were killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil

from support.serving import RunningServer, write_chat_model


def blackbox(run_dir: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "firstlight", "blackbox", run_dir, "--json"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    return json.loads(shown)  # type: ignore[no-any-return]


def states(shown: dict[str, Any]) -> dict[str, str]:
    return {process["name"]: process["state"] for process in shown["processes"]}


def test_a_run_from_its_start_to_its_death(tmp_path: Path) -> None:
    with RunningServer(write_chat_model(tmp_path / "tiny"), "--tensor-parallel", "2") as server:
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 3}, timeout=60)
        everybody = psutil.Process(server.pid).children()
        children = {name: child for child in everybody if (name := _name(child.cmdline())) is not None}
        rank = children["rank-1"]
        run_dir = rank.cmdline()[rank.cmdline().index("--run-dir") + 1]
        os.kill(rank.pid, signal.SIGSTOP)
        shown = blackbox(run_dir)
        assert states(shown) == {"api": "alive", "rank-0": "alive", "rank-1": "alive"}
        assert {process["name"]: process["pid"] for process in shown["processes"]} == {
            name: child.pid for name, child in children.items()
        }
        _assert_complete(shown)
        os.kill(server.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(everybody, timeout=15)  # the janitor too, which keeps the boxes
        assert alive == []
    kept = blackbox(run_dir)
    assert set(states(kept).values()) == {"dead"}
    _assert_complete(kept)
    shutil.rmtree(run_dir)


def _assert_complete(shown: dict[str, Any]) -> None:
    entries = shown["entries"]
    assert [entry["since_s"] for entry in entries] == sorted(entry["since_s"] for entry in entries)
    for name in ("rank-0", "rank-1"):
        phases = [entry["phase"] for entry in entries if entry["process"] == name and "phase" in entry]
        assert phases[0] == "spawn"
        assert phases[-1] == "serving"
        assert {"imports", "rendezvous", "weights", "kv"} <= set(phases)
    after_weights = next(entry["before"] for entry in entries if entry.get("phase") == "kv")
    assert after_weights["phase"] == "weights"
    assert after_weights["odometer"]["done"] == after_weights["odometer"]["total"] > 0
    assert any(entry.get("event") == "step" for entry in entries)


def _name(command: list[str]) -> str | None:
    if "firstlight.engine.rank" in command:
        return f"rank-{command[command.index('--rank') + 1]}"
    return "api" if "firstlight.serve.api" in command else None
