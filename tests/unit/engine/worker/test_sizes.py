"""Sizes at start: what is resolved, what is refused, and that every refusal names its remedy."""

from __future__ import annotations

import re

import pytest

from firstlight.base.config import EngineSection
from firstlight.base.errors import ResourceError
from firstlight.base.resolve_config import parse_size
from firstlight.engine.worker.sizes import (
    DEFAULT_KV_BYTES,
    RUNTIME_BYTES,
    Needs,
    Sizes,
    allows_two_layouts,
    resolve_sizes,
)
from firstlight.facts.checkpoint.checkpoint import Checkpoint, open_checkpoint
from firstlight.models.declare import Declaration
from firstlight.models.layers.attention import attention_shape
from firstlight.models.registry import find
from firstlight.ops.collectives import Group
from firstlight.ops.contract import MatrixKind
from firstlight.ops.reference import ReferenceBackend
from support.checkpoints import random_weights, tiny_description, write_hf_folder

MAX_POSITION = 4096
# Of the tiny model in float32: keys and values of 2 layers, 2 heads of 16, in pages of 16 tokens.
PAGE_BYTES = 2 * 2 * 2 * 16 * 4 * 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    description = tiny_description(max_position=MAX_POSITION)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return open_checkpoint(write_hf_folder(folder, description, random_weights(description)))


def resolve(checkpoint: Checkpoint, available_bytes: int, *, size: int = 1, **section: object) -> Sizes:
    declare = Declaration(ReferenceBackend("test"), Group(0, size))
    description = checkpoint.description
    find(description.architecture)(declare, description)
    shape = attention_shape(description, 0, size)
    # A small step, so that its workspace does not hide what the test is about.
    values = {"max_num_seqs": 4, "max_batched_tokens": 16, **section}
    engine = EngineSection(**values)  # type: ignore[arg-type]
    needs = Needs(description, declare, declare.kinds(checkpoint), shape)
    return resolve_sizes(engine, needs, available_bytes + int(RUNTIME_BYTES / engine.memory_fraction))


def test_plenty_of_memory_gives_the_model_s_length_and_the_default_pool(checkpoint: Checkpoint) -> None:
    sizes = resolve(checkpoint, 64 * 2**30)
    assert sizes.section.max_model_len == MAX_POSITION
    assert (sizes.num_pages - 1) * PAGE_BYTES == DEFAULT_KV_BYTES
    text = "\n".join(sizes.notes)
    for name in ("weights", "workspace", "kv cache", "free", "bytes a parameter: 4.00 (F32 4.00)"):
        assert name in text


def test_the_pool_always_holds_the_longest_sequence(checkpoint: Checkpoint) -> None:
    for megabytes in range(15, 60, 5):
        sizes = resolve(checkpoint, megabytes * 10**6)
        assert (sizes.num_pages - 1) * 16 >= sizes.section.max_model_len


def test_little_memory_halves_the_length_and_says_so(checkpoint: Checkpoint) -> None:
    sizes = resolve(checkpoint, 12_000_000)
    assert sizes.section.max_model_len == MAX_POSITION // 2
    assert f"instead of the model's {MAX_POSITION}" in sizes.notes[0]


def test_a_length_that_was_asked_for_is_never_changed(checkpoint: Checkpoint) -> None:
    with pytest.raises(ResourceError) as caught:
        resolve(checkpoint, 12_000_000, max_model_len=MAX_POSITION)
    assert "Not enough memory: a rank needs" in str(caught.value)
    assert "--max-model-len" in caught.value.hint


def test_no_memory_at_all_says_how_much_is_needed(checkpoint: Checkpoint) -> None:
    with pytest.raises(ResourceError, match=r"needs [\d.]+ MB .*weights [\d.]+ .B, workspace") as caught:
        resolve(checkpoint, 100_000)
    assert "smaller" in caught.value.hint


def test_kv_memory_fixes_the_pool(checkpoint: Checkpoint) -> None:
    sizes = resolve(checkpoint, 2**30, kv_memory_bytes=100 * PAGE_BYTES, max_model_len=1024)
    assert sizes.num_pages == 101


def test_kv_memory_too_small_for_one_sequence_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(ResourceError, match=r"--kv-memory of .* holds 10 pages") as caught:
        resolve(checkpoint, 2**30, kv_memory_bytes=10 * PAGE_BYTES, max_model_len=1024)
    assert "--max-model-len to 160" in caught.value.hint


def test_the_kv_memory_that_is_advised_works(checkpoint: Checkpoint) -> None:
    """Even where what was given holds no page at all."""
    with pytest.raises(ResourceError, match="holds 0 pages") as caught:
        resolve(checkpoint, 2**30, kv_memory_bytes=1024)
    assert "--max-model-len" not in caught.value.hint
    advised = re.search(r"--kv-memory to (\w+) or more", caught.value.hint)
    assert advised is not None
    assert resolve(checkpoint, 2**30, kv_memory_bytes=parse_size(advised[1])).section.max_model_len >= 512


