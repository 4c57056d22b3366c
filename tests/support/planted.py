"""A Kimi-shaped model that says what a test wants: each token of its script has one successor.

Its layers add nothing to the residual stream, and a token's embedding is the row of the head that stands for
the next one of the script. So the real engine writes markup, which random weights never would. Invariant: no
token stands in the script twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from firstlight.models.random_model import Unpacked, write_random_model
from firstlight.models.small_kimi import WRAPPER, kimi_of_hidden
from firstlight.text.kimi_writer import write_kimi_text
from firstlight.text.model import TextModel


class Planted(Unpacked):
    """The weights of a model that follows `script`."""

    def __init__(self, script: Sequence[int]) -> None:
        super().__init__(torch.float32)
        assert len(set(script)) == len(script), "a token stands in the script twice"
        self._script = script
        self._head = torch.empty(0)

    def pack(self, name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
        if name.endswith("lm_head.weight"):
            self._head = values
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            values = torch.zeros_like(values)
        elif name.endswith("embed_tokens.weight"):
            assert len(self._head), "the head is declared before the embeddings"
            values[list(self._script[:-1])] = self._head[list(self._script[1:])]
        return super().pack(name, values)


def write_planted_kimi(folder: Path, script: str) -> Path:
    """A folder whose model writes `script`, once it has come to its first token."""
    write_kimi_text(folder)
    text = TextModel.load(folder)
    texts = {path.name: path.read_bytes() for path in folder.iterdir()}
    ids = text.encode(script, add_special_tokens=False)
    end = text.token_id("<|im_end|>")
    assert end is not None
    description = kimi_of_hidden(64, vocab_size=text.vocab_size, num_layers=2, num_experts=4, end_ids=(end,))
    model = write_random_model(folder / "model", description, Planted(ids), wrapper=WRAPPER)
    for name, content in texts.items():
        (model / name).write_bytes(content)
    return model
