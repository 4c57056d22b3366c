"""How our options are written for a foreign engine, who has it, and what its log makes of the boxes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from firstlight.base.blackbox.reader import read_box
from firstlight.base.blackbox.store import box_path, make_box_folder
from firstlight.base.blackbox.writer import create_box
from firstlight.base.config import RunConfig
from firstlight.base.errors import ModelFileError, UsageError
from firstlight.base.process import ExitCause
from firstlight.base.resolve_config import Given, Resolved, resolve
from firstlight.launch.backends.foreign import ForeignBackend
from firstlight.launch.backends.installed import find_installed
from firstlight.launch.backends.kinds import KINDS, arguments, require_known
from firstlight.launch.backends.log_follower import end_leftovers
from firstlight.launch.processes.commands import run_token
from firstlight.launch.processes.output import OutputLine
from firstlight.serve.foreign.upstream import Place, read_place
from support.stand_in_vllm import VERSION, install_stand_in

PLACE = Place(engine="vllm", uds="/run/engine.sock", port=8123, key="secret")


def resolved(**values: object) -> Resolved:
    return resolve([Given({name.replace("_", "-"): value for name, value in values.items()}, "the flags")], 2)


def config(backend: ForeignBackend, settings: Resolved, run_dir: Path, model: str = "org/name") -> RunConfig:
    return RunConfig(
        run_dir=str(run_dir),
        model=backend.find_model(model, Path),
        engine=settings.engine,
        server=settings.server,
        launch=settings.launch,
    )


def command(engine: str, tmp_path: Path, **values: object) -> list[str]:
    settings = resolved(**values)
    run = config(ForeignBackend(KINDS[engine], settings), settings, tmp_path)
    return list(arguments(KINDS[engine], run, settings.given, PLACE))


def follows(words: list[str], *expected: str) -> bool:
    return any(words[at : at + len(expected)] == list(expected) for at in range(len(words)))


def test_parsers_and_remote_code_in_the_words_of_both(tmp_path: Path) -> None:
    given = {"tool_call_parser": "kimi_k2", "reasoning_parser": "kimi_k2", "trust_remote_code": True}
    for engine in ("vllm", "sglang"):
        words = command(engine, tmp_path, **given)
        assert follows(words, "--tool-call-parser", "kimi_k2")
        assert follows(words, "--reasoning-parser", "kimi_k2")
        assert "--trust-remote-code" in words
        assert ("--enable-auto-tool-choice" in words) is (engine == "vllm")
        assert "--tool-call-parser" not in command(engine, tmp_path, tool_call_parser="auto")


def test_our_options_in_the_words_of_vllm(tmp_path: Path) -> None:
    words = command("vllm", tmp_path, tensor_parallel=2, max_model_len=4096, prefix_cache=False, port=9000)
    assert words[:2] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert follows(words, "--model", "org/name")
    assert follows(words, "--served-model-name", "org/name")
    assert follows(words, "--uds", "/run/engine.sock")
    assert follows(words, "--tensor-parallel-size", "2")
    assert follows(words, "--max-model-len", "4096")
    assert "--no-enable-prefix-caching" in words
    assert "9000" not in words  # the public port is ours
    assert "--max-num-seqs" not in words  # nobody gave it: its own default counts


def test_our_options_in_the_words_of_sglang(tmp_path: Path) -> None:
    words = command("sglang", tmp_path, tensor_parallel=8, memory_fraction=0.8, served_name=["kimi"])
    assert words[:2] == ["-m", "sglang.launch_server"]
    assert follows(words, "--model-path", "org/name")
    assert follows(words, "--host", "127.0.0.1", "--port", "8123", "--api-key", "secret")
    assert follows(words, "--served-model-name", "kimi")
    assert follows(words, "--tp-size", "8")
    assert follows(words, "--mem-fraction-static", "0.8")
    assert "--enable-metrics" in words


@pytest.mark.parametrize(
    ("engine", "given", "rest", "words"),
    [
        ("vllm", {"max-queue"}, (), "--max-queue is an option of the native engine; vllm has none"),
        ("sglang", {"kv-memory"}, (), "--kv-memory is an option of the native engine; sglang has none"),
        ("vllm", set(), ("--served_model_name=x",), "--served-model-name cannot stand behind the --"),
        ("sglang", set(), ("--tp", "4"), "--tp cannot stand behind the --"),
        ("sglang", {"served-name"}, (), "under one name only"),
    ],
)
def test_what_an_engine_cannot_take_is_named(
    engine: str, given: set[str], rest: tuple[str, ...], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        require_known(KINDS[engine], frozenset(given), rest, num_names=2)


def test_a_model_is_a_folder_here_or_a_name_that_the_engine_fetches(tmp_path: Path) -> None:
    backend = ForeignBackend(KINDS["vllm"], resolved())
    assert backend.find_model(str(tmp_path), Path).path == str(tmp_path)
    assert backend.find_model("org/name", Path).served_names == ("org/name",)
    with pytest.raises(ModelFileError, match="does not exist"):
        backend.find_model("./nowhere", Path)
    with pytest.raises(UsageError, match="needs to be told which model"):
        backend.find_model(None, Path)


def test_the_interpreter_that_has_the_engine_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = install_stand_in(tmp_path)
    found = find_installed("vllm", str(python))
    assert (found.version, Path(found.folder).name) == (VERSION, "vllm")
    script = tmp_path / "bin" / "vllm"
    script.parent.mkdir()
    script.write_text(f"#!{python}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    assert find_installed("vllm").python == str(python)
    with pytest.raises(UsageError, match="has no package sglang"):
        find_installed("sglang", str(python))
    with pytest.raises(UsageError, match="is not installed in any Python on PATH") as caught:
        find_installed("sglang")
    assert "--backend-python" in caught.value.hint


def test_the_log_becomes_boxes(tmp_path: Path) -> None:
    settings = resolved(tensor_parallel=2, backend_python=str(install_stand_in(tmp_path)))
    backend = ForeignBackend(KINDS["vllm"], settings)
    backend.require_servable(backend.find_model("org/name", Path))
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    make_box_folder(run_dir)
    run = config(backend, settings, run_dir)
    plan = backend.plan(run, 7, 8)
    assert [child.name for child in plan.children] == ["vllm", "api"]
    assert read_place(run_dir).uds == str(run_dir / "engine.sock")
    for box in plan.boxes:
        create_box(box_path(run_dir, box.name), role=box.role, rank=box.rank, run_id="test")
    follower = backend.follow(run)
    engine = subprocess.Popen([sys.executable, "-c", "pass"], start_new_session=True)
    follower.started("vllm", engine.pid)
    engine.wait()
    banner = "(APIServer pid=1) INFO 11-29 21:05:10 [x.py:1]  ▄▄ ▄█  version 0.32.0"
    follower.output("vllm", OutputLine(0.0, banner))
    follower.read(0.5)
    assert _phase(run_dir, "rank-1") == ("spawn", "vllm itself is in phase imports")
    for rank in (0, 1):
        text = f"(Worker_TP{rank} pid=5) INFO 11-29 21:05:10 [x.py:1] Starting to load model org/name..."
        follower.output("vllm", OutputLine(0.0, text))
    bar = "Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:01<00:00]"
    follower.output("vllm", OutputLine(0.0, bar))
    follower.output("api", OutputLine(0.0, "(Worker_TP1 pid=5) Loading weights took 3 s"))  # not its log
    lines = {line.name: line for line in follower.read(0.6)}
    assert (lines["rank-0"].done, lines["rank-0"].total, lines["rank-0"].unit) == (2, 4, "shards")
    assert _phase(run_dir, "rank-1")[0] == "weights"
    assert not follower.can_answer([])
    follower.output("vllm", OutputLine(0.0, "(Worker_TP1 pid=5) ValueError: no room"))
    follower.ended("vllm")
    words = follower.last_words("vllm")
    assert words is not None
    assert words.message == "vllm (rank 1) ended: ValueError: no room"
    assert follower.last_words("api") is None
    # An idle second is told too, so that the time in /startup goes on.
    assert {line.time_s for line in follower.read(9.0)} == {9.0}


def _phase(run_dir: Path, name: str) -> tuple[str, str]:
    phase = read_box(box_path(run_dir, name)).phase
    assert phase is not None
    return phase.name, phase.detail


def test_what_an_engine_leaves_is_ended_and_others_are_spared(tmp_path: Path) -> None:
    settings = resolved()
    run = config(ForeignBackend(KINDS["vllm"], settings), settings, tmp_path / "firstlight-test-leftovers")
    environment = {**os.environ, **run_token(run)}
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    left, spared = (subprocess.Popen(sleep, env=environment, start_new_session=True) for _ in range(2))
    stranger = subprocess.Popen(sleep)
    try:
        _until(lambda: _carries(left.pid) and _carries(spared.pid))
        assert end_leftovers("firstlight-test-leftovers", {}, (), {spared.pid}) == [left.pid]
        assert spared.poll() is None
        assert stranger.poll() is None
    finally:
        for process in (left, spared, stranger):
            process.kill()
            process.wait()
    assert ExitCause.from_returncode(spared.returncode).signal == 9


def _carries(pid: int) -> bool:
    return b"firstlight-test-leftovers" in Path(f"/proc/{pid}/environ").read_bytes()


def _until(look: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.01)
