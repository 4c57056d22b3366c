"""Finding servers: recorded process tables of three engines, orphans and zombies, and real listeners."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from firstlight.base.errors import UsageError
from firstlight.doctor.case.target import Engine, Role
from firstlight.doctor.servers.discover import (
    find_targets,
    target_below,
    target_of_pid,
    target_of_run,
    target_of_url,
)
from firstlight.doctor.servers.procfs import ProcFs
from support.doctor_scenes import child, in_state, recorded, tree, until

PYTHON = "/usr/bin/python3"
SPAWN = (PYTHON, "-c", "from multiprocessing.spawn import spawn_main; spawn_main()")
TRACKER = (PYTHON, "-c", "from multiprocessing.resource_tracker import main; main(9)")


def proc(root: Path, *processes: dict[str, str]) -> ProcFs:
    files = {name: text for files in processes for name, text in files.items()}
    return ProcFs(tree(root, {"stat": "cpu 1\nbtime 1700000000\n", **files}))


def test_sglang_with_a_zombie_and_a_missing_rank(tmp_path: Path) -> None:
    command = (PYTHON, "-m", "sglang.launch_server", "--model-path", "org/m", "--tp", "4", "--api-key", "abc")
    procfs = proc(
        tmp_path,
        recorded(9, ("bash",), "bash"),
        recorded(10, command, "python3", parent=9, session="9"),
        recorded(11, TRACKER, "python3", parent=10, session="9"),
        recorded(12, ("sglang::scheduler_TP0",), "sglang::schedul", parent=10, session="9"),
        recorded(13, ("sglang::scheduler_TP2",), "sglang::schedul", parent=10, session="9"),
        recorded(14, (), "sglang::schedul", parent=10, session="9", state="Z"),
        recorded(20, ("vi", "sglang::scheduler_TP0"), "vi", parent=9, session="9"),
    )
    (found,) = find_targets(procfs)
    assert (found.engine, found.expected_ranks, found.model) == (Engine.SGLANG, 4, "org/m")
    assert [process.key for process in found.processes] == [
        "api",
        "rank-0",
        "rank-2",
        "rank-unknown-14",
        "helper-11",
    ]
    assert found.addresses == (("127.0.0.1", 30000),)
    assert found.started_wall_s == pytest.approx(1700000000 + 1010 / os.sysconf("SC_CLK_TCK"))
    assert "abc" not in str(found)


def test_vllm_with_workers_and_one_that_has_no_title_yet(tmp_path: Path) -> None:
    procfs = proc(
        tmp_path,
        recorded(10, ("/opt/bin/vllm", "serve", "org/m", "-tp", "2"), "vllm"),
        recorded(11, ("VLLM::EngineCore",), "VLLM::EngineCor", parent=10),
        recorded(12, ("VLLM::Worker_TP0",), "VLLM::Worker_TP", parent=11),
        recorded(13, SPAWN, "python3", parent=11, environ="LOCAL_RANK=1\0"),
    )
    (found,) = find_targets(procfs)
    assert [(p.key, p.role) for p in found.processes] == [
        ("api", Role.API),
        ("engine", Role.ENGINE),
        ("rank-0", Role.RANK),
        ("rank-1", Role.RANK),
    ]
    assert found == target_of_pid(13, procfs)


def test_vllm_with_one_rank_keeps_the_model_in_its_engine_core(tmp_path: Path) -> None:
    procfs = proc(
        tmp_path,
        recorded(10, ("/opt/bin/vllm", "serve", "org/m"), "vllm"),
        recorded(11, ("VLLM::EngineCore",), "VLLM::EngineCor", parent=10),
    )
    (found,) = find_targets(procfs)
    assert [process.key for process in found.processes] == ["api", "rank-0"]
    assert found.expected_ranks == 1


def test_orphans_of_one_session_are_one_server_and_promise_nothing(tmp_path: Path) -> None:
    procfs = proc(
        tmp_path,
        recorded(12, ("sglang::scheduler_TP0",), "sglang::schedul", session="7"),
        recorded(13, ("sglang::scheduler_TP1",), "sglang::schedul", session="7"),
    )
    (found,) = find_targets(procfs)
    assert [process.key for process in found.processes] == ["rank-0", "rank-1"]
    assert found.expected_ranks is None


def test_two_servers_are_two_targets(tmp_path: Path) -> None:
    procfs = proc(
        tmp_path,
        recorded(10, ("/opt/bin/vllm", "serve", "a"), "vllm"),
        recorded(20, ("/opt/bin/vllm", "serve", "b", "--port", "8001"), "vllm"),
    )
    assert [found.model for found in find_targets(procfs)] == ["a", "b"]


def test_a_native_run_by_its_directory(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = {
        "model": {"path": "m.gguf"},
        "engine": {"tensor_parallel": 2},
        "server": {"host": "0.0.0.0", "port": 9001},
    }
    tree(run_dir, {"config.json": json.dumps(config)})
    rank = (PYTHON, "-P", "-m", "firstlight.engine.rank", "--run-dir", str(run_dir), "--rank")
    procfs = proc(
        tmp_path / "proc",
        recorded(10, (PYTHON, "-m", "firstlight", "serve", "m.gguf"), "firstlight"),
        recorded(11, (*rank, "0"), "python3", parent=10),
        recorded(12, (*rank, "1"), "python3", parent=10),
    )
    found = target_of_run(run_dir, procfs)
    assert [process.key for process in found.processes] == ["supervisor", "rank-0", "rank-1"]
    assert (found.expected_ranks, found.model) == (2, "m.gguf")
    assert found.addresses == (("127.0.0.1", 9001),)
    assert find_targets(procfs)[0] == found
    dead = target_of_run(run_dir, proc(tmp_path / "empty"))
    assert (dead.processes, dead.expected_ranks, dead.engine) == ((), 2, Engine.NATIVE)


def test_what_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no process 77"):
        target_of_pid(77, proc(tmp_path))
    with pytest.raises(UsageError, match="no run directory"):
        target_of_run(tmp_path / "absent")
    with pytest.raises(UsageError, match="no address"):
        target_of_url("http://")


def test_a_real_title_and_a_real_listener() -> None:
    with subprocess.Popen(["bash", "-c", "exec -a sglang::scheduler_TP1 sleep 60"]) as process:
        try:
            until(lambda: ProcFs().cmdline(process.pid)[:1] == ("sglang::scheduler_TP1",))
            keys = [p.key for found in find_targets() for p in found.processes if p.pid == process.pid]
            assert keys == ["rank-1"]
        finally:
            process.kill()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = target_of_url(f"http://localhost:{port}")
        assert os.getpid() in [process.pid for process in found.processes]
    gone = target_of_url(f"127.0.0.1:{port}")
    assert gone.processes == ()
    assert "listens on port" in gone.notes[0]


def test_ranks_of_any_program_by_their_environment() -> None:
    code = (
        "import os, subprocess, sys\n"
        "for rank in '01':\n"
        "    subprocess.Popen(['sleep', '60'], env={**os.environ, 'RANK': rank})\n"
        "print('up', flush=True)\nsys.stdin.read()"
    )
    with child(code, ready="up") as process:
        until(lambda: len(target_of_pid(process.pid).ranks) == 2)
        found = target_of_pid(process.pid)
        assert [rank.key for rank in found.ranks] == ["rank-0", "rank-1"]
        until(in_state(process.pid, "S"))


def test_a_fork_that_has_not_run_its_program_yet_is_no_second_server(tmp_path: Path) -> None:
    command = (PYTHON, "-m", "firstlight", "serve", "org/m")
    procfs = proc(
        tmp_path,
        recorded(10, command, "firstlight"),
        recorded(11, (PYTHON, "-m", "firstlight.engine.rank", "--rank", "0"), "python3", parent=10),
        recorded(12, command, "firstlight", parent=10),
        recorded(20, ("VLLM::EngineCore",), "VLLM::EngineCor"),
        recorded(21, ("VLLM::EngineCore",), "VLLM::EngineCor", parent=20),
    )
    ours, foreign = find_targets(procfs)
    assert [process.key for process in ours.processes] == ["supervisor", "rank-0", "helper-12"]
    assert [process.role for process in foreign.processes] == [Role.ENGINE, Role.HELPER]


def test_who_starts_a_server_or_speaks_to_one_elsewhere_is_none(tmp_path: Path) -> None:
    procfs = proc(
        tmp_path,
        recorded(10, ("tmux", "new", "-d", "firstlight", "serve", "m"), "tmux: server"),
        recorded(11, ("vi", "notes"), "vi", parent=10),
        recorded(12, (PYTHON, "/opt/bin/firstlight", "serve", "m"), "firstlight", parent=10),
        recorded(20, ("ssh", "box", "vllm", "serve", "org/m"), "ssh"),
    )
    (found,) = find_targets(procfs)
    assert [process.pid for process in found.processes] == [12]


def test_what_a_process_started_has_nothing_above_it(tmp_path: Path) -> None:
    mine, other = "FIRSTLIGHT_RUN_ID=firstlight-a\0", "FIRSTLIGHT_RUN_ID=firstlight-b\0"
    procfs = proc(
        tmp_path,
        recorded(9, ("firstlight", "serve", "--backend", "vllm"), "wrapper"),
        recorded(10, (PYTHON, "-m", "firstlight", "serve"), "firstlight", parent=9),
        recorded(11, (PYTHON, "-m", "vllm.entrypoints.openai.api_server"), "python3", parent=10),
        recorded(12, ("VLLM::EngineCore",), "VLLM::EngineCor", parent=11),
        recorded(13, ("VLLM::Worker_TP0",), "VLLM::Worker_TP", parent=10, environ=mine),  # adopted
        recorded(14, ("VLLM::Worker_TP1",), "VLLM::Worker_TP", parent=1, environ=mine),
        recorded(15, ("VLLM::Worker_TP0",), "VLLM::Worker_TP", parent=1, environ=other),
        recorded(16, ("sleep", "9"), "sleep", parent=10),
    )
    found = target_below(11, "firstlight-a", procfs)
    assert sorted(process.pid for process in found.processes) == [11, 12, 13, 14]
