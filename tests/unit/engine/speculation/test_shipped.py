"""The drafter that comes with the package: for the embedded model's very weights, wherever they lie."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import msgspec
import pytest

from firstlight.base import files
from firstlight.base.config import EngineSection
from firstlight.engine.speculation import shipped
from firstlight.engine.speculation.shipped import NAME, TARGET, served_sha256, with_shipped_drafter
from firstlight.facts.checkpoint.checkpoint import Checkpoint, open_checkpoint
from support.checkpoints import random_weights, tiny_description, write_gguf, write_hf_folder

USED = "the one that comes with the package"
DESCRIPTION = tiny_description(tie_embeddings=True)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for the embedded model."""
    path = write_gguf(tmp_path / "default.gguf", DESCRIPTION, random_weights(DESCRIPTION))
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / "cache"))
    d = DESCRIPTION
    monkeypatch.setattr(shipped, "DEFAULT_BYTES", path.stat().st_size)
    monkeypatch.setattr(shipped, "DEFAULT_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(shipped, "DEFAULT_SHAPE", (d.num_layers, d.hidden_size, d.vocab_size))
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> Path:
    path = tmp_path / NAME
    path.mkdir()
    monkeypatch.setattr(shipped, "find", lambda: path)
    made_for(path, served_sha256())
    return path


def made_for(folder: Path, weights_sha256: str) -> None:
    record = {
        "name": "x",
        "weights_sha256": weights_sha256,
        "tokenizer_sha256": "",
        "chat_template_sha256": "",
    }
    (folder / TARGET).write_bytes(msgspec.json.encode(record))


def asked(path: Path) -> tuple[EngineSection, str | None]:
    return with_shipped_drafter(EngineSection(), open_checkpoint(path))


def moved(model: Path, how: str) -> Path:
    """The same bytes at another place."""
    other = model.with_name("elsewhere") / "my model.gguf"
    other.parent.mkdir()
    if how == "copy":
        shutil.copyfile(model, other)
    elif how == "symlink":
        other.symlink_to(model)
    elif how == "hard link":
        other.hardlink_to(model)
    else:
        model.replace(other)
    return other


@pytest.mark.parametrize("how", ["copy", "symlink", "hard link", "renamed"])
def test_it_is_used_for_these_bytes_at_whatever_place(model: Path, folder: Path, how: str) -> None:
    assert asked(model)[0].drafter == str(folder)
    section, note = asked(moved(model, how))
    assert (section.drafter, note) == (str(folder), USED)


def test_the_second_start_reads_no_weights(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(model)
    monkeypatch.setattr(files, "sha256_of", lambda path: pytest.fail("it was read again"))
    assert asked(model)[1] == USED


def test_only_a_file_of_that_size_is_read(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "sha256_of", lambda path: pytest.fail("it was read"))
    path = model.with_name("another.gguf")
    other = tiny_description(tie_embeddings=True, num_layers=3)
    write_gguf(path, other, random_weights(other))
    assert asked(path) == (EngineSection(), None)  # nothing suggests that it could be the one


@pytest.mark.parametrize("where", ["at its place", "elsewhere"])
def test_other_bytes_of_the_same_size_are_left_alone_and_it_is_said(
    model: Path, folder: Path, where: str
) -> None:
    path = model if where == "at its place" else moved(model, "copy")
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    section, note = asked(path)
    assert section.drafter is None
    assert note is not None
    assert "SmolLM2-135M-Instruct and other bytes" in note
    assert f"--drafter {folder} uses it all the same" in note


def test_the_same_model_in_another_format_is_told_of_it(model: Path, folder: Path) -> None:
    path = write_hf_folder(model.with_name("converted"), DESCRIPTION, random_weights(DESCRIPTION))
    section, note = asked(path)
    assert section.drafter is None
    assert note is not None
    assert "other bytes than" in note


def test_a_file_that_cannot_be_read_is_no_reason_to_fail(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, memory: Path) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(shipped, "known_sha256", fail)
    section, note = asked(model)
    assert section.drafter is None
    assert note is not None
    assert "it cannot be told whether this is SmolLM2-135M-Instruct: Input/output error" in note


@pytest.mark.parametrize("changes", [{"drafter": "none"}, {"drafter": "ngram"}, {"device": "cuda"}])
def test_it_is_not_used_where_something_else_was_asked(
    model: Path, folder: Path, changes: dict[str, str]
) -> None:
    section = EngineSection(**changes)
    assert with_shipped_drafter(section, open_checkpoint(model)) == (section, None)


def test_one_for_other_weights_is_not_used_and_the_reason_is_said(model: Path, folder: Path) -> None:
    made_for(folder, "f" * 64)
    section, note = asked(model)
    assert section.drafter is None
    assert note is not None
    assert "made for weights ffffffffffff" in note
    (folder / TARGET).unlink()
    section, note = asked(model)
    assert section.drafter is None
    assert note is not None
    assert "cannot be read" in note


def test_the_digest_is_the_one_that_the_drafter_s_pipeline_writes(model: Path) -> None:
    """`drafter.target` hashes the digests of the files, one after the other."""
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    assert served_sha256() == hashlib.sha256("".join([digest]).encode()).hexdigest()


def test_without_a_folder_nothing_is_used(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "find", lambda: None)
    assert asked(model) == (EngineSection(), None)


def test_the_embedded_model_has_the_shape_by_which_its_kin_are_known(real_checkpoint: Checkpoint) -> None:
    d = real_checkpoint.description
    assert (d.num_layers, d.hidden_size, d.vocab_size) == shipped.DEFAULT_SHAPE
    assert with_shipped_drafter(EngineSection(), real_checkpoint)[1] == USED


@pytest.fixture
def real_checkpoint() -> Checkpoint:
    from firstlight.facts.sources import resolve_model

    return open_checkpoint(resolve_model(None))