def test_the_smaller_kv_memory_that_is_advised_works(checkpoint: Checkpoint) -> None:
    with pytest.raises(ResourceError) as caught:
        resolve(checkpoint, 2**30, kv_memory_bytes=2**31)
    advised = re.search(r"ower --kv-memory to (\w+)", caught.value.hint)
    assert advised is not None
    resolve(checkpoint, 2**30, kv_memory_bytes=parse_size(advised[1]))


def test_kv_memory_beyond_what_is_there_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(ResourceError, match="Not enough memory") as caught:
        resolve(checkpoint, 2**30, kv_memory_bytes=2**31)
    assert "Lower --kv-memory" in caught.value.hint


def test_a_rank_holds_its_share_of_the_heads(checkpoint: Checkpoint) -> None:
    one = resolve(checkpoint, 2**30, kv_memory_bytes=400 * PAGE_BYTES)
    two = resolve(checkpoint, 2**30, kv_memory_bytes=400 * PAGE_BYTES, size=2)
    assert two.num_pages - 1 == 2 * (one.num_pages - 1)


def test_two_layouts_only_where_memory_is_plentiful() -> None:
    kinds = [MatrixKind("layer", "Q4_1", (1000, 1000))] * 10  # 20 MB in one 16-bit layout
    assert allows_two_layouts(kinds, 10**9, EngineSection())
    assert not allows_two_layouts(kinds, 10**7, EngineSection())


# --- where memory is short ---

SHRINKS = ("max_batched_tokens", "max_num_seqs")
LARGE = {"max_num_seqs": 256, "max_batched_tokens": 512}


def test_a_step_that_nobody_asked_for_gives_way_before_the_length(checkpoint: Checkpoint) -> None:
    with pytest.raises(ResourceError) as caught:
        resolve(checkpoint, 50 * 10**6, **LARGE, max_model_len=MAX_POSITION)
    assert "--max-batched-tokens to 64" in caught.value.hint
    assert "--max-num-seqs to 8" in caught.value.hint
    sizes = resolve(checkpoint, 50 * 10**6, **LARGE, shrinks=SHRINKS)
    assert sizes.section.max_model_len == MAX_POSITION
    assert sizes.section.max_batched_tokens < 512
    assert "instead of 512" in sizes.notes[0]
    assert "instead of 256" in sizes.notes[0]


@pytest.mark.parametrize("asked", [{"max_num_seqs": 100}, {"max_batched_tokens": 300}])
def test_what_was_asked_for_is_kept_and_a_step_has_a_token_for_each_sequence(
    checkpoint: Checkpoint, asked: dict[str, int]
) -> None:
    kept = next(iter(asked))
    values = {"max_num_seqs": 256, "max_batched_tokens": 512, **asked}
    shrinks = tuple(name for name in SHRINKS if name != kept)
    section = resolve(checkpoint, 300 * 10**6, **values, shrinks=shrinks).section
    assert getattr(section, kept) == asked[kept]
    assert section.max_num_seqs <= section.max_batched_tokens


def test_a_step_that_fits_beside_the_shorter_length_is_kept(checkpoint: Checkpoint) -> None:
    """No step leaves room for the model's length: then a smaller one than fits would gain nothing."""
    page = dict(kv_memory_bytes=1024 // 16 * PAGE_BYTES)  # of 1,024 tokens, on a machine with plenty
    section = resolve(checkpoint, 64 * 2**30, **page, **LARGE, shrinks=SHRINKS).section
    assert (section.max_batched_tokens, section.max_num_seqs) == (512, 256)
    assert section.max_model_len == 1024


@pytest.mark.parametrize("megabytes", range(6, 60, 3))
def test_no_larger_step_would_have_fitted_at_that_length(checkpoint: Checkpoint, megabytes: int) -> None:
    try:
        section = resolve(checkpoint, megabytes * 10**6, **LARGE, shrinks=SHRINKS).section
    except ResourceError:
        return
    if section.max_batched_tokens == LARGE["max_batched_tokens"]:
        return
    twice = {
        "max_num_seqs": min(256, 2 * section.max_num_seqs),
        "max_batched_tokens": 2 * section.max_batched_tokens,
    }
    assert not _fits(checkpoint, megabytes * 10**6, **twice, max_model_len=section.max_model_len)


def test_small_steps_are_not_made_larger(checkpoint: Checkpoint) -> None:
    section = resolve(checkpoint, 12_000_000, shrinks=SHRINKS).section
    assert (section.max_num_seqs, section.max_batched_tokens) == (4, 16)


def test_at_last_nearly_all_memory_is_planned_for(checkpoint: Checkpoint) -> None:
    least = next(
        nbytes for nbytes in range(2 * 10**6, 20 * 10**6, 10**5) if _fits(checkpoint, nbytes, shrinks=())
    )
    tighter = int(least * 0.92)
    assert not _fits(checkpoint, tighter, shrinks=())
    sizes = resolve(checkpoint, tighter, shrinks=("memory_fraction",))
    assert sizes.section.memory_fraction == 0.97
    assert "97% of" in "\n".join(sizes.notes)


def _fits(checkpoint: Checkpoint, nbytes: int, **section: object) -> bool:
    try:
        resolve(checkpoint, nbytes, **section)
    except ResourceError:
        return False
    return True
