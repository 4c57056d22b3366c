"""The folder of a drafter run, and the manifest that every stage keeps in it.

A manifest says what a stage was made from (settings, target, the stages before it) and which files it
finished; a stage that is started again goes on from there. Invariant: a stage never mixes what was made with
different settings or targets, and a file that its manifest names is whole.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from firstlight import __version__
from firstlight.base.errors import ModelFileError, UsageError
from firstlight.base.files import replacing, sha256_of

MANIFEST = "manifest.json"


class TargetRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Which model it is about, by content: a file may move, but it must not change."""

    name: str
    weights_sha256: str
    tokenizer_sha256: str
    chat_template_sha256: str


class Manifest(msgspec.Struct, kw_only=True):
    """What a stage was made from and what it finished. `inputs` are hashes of earlier stages' files."""

    stage: str
    settings: dict[str, Any]
    inputs: dict[str, str]
    target: TargetRecord | None = None
    versions: dict[str, str] = {}
    files: dict[str, str] = {}  # name -> SHA-256
    numbers: dict[str, Any] = {}
    complete: bool = False


class Stage:
    """One stage's folder. Made by `open_stage`; `finish_file` and `finish` write the manifest anew."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest

    def has(self, name: str) -> bool:
        """Whether the file was finished and still has its size on the disk."""
        return name in self.manifest.files and (self.folder / name).is_file()

    def finish_file(self, name: str, numbers: Mapping[str, Any] | None = None) -> None:
        """Records a file that now lies in the folder; `numbers` are added to the manifest's."""
        self.manifest.files[name] = sha256_of(self.folder / name)
        self.manifest.numbers.update(numbers or {})
        self._write()

    def note(self, numbers: Mapping[str, Any]) -> None:
        """Adds numbers; whether the stage is complete stays as it was before it was opened."""
        self.manifest.numbers.update(numbers)
        self.manifest.complete = read_manifest(self.folder).complete
        self._write()

    def finish(self, numbers: Mapping[str, Any] | None = None) -> None:
        """Records that the stage has all that it was asked for."""
        self.manifest.numbers.update(numbers or {})
        self.manifest.complete = True
        self._write()

    def _write(self) -> None:
        with replacing(self.folder / MANIFEST) as file:
            file.write(msgspec.json.format(msgspec.json.encode(self.manifest), indent=1))


def open_stage(
    folder: Path,
    stage: str,
    settings: Mapping[str, Any],
    inputs: Mapping[str, str],
    target: TargetRecord | None,
    defaults: Mapping[str, Any] | None = None,
) -> Stage:
    """A stage to begin or to go on with. `defaults`: of settings that an older manifest does not know.

    Raises `UsageError` where the folder holds the work of other settings, inputs or another target.
    """
    wanted = Manifest(
        stage=stage, settings=dict(settings), inputs=dict(inputs), target=target, versions=versions()
    )
    if (folder / MANIFEST).exists():
        found = read_manifest(folder)
        found.settings = {**(defaults or {}), **found.settings}
        _require_same(folder, found, wanted)
        found.complete = False
        return Stage(folder, found)
    return Stage(folder, wanted)


def is_finished(folder: Path, settings: Mapping[str, Any], inputs: Mapping[str, str]) -> bool:
    """Whether a stage has all that it was asked for, with these settings and of these inputs."""
    if not (folder / MANIFEST).exists():
        return False
    found = read_manifest(folder)
    asked = msgspec.json.decode(msgspec.json.encode(settings))
    is_same = (found.settings, found.inputs) == (asked, dict(inputs))
    return found.complete and is_same and all((folder / name).is_file() for name in found.files)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a stage. Raises `UsageError` if it did not run, `ModelFileError` if it is damaged."""
    path = folder / MANIFEST
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError as error:
        raise UsageError(
            f"{folder} has no {MANIFEST}: the stage {folder.name!r} has not run.",
            f"Run it first: firstlight drafter {folder.name} --out {folder.parent}, with the same --target.",
        ) from error
    except (OSError, msgspec.DecodeError) as error:
        raise ModelFileError(
            f"{path} cannot be read: {error}.", f"Remove {folder} and run the stage again."
        ) from error


def require_target(manifest: Manifest, target: TargetRecord, where: Path) -> None:
    """Raises `ModelFileError` where a stage was made with another target than the one that is open now."""
    if manifest.target is None or manifest.target == target:
        return
    changed = [
        field.removesuffix("_sha256").replace("_", " ")
        for field in target.__struct_fields__
        if field != "name" and getattr(manifest.target, field) != getattr(target, field)
    ]
    if changed:
        raise ModelFileError(
            f"{where} was made with another target: {' and '.join(changed)} differ from {target.name}.",
            "Use the model it was made with, or run the stages again in a new folder.",
        )


def require_recorded(path: Path) -> None:
    """Raises `ModelFileError` where a file is not what its stage finished: changed, or damaged on the disk.

    A file that no manifest beside it names is nobody's, and is let through.
    """
    if not (path.parent / MANIFEST).exists():
        return
    digest = read_manifest(path.parent).files.get(path.name)
    if digest is not None and path.is_file() and sha256_of(path) != digest:
        raise ModelFileError(
            f"{path} is damaged or was changed: its content is not what the stage {path.parent.name!r} "
            "wrote.",
            f"Remove {path.name} and run the stage again: it makes only what is missing.",
        )


def versions() -> dict[str, str]:
    """What software made a stage."""
    return {"firstlight": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def _require_same(folder: Path, found: Manifest, wanted: Manifest) -> None:
    if wanted.target is not None:
        require_target(found, wanted.target, folder)
    as_stored = msgspec.json.decode(msgspec.json.encode(wanted.settings))
    names = sorted(found.settings.keys() | as_stored.keys())
    changed = [name for name in names if found.settings.get(name) != as_stored.get(name)]
    if changed:
        name = changed[0]
        raise UsageError(
            f"{folder} was begun with {name} = {found.settings.get(name)!r}, and now it is "
            f"{as_stored.get(name)!r}.",
            "Give the same settings to go on, or name another --out folder to begin anew.",
        )
    for name, digest in found.inputs.items():
        if wanted.inputs.get(name, digest) != digest:
            raise UsageError(
                f"{folder} was made from another {name}.",
                f"Remove {folder} to make it anew, or restore that file.",
            )
