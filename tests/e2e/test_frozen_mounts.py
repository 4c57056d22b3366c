"""A model on a mount that stops answering: every command ends, names the mount, and says what to do.

A real FUSE file system (`support.frozen_mount`), frozen at a request that its daemon has taken: who waits for
it cannot be killed until the connection is aborted.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from firstlight.base.storage import waited_for, waits_of
from support.doctor_scenes import until
from support.frozen_mount import FrozenMount, mounted
from support.ports import free_port
from support.serving import RunningServer, write_chat_gguf, write_chat_model

pytestmark = pytest.mark.needs("fuse")
COMMAND_S = 120.0
QUICK = ("--stall-look", "1", "--stall-verdict", "3")
PLACES = [
    "lookup config.json",
    "read model.safetensors 0",
    "read model.safetensors 300000",
    "open tokenizer.json",
    "read model.gguf 0",
    "read model.gguf 300000",
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Hugging Face folder and a GGUF file."""
    folder = tmp_path_factory.mktemp("models")
    write_chat_model(folder / "hf")
    write_chat_gguf(folder / "model.gguf")
    return folder


def model_on(mount: FrozenMount, place: str) -> Path:
    return mount.path / ("model.gguf" if ".gguf" in place else "hf")


def assert_names(text: str, mount: FrozenMount) -> None:
    """The verdict with mount, source and remedy."""
    assert "storage does not answer" in text, text
    assert f"{mount.path} (fuse.testfs, slowbox:/models)" in text, text
    assert f"/sys/fs/fuse/connections/{mount.number}/abort" in text, text


def firstlight(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "firstlight", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)


@pytest.mark.parametrize("place", PLACES)
def test_a_start_ends_with_the_verdict(models: Path, place: str) -> None:
    with mounted(models, place) as mount:
        server = RunningServer(model_on(mount, place), *QUICK)
        try:
            mount.wait_frozen()
            assert server.wait() in (5, 6)
            assert_names("\n".join(server.lines), mount)
        finally:
            mount.close()
            server.kill()


def test_the_port_says_what_is_waited_for_and_the_start_goes_on(models: Path) -> None:
    with mounted(models, "lookup config.json") as mount:
        port = str(free_port())
        server = RunningServer(mount.path / "hf", "--stall-verdict", "100", "--port", port)
        try:
            mount.wait_frozen()
            server.wait_for("has not answered for .* waiting for it")
            answer = httpx.get(f"http://127.0.0.1:{port}/health", timeout=COMMAND_S)
            assert answer.status_code == 503
            message = answer.json()["error"]["message"]
            assert str(mount.path / "hf" / "config.json") in message
            mount.thaw()
            server.wait_for(r"^ready in")
            assert server.stop() == 0
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("--api-key-file", "keys"),
        ("--config", "run.toml"),
        ("--tls-cert", "cert.pem"),
        ("--drafter", "draft"),
    ],
)
def test_a_file_that_a_flag_names_does_not_hold_up_the_start(models: Path, flag: str, name: str) -> None:
    with mounted(models, f"lookup {name}") as mount:
        rest = ("--tls-key", "/dev/null") if flag == "--tls-cert" else ()
        said = firstlight("serve", "--port", "0", flag, str(mount.path / name), *rest)
        assert said.returncode == 5, said.stderr
        assert_names(said.stderr, mount)


@pytest.mark.parametrize(
    "place",
    [
        "lookup config.json",
        "read model.safetensors 0",
        "read model.safetensors 300000",
        "read model.gguf 300000",
        "open tokenizer.json",
    ],
)
def test_the_doctor_and_ps_end_and_the_doctor_knows_why(models: Path, place: str) -> None:
    with mounted(models, place) as mount:
        server = RunningServer(model_on(mount, place), "--stall-look", "300", "--stall-verdict", "600")
        try:
            mount.wait_frozen()
            said = firstlight("doctor", "--pid", str(server.pid))
            assert said.returncode == 12, said.stdout + said.stderr
            assert_names(said.stdout, mount)
            assert "storage-silent" in said.stdout
            assert firstlight("ps").returncode == 0
        finally:
            mount.close()
            server.kill()


@pytest.mark.parametrize("place", ["lookup config.json", "read model.gguf 0"])
def test_plan_ends_with_the_verdict(models: Path, place: str) -> None:
    with mounted(models, place) as mount:
        said = firstlight("plan", str(model_on(mount, place)), "--gpus", "2")
        assert said.returncode == 5, said.stderr
        assert_names(said.stderr, mount)


@pytest.mark.parametrize("place", ["read model.safetensors 300000", "open tokenizer.json"])
def test_run_ends_with_the_verdict(models: Path, place: str) -> None:
    with mounted(models, place) as mount:
        said = firstlight("run", "x", "--model", str(model_on(mount, place)), "--max-tokens", "2")
        assert said.returncode == 5, said.stderr
        assert_names(said.stderr, mount)


def test_a_page_fault_is_known_by_what_is_mapped(models: Path) -> None:
    code = "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=1); m[300000]"
    with mounted(models, "read model.gguf 300000") as mount:
        path = str(mount.path / "model.gguf")
        process = subprocess.Popen([sys.executable, "-c", code, path])
        try:
            mount.wait_frozen()
            until(lambda: bool(waits_of(process.pid)))
            assert waited_for(process.pid, waits_of(process.pid)[0].tid) == path
            process.kill()
        finally:
            mount.close()
            process.wait(COMMAND_S)


def test_weights_that_come_late_are_read(models: Path) -> None:
    with mounted(models, "read model.safetensors 300000") as mount:
        server = RunningServer(mount.path / "hf")
        try:
            mount.wait_frozen()
            mount.thaw()
            server.wait_for(r"^ready in")
            assert server.stop() == 0
        finally:
            server.kill()


def test_a_mount_that_answers_is_no_matter(models: Path) -> None:
    with mounted(models, "never") as mount:
        said = firstlight("run", "x", "--model", str(mount.path / "hf"), "--max-tokens", "2")
        assert said.returncode == 0, said.stderr
