"""What is understood of a command line before anything is imported, and that nothing is."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from firstlight.base.settings import ALL_SETTINGS
from firstlight.cli import first_answer
from firstlight.cli.first_answer import SWITCHES, VALUE_FLAGS, Doubt, open_for, understand
from firstlight.launch.public.early_socket import Address

LISTENS = """
from firstlight.cli.first_answer import open_for
early = open_for(["model.gguf", "--port=0", "--api-key", "secret", "--config", sys.argv[1]])
assert early is not None
ours = {"firstlight"} | sys.stdlib_module_names | set(sys.builtin_module_names)
loaded = {name.partition(".")[0] for name in sys.modules if not name.startswith("__")}
early.close()
print(sorted(loaded - ours))
"""


@pytest.fixture(autouse=True)
def no_keys_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FIRSTLIGHT_API_KEY", raising=False)
    monkeypatch.setattr(first_answer, "_early", None)


def test_when_it_listens_only_the_standard_library_is_loaded(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('host = "127.0.0.1"\n')
    # -S: what an environment loads by itself at every start of Python (*.pth) is not ours.
    source = Path(first_answer.__file__).parents[2]
    script = f"import sys; sys.path.insert(0, {str(source)!r})\n{LISTENS}"
    done = subprocess.run(
        [sys.executable, "-S", "-c", script, str(config)], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_flags_are_those_of_the_settings() -> None:
    own = {"config", "api-key", "api-key-file"}
    of_values = {setting.name for setting in ALL_SETTINGS if setting.type is not bool}
    assert of_values | own == VALUE_FLAGS
    switches = {setting.name for setting in ALL_SETTINGS if setting.type is bool}
    assert switches | {f"no-{name}" for name in switches} | {"debug"} == SWITCHES


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], Address()),
        (["model.gguf", "--port", "9000"], Address(port=9000)),
        (["--port=9000", "--port", "0", "--debug", "--no-prefix-cache", "m"], Address(port=0)),
        (["--served-name", "--port", "--host", "::1"], Address(host="::1")),
        (["--uds", "a.sock"], Address(uds="a.sock")),
        (["--tls-cert", "c", "--tls-key=k"], Address(tls_cert="c", tls_key="k")),
    ],
)
def test_what_is_plain_is_understood(arguments: Sequence[str], expected: Address) -> None:
    assert understand(arguments) == (expected, ())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["-h"],
        ["--prot", "9000"],
        ["--port"],
        ["--port", "x"],
        ["--port", "65536"],
        ["--port="],
        ["--debug=1"],
        ["--", "--port"],
        ["one", "two"],
        ["--tls-cert", "c"],
        ["--uds", "a.sock", "--port", "1"],
    ],
)
def test_what_is_not_plain_is_a_doubt(arguments: Sequence[str]) -> None:
    with pytest.raises(Doubt):
        understand(arguments)


def test_the_file_and_the_environment_count_as_for_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, keys = tmp_path / "run.toml", tmp_path / "keys.txt"
    keys.write_text("# mine\nfrom-file\n")
    config.write_text(f'port = 9000\n[server]\nhost = "::1"\napi-key = "a"\napi-key-file = "{keys}"\n')
    monkeypatch.setenv("FIRSTLIGHT_API_KEY", "a,z")
    expected = Address(host="::1", port=9001), ("a", "from-file", "z")
    assert understand(["--config", str(config), "--port", "9001"]) == expected
    assert understand([f"--config={config}", "--api-key", "b"])[1] == ("b", "from-file", "a", "z")


@pytest.mark.parametrize("text", ["port = ", "port = true", "host = 3", "tls-cert = 'x'", "api-key = 1"])
def test_a_file_with_a_bad_value_opens_nothing(tmp_path: Path, text: str) -> None:
    config = tmp_path / "run.toml"
    config.write_text(text)
    assert open_for(["--config", str(config)]) is None


def test_it_answers_and_asks_for_the_key() -> None:
    early = open_for(["--port", "0", "--api-key", "secret"])
    assert early is not None
    assert first_answer.early() is early
    try:
        url = f"http://127.0.0.1:{early.listener.getsockname()[1]}"
        assert httpx.get(f"{url}/v1/models").status_code == 401
        answer = httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer secret"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert early.suits(Address(port=0), ("secret",))
        assert not early.suits(Address(port=0), ())
        assert not early.suits(Address(port=1), ("secret",))
    finally:
        early.close()
        early.close()


def test_a_port_that_is_taken_is_left_to_the_ordinary_path() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert open_for(["--port", str(other.getsockname()[1])]) is None


def test_a_unix_socket_is_removed_at_the_end(tmp_path: Path) -> None:
    early = open_for(["--uds", str(tmp_path / "a.sock")])
    assert early is not None
    assert (tmp_path / "a.sock").exists()
    early.close()
    assert not (tmp_path / "a.sock").exists()
