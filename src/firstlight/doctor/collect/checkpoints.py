"""Whether the checkpoints that the server names are all there, as far as headers and sizes can tell.

Only headers are read, so half a terabyte takes a moment. Invariant: every problem of a folder is reported,
not only the first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from firstlight.base.errors import ModelFileError, UnsupportedError
from firstlight.doctor.case.evidence import Observation
from firstlight.doctor.case.target import RUN
from firstlight.doctor.case.values_host import CheckpointFiles, FileProblem
from firstlight.doctor.collect.scene import Collector, Scene
from firstlight.doctor.servers.identity import option
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.facts.checkpoint.safetensors_header import read_safetensors_header
from firstlight.facts.hf.hf_checkpoint import INDEX_FILE

MAX_FILES = 1000
_DRAFT_OPTIONS = ("--speculative-draft-model-path", "--speculative-model", "--drafter")
_KINDS = (
    ("lfs", "lfs-pointer"),
    ("truncated", "truncated"),
    ("became shorter", "truncated"),
    ("cannot be read", "unreadable"),
    ("does not exist", "missing"),
    ("missing", "missing"),
)


def collect_checkpoints(scene: Scene) -> Iterator[Observation]:
    """The model, and the drafter where one is named."""
    for name in _named(scene):
        path = locate(name, _hub_folders(scene))
        if path is not None:
            yield Observation(subject=RUN, source=str(path), value=check(path))


def check(path: Path) -> CheckpointFiles:
    """All problems of one file or folder."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))[:MAX_FILES]
    problems = list(_problems_of_file(path)) if path.is_file() else list(_problems_of_folder(path, files))
    total = 0
    for file in files:
        with contextlib.suppress(OSError):
            total += file.stat().st_size
    return CheckpointFiles(path=str(path), num_files=len(files), total_bytes=total, problems=tuple(problems))


def _problems_of_file(path: Path) -> Iterator[FileProblem]:
    try:
        if path.suffix == ".safetensors":
            read_safetensors_header(path)
        else:
            open_checkpoint(path)
    except ModelFileError as error:
        yield _problem(path, error)
    except UnsupportedError:
        pass  # whole, though not for our own engine


def _problems_of_folder(folder: Path, files: list[Path]) -> Iterator[FileProblem]:
    for path in files:
        yield from _problems_of_file(path)
    names = {path.name for path in files}
    for shard in sorted(_indexed(folder) - names):
        detail = f"{INDEX_FILE} names it"
        yield FileProblem(kind="missing", path=str(folder / shard), detail=detail)
    yield from _pointers(folder)
    for path in _partial_downloads(folder):
        yield FileProblem(kind="incomplete", path=str(path), detail="a download that did not end")


def _indexed(folder: Path) -> set[str]:
    """The shards that the index names; none without an index, or with one that cannot be read."""
    try:
        index: Any = msgspec.json.decode((folder / INDEX_FILE).read_bytes())
        return {shard for shard in index["weight_map"].values() if isinstance(shard, str)}
    except (OSError, msgspec.DecodeError, LookupError, TypeError, AttributeError):
        return set()


def _pointers(folder: Path) -> Iterator[FileProblem]:
    """Small files beside the shards that git-lfs left as pointers (tokenizers, mostly)."""
    for path in sorted((*folder.glob("*.json"), *folder.glob("*.model"), *folder.glob("*.bin"))):
        with contextlib.suppress(OSError):
            if path.stat().st_size < 1024 and path.read_bytes().startswith(b"version https://git-lfs"):
                yield FileProblem(
                    kind="lfs-pointer", path=str(path), detail="a pointer of git-lfs, not the file"
                )


def _partial_downloads(folder: Path) -> list[Path]:
    found = [*folder.glob("*.incomplete"), *folder.glob(".cache/huggingface/download/*.incomplete")]
    if folder.parent.name == "snapshots":
        found += folder.parent.parent.glob("blobs/*.incomplete")
    return sorted(found)


def _problem(path: Path, error: ModelFileError) -> FileProblem:
    text = str(error)
    kind = next((kind for word, kind in _KINDS if word in text.lower()), "damaged")
    return FileProblem(kind=kind, path=str(path), detail=text[:500])


def _named(scene: Scene) -> list[str]:
    named = [scene.target.model]
    for process in scene.target.processes:
        named.append(option(process.command, _DRAFT_OPTIONS))
        config = option(process.command, ("--speculative-config",))
        with contextlib.suppress(msgspec.DecodeError, AttributeError):
            named.append(msgspec.json.decode(config).get("model") if config else None)
    return [str(name) for name in dict.fromkeys(named) if name]


def locate(name: str, hubs: list[Path]) -> Path | None:
    """A path as it is, or the newest snapshot of a hub name; None when neither is on this machine."""
    path = Path(os.path.expanduser(name))
    if path.exists():
        return path
    for hub in hubs:
        snapshots = hub / f"models--{name.replace('/', '--')}" / "snapshots"
        with contextlib.suppress(OSError):
            found = sorted(snapshots.iterdir(), key=lambda folder: folder.stat().st_mtime)
            if found:
                return found[-1]
    return None


def _hub_folders(scene: Scene) -> list[Path]:
    found: dict[Path, None] = {}
    for process in scene.target.processes:
        with contextlib.suppress(OSError):
            variables = scene.procfs.environ(process.pid)
            home = variables.get("HF_HOME") or f"{variables.get('HOME', '')}/.cache/huggingface"
            found[Path(variables.get("HF_HUB_CACHE") or f"{home}/hub")] = None
    return list(found)


CHECKPOINTS = Collector("checkpoint", collect_checkpoints, deadline_s=8.0, is_dynamic=False)
