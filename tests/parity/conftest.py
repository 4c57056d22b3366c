"""The real model, once a session: the file, the folder it was converted to, and transformers' model of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from firstlight.facts.sources import resolve_model
from firstlight.loading.convert import convert_gguf
from firstlight.text.model import TextModel


@pytest.fixture(scope="session")
def real_path() -> Path:
    return resolve_model(None)


@pytest.fixture(scope="session")
def real_text(real_path: Path) -> TextModel:
    return TextModel.load(real_path)


@pytest.fixture(scope="session")
def real_oracle(real_path: Path, real_text: TextModel, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """transformers over the converted file, every value exact."""
    from transformers import AutoModelForCausalLM

    target = tmp_path_factory.mktemp("converted") / "model"
    folder = convert_gguf(real_path, target, real_text.tokenizer_json(), dtype="f32").folder
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
