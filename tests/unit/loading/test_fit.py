"""What is refused from headers alone, and that each refusal names a value that works."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from firstlight.base.config import MIN_MODEL_LEN, EngineSection
from firstlight.base.errors import UsageError
from firstlight.facts.checkpoint.checkpoint import Checkpoint, open_checkpoint
from firstlight.loading.fit import possible_ranks, require_fit
from support.checkpoints import random_weights, tiny_description, write_hf_folder

MAX_POSITION = 64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    description = tiny_description(max_position=MAX_POSITION)
    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    return open_checkpoint(write_hf_folder(folder, description, random_weights(description)))


def with_heads(checkpoint: Checkpoint, heads: int, kv_heads: int, head_size: int, fmt: str) -> Checkpoint:
    """The same headers, with other heads and another format of the output projection."""
    description = msgspec.structs.replace(
        checkpoint.description, num_heads=heads, num_kv_heads=kv_heads, head_size=head_size
    )
    tensors = {
        name: replace(tensor, format=fmt) if name.endswith("o_proj.weight") else tensor
        for name, tensor in checkpoint.tensors.items()
    }
    return replace(checkpoint, description=description, tensors=tensors)


def refusal(checkpoint: Checkpoint, **section: int) -> UsageError:
    with pytest.raises(UsageError) as caught:
        require_fit(checkpoint, EngineSection(**section))  # type: ignore[arg-type]
    return caught.value


def test_a_length_that_a_scaling_has_stretched_fits(tmp_path: Path) -> None:
    """Qwen's recipe: the rest of config.json as it was."""
    description = tiny_description("qwen2", max_position=MAX_POSITION)
    folder = write_hf_folder(tmp_path / "m", description, random_weights(description))
    path = folder / "config.json"
    recipe = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": MAX_POSITION}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_scaling": recipe}))
    stretched = open_checkpoint(folder)
    require_fit(stretched, EngineSection(max_model_len=4 * MAX_POSITION))
    assert f"{4 * MAX_POSITION} positions" in str(refusal(stretched, max_model_len=4 * MAX_POSITION + 1))


def test_what_fits_is_let_through(checkpoint: Checkpoint) -> None:
    require_fit(checkpoint, EngineSection())
    require_fit(checkpoint, EngineSection(max_model_len=MAX_POSITION, tensor_parallel=2))
    require_fit(checkpoint, EngineSection(max_model_len=MIN_MODEL_LEN))


@pytest.mark.parametrize("length", [1, MIN_MODEL_LEN - 1, MAX_POSITION + 1])
def test_a_length_that_cannot_work_is_refused_with_one_that_can(checkpoint: Checkpoint, length: int) -> None:
    error = refusal(checkpoint, max_model_len=length)
    assert f"--max-model-len {length}" in str(error)
    advised = re.search(r"Use (\d+) or", error.hint)
    assert advised is not None
    require_fit(checkpoint, EngineSection(max_model_len=int(advised[1])))


def test_more_sequences_than_tokens_in_a_step_are_refused(checkpoint: Checkpoint) -> None:
    error = refusal(checkpoint, max_batched_tokens=8, max_num_seqs=16)
    assert "--max-batched-tokens 8 is less than --max-num-seqs 16" in str(error)
    assert "--max-num-seqs 8" in error.hint


def test_more_ranks_than_key_value_heads_are_refused_with_the_counts(checkpoint: Checkpoint) -> None:
    error = refusal(with_heads(checkpoint, 9, 3, 64, "Q4_1"), tensor_parallel=7)
    assert "9 attention heads and 3 key-value heads" in str(error)
    assert error.hint == "Use --tensor-parallel 1, 2 or 3."


def test_ranks_that_would_cut_a_block_are_refused_and_left_out(checkpoint: Checkpoint) -> None:
    """Heads of 16 columns: a share of one key-value head ends in the middle of a block of 32."""
    odd = with_heads(checkpoint, 4, 4, 16, "Q8_0")
    assert possible_ranks(odd) == [1, 2]
    assert "blocks" in str(refusal(odd, tensor_parallel=3))
    assert possible_ranks(with_heads(checkpoint, 4, 4, 16, "F32")) == [1, 2, 3, 4]
