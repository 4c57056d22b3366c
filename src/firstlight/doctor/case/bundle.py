"""Evidence bundles: the cases of an examination in one file, to be judged again anywhere.

Written and read by the cli. A bundle is gzip around one JSON object with a name and a version. Invariants:
every string of it was redacted, and user names in paths are gone; whatever a stranger's file holds, reading
it takes bounded memory, runs nothing and touches no process; a file that exists is never written over.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from firstlight.base.errors import ModelFileError, ResourceError, UsageError
from firstlight.doctor.case.evidence import Case
from firstlight.doctor.case.redact import HIDDEN, hide_in_command, hide_in_text, is_secret_name
from firstlight.doctor.case.values_process import Environment

FORMAT, VERSION = "firstlight-doctor-bundle", 1
MAX_FILE_BYTES = 32 * 2**20
MAX_JSON_BYTES = 256 * 2**20
_MAX_CASES = 64
_CHUNK_BYTES = 1 << 16
_MAGIC = b"\x1f\x8b"
_NEW_BUNDLE = "Write one with `firstlight doctor --bundle FILE`."
_HOME = re.compile(r"(?<![\w.-])(?:(?:/[\w.+-]+)*?/(?:home|Users)/[^/\s\"'\\,;:)\]}]+|/root(?![\w.-]))")
_SERVICE_NAMES = frozenset(("root", "ubuntu", "user", "app", "runner", "nobody", "node", "docker"))


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """What the file holds."""

    format: str
    version: int
    cases: tuple[Case, ...]


class _Header(msgspec.Struct):
    """The part that every version has."""

    format: str
    version: int


def write_bundle(path: Path, cases: Sequence[Case]) -> int:
    """Write redacted cases into a new file for our user's eyes only; its size in bytes."""
    bundle = Bundle(format=FORMAT, version=VERSION, cases=tuple(cases))
    data = gzip.compress(msgspec.json.encode(bundle), mtime=0)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise UsageError(f"{path} exists already.", "Give the bundle another name.") from error
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", "Name a file in a folder that you can write to."
        ) from error
    try:
        with open(fd, "wb") as file:
            file.write(data)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ResourceError(f"cannot write {path}: {error.strerror}", "Free some space there.") from error
    return len(data)


def read_bundle(path: Path) -> tuple[Case, ...]:
    """The cases of a bundle. Raises `UsageError` when it is none, `ModelFileError` when it is damaged."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", "Name a bundle.") from error
    if not data.startswith(_MAGIC):
        raise UsageError(f"{path} is no evidence bundle.", _NEW_BUNDLE)
    if len(data) > MAX_FILE_BYTES:
        raise ModelFileError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB.", _NEW_BUNDLE)
    return _decode(path, _unpacked(path, data))


def redact_case(case: Case) -> Case:
    """A case that may be given away: no secret, and no user's name in a path."""
    homes = _Homes(case)
    redacted = _redact(case, homes)
    assert isinstance(redacted, Case)
    return redacted


def _unpacked(path: Path, data: bytes) -> bytes:
    parts, size_bytes = [], 0
    try:
        with gzip.open(io.BytesIO(data)) as file:
            while chunk := file.read(_CHUNK_BYTES):
                size_bytes += len(chunk)
                if size_bytes > MAX_JSON_BYTES:
                    raise ModelFileError(
                        f"{path} unpacks to more than {MAX_JSON_BYTES >> 20} MiB.", "Do not trust this file."
                    )
                parts.append(chunk)
    except (OSError, EOFError, zlib.error) as error:
        raise ModelFileError(
            f"{path} is damaged: {error}", "Copy it again; it was cut or changed."
        ) from error
    return b"".join(parts)


def _decode(path: Path, text: bytes) -> tuple[Case, ...]:
    try:
        header = msgspec.json.decode(text, type=_Header)
        if header.format != FORMAT:
            raise UsageError(f"{path} is no evidence bundle.", _NEW_BUNDLE)
        if header.version != VERSION:
            raise UsageError(
                f"{path} is a bundle of version {header.version}; this firstlight reads version {VERSION}.",
                "Replay it with the firstlight that made it, or a newer one.",
            )
        cases = msgspec.json.decode(text, type=Bundle).cases
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{path} holds no case: {error}", "Ask for a new bundle.") from error
    if not 0 < len(cases) <= _MAX_CASES:
        raise ModelFileError(f"{path} holds {len(cases)} cases.", "Ask for a new bundle.")
    return cases


class _Homes:
    """The home folders of a case, and the names of their owners, each with what stands for it."""

    def __init__(self, case: Case) -> None:
        text = msgspec.json.encode(case).decode()
        found = dict.fromkeys(match[0] for match in _HOME.finditer(text))
        for seen in case.all(Environment):
            home = seen.value.variables.get("HOME", "")
            if home.count("/") > 1 or home.startswith("/root"):
                found.setdefault(home.rstrip("/"))
        with contextlib.suppress(RuntimeError):
            if str(Path.home()) in text:
                found.setdefault(str(Path.home()))
        longest_first = sorted(found, key=len, reverse=True)
        stands = {home: "~" if not index else f"~{index + 1}" for index, home in enumerate(found)}
        self._homes = {home: stands[home] for home in longest_first}
        names = {home.rpartition("/")[2]: stands[home] for home in found}
        self._names = {
            name: mark for name, mark in names.items() if name not in _SERVICE_NAMES and len(name) > 2
        }
        ends = r"(?![\w.-])"
        homes = "|".join(map(re.escape, self._homes))
        self._paths = re.compile(f"(?<![\\w.-])(?:{homes}){ends}") if homes else None
        owners = "|".join(map(re.escape, self._names))
        # A user's folder elsewhere: a name right after a folder that machines give to users.
        folders = r"/(?:scratch|data|mnt|nfs|tmp|var/tmp|users|u|media|run/media|lustre|gpfs)(?:/[\w.-]+)?/"
        self._owners = re.compile(f"(?<![\\w.-])({folders})({owners}){ends}") if owners else None

    def hide(self, text: str) -> str:
        """Without home folders and their owners' names."""
        if self._paths is not None:
            text = self._paths.sub(lambda match: self._homes[match[0]], text)
        if self._owners is not None:
            text = self._owners.sub(lambda match: f"{match[1]}{self._names[match[2]]}", text)
        return text


def _redact(value: Any, homes: _Homes) -> Any:
    """The same value with every string of it redacted, whatever it is nested in."""
    if isinstance(value, str):
        return homes.hide(hide_in_text(value))
    if isinstance(value, msgspec.Struct):
        fields = {name: _field(name, getattr(value, name), homes) for name in value.__struct_fields__}
        return msgspec.structs.replace(value, **fields)
    if isinstance(value, dict):
        return {_redact(key, homes): _entry(key, item, homes) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_redact(item, homes) for item in value)
    return value


def _field(name: str, value: Any, homes: _Homes) -> Any:
    """A command line is known by its name: its secrets stand in the word after the option's."""
    if name == "command" and isinstance(value, tuple):
        return tuple(homes.hide(word) for word in hide_in_command(value))
    if name == "lines" and isinstance(value, tuple):
        return tuple(_redact("\n".join(value), homes).split("\n")) if value else value
    return _redact(value, homes)


def _entry(key: Any, value: Any, homes: _Homes) -> Any:
    is_secret = isinstance(key, str) and isinstance(value, str) and is_secret_name(key)
    return HIDDEN if is_secret else _redact(value, homes)
