"""The drafter that comes with the package: for the embedded model's very weights, and nothing else."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest

from firstlight.base.config import EngineSection
from firstlight.engine.speculation import shipped
from firstlight.engine.speculation.shipped import NAME, TARGET, served_sha256, with_shipped_drafter


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for the embedded model."""
    path = tmp_path / "default.gguf"
    path.write_bytes(b"weights")
    monkeypatch.setattr(shipped, "default_model_path", lambda: path)
    monkeypatch.setattr(shipped, "DEFAULT_BYTES", 7)
    monkeypatch.setattr(shipped, "DEFAULT_SHA256", hashlib.sha256(b"weights").hexdigest())
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


def test_it_is_used_where_nobody_asked_for_another(model: Path, folder: Path) -> None:
    section, note = with_shipped_drafter(EngineSection(), str(model))
    assert section.drafter == str(folder)
    assert note == "the one that comes with the package"


@pytest.mark.parametrize("asked", [{"drafter": "none"}, {"drafter": "ngram"}, {"device": "cuda"}])
def test_it_is_not_used_where_something_else_was_asked(
    model: Path, folder: Path, asked: dict[str, str]
) -> None:
    section = EngineSection(**asked)
    assert with_shipped_drafter(section, str(model)) == (section, None)


def test_it_is_not_used_for_another_model_or_a_changed_file(
    model: Path, folder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"weights")
    assert with_shipped_drafter(EngineSection(), str(other)) == (EngineSection(), None)
    model.write_bytes(b"changed weights")
    assert with_shipped_drafter(EngineSection(), str(model)) == (EngineSection(), None)


def test_one_for_other_weights_is_not_used_and_the_reason_is_said(model: Path, folder: Path) -> None:
    made_for(folder, "f" * 64)
    section, note = with_shipped_drafter(EngineSection(), str(model))
    assert section.drafter is None
    assert note is not None
    assert "made for weights ffffffffffff" in note
    (folder / TARGET).unlink()
    section, note = with_shipped_drafter(EngineSection(), str(model))
    assert section.drafter is None
    assert note is not None
    assert "cannot be read" in note


def test_the_digest_is_the_one_that_the_drafter_s_pipeline_writes(model: Path) -> None:
    """`drafter.target` hashes the digests of the files, one after the other."""
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    assert served_sha256() == hashlib.sha256("".join([digest]).encode()).hexdigest()


def test_without_a_folder_nothing_is_used(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "find", lambda: None)
    assert with_shipped_drafter(EngineSection(), str(model)) == (EngineSection(), None)
