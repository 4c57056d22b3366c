"""--trust-remote-code: the folder's own tokenizer code, run only where it was asked for, used as it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from firstlight.base.errors import ModelFileError, UnsupportedError
from firstlight.text.model import TextModel
from support.byte_text import byte_tokenizer

CODE = """
from pathlib import Path
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast


class Own(PreTrainedTokenizerFast):
    def __init__(self, **others):
        content = (Path(others.get("name_or_path", ".")) / "own.vocabulary").read_text()
        super().__init__(tokenizer_object=Tokenizer.from_str(content), **others)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose tokenizer only its own code can read."""
    made = tmp_path / "model"
    made.mkdir()
    config = {"auto_map": {"AutoTokenizer": [None, "tokenization_own.Own"]}, "tokenizer_class": "Own"}
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    (made / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (made / "own.vocabulary").write_text(byte_tokenizer().to_str())
    (made / "tokenization_own.py").write_text(CODE)
    return made


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies the code before it runs it; not into the user's home."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_it_is_refused_by_name_and_not_run(folder: Path) -> None:
    (folder / "tokenization_own.py").write_text("raise SystemExit('this was run')")
    with pytest.raises(UnsupportedError, match=r"tokenization_own\.Own") as caught:
        TextModel.load(folder)
    assert "--trust-remote-code" in caught.value.hint


def test_it_is_run_where_it_is_trusted(folder: Path) -> None:
    text = TextModel.load(folder, trust_remote_code=True)
    assert text.encode("Hé<|end|>") == [*"Hé".encode(), 257]


def test_what_its_code_makes_neither_cuts_nor_fills_up(folder: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=200)
    (folder / "own.vocabulary").write_text(tokenizer.to_str())
    assert TextModel.load(folder, trust_remote_code=True).encode("Hello") == [*b"Hello"]


def test_code_that_fails_says_so(folder: Path) -> None:
    (folder / "own.vocabulary").write_text("{}")
    with pytest.raises(ModelFileError, match="its own tokenizer code failed"):
        TextModel.load(folder, trust_remote_code=True)


def test_without_transformers_it_says_what_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedError, match="needs transformers") as caught:
        TextModel.load(folder, trust_remote_code=True)
    assert "pip install transformers" in caught.value.hint
