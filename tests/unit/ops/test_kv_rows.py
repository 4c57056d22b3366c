"""Keys and values in every type: what is written, and attention over it, against the reference."""

from __future__ import annotations

import pytest
import torch

from firstlight.base.errors import UnsupportedError
from firstlight.ops.contract import AttentionShape
from firstlight.ops.cpu.library import KV_TYPES, TURN_AND_WRITE, Op, Step, address
from firstlight.ops.cpu.native_backend import NativeBackend
from firstlight.ops.cpu.pick import pick_cpu_kernels
from firstlight.ops.cuda.backend import CudaBackend
from firstlight.ops.kv_rows import DTYPES, pack, row_bytes, unpack
from firstlight.ops.reference import ReferenceBackend
from support.native_sets import instruction_sets, pool_of
from support.operators import Paged, random_values

HEAD_SIZES = (2, 6, 8, 14, 64, 80, 128)
HEADS = ((9, 3), (2, 2), (8, 1))
ENTRIES = [(0, 0, 130), (3, 199, 1), (1, 3, 37), (2, 0, 1), (4, 63, 1), (5, 0, 33)]
LENGTHS = (130, 40, 1, 200, 64, 33)
SET_NAMES = instruction_sets()


@pytest.fixture(scope="module", params=SET_NAMES)
def ops(request: pytest.FixtureRequest) -> NativeBackend:
    return NativeBackend(pool_of(request.param))


def rows_of_all_kinds(size: int) -> torch.Tensor:
    """Ordinary ones, some with an outlier, ties of rounding, the ends of the range, and what is no number."""
    x = random_values(16, size, seed=size)
    x[1] *= 1e-3
    x[2, 0] = 500.0
    x[3] = 0.0
    x[4] = torch.arange(size) * 0.5 - 1.0  # scaled by 127: every half is a tie
    x[4, -2:] = 127.0
    x[5] = 1e-38
    x[6] = -1e30
    x[7, -1] = 3.4e38
    x[8, 0] = torch.nan
    x[9, -1] = torch.inf
    x[10, 0] = -torch.inf
    x[11] = 65519.9  # the last that float16 does not round to infinity
    x[12] = -0.0
    x[13] = 1.00390625  # a tie in bfloat16
    x[14] = 2e-30
    return x


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bits, but that one NaN is as good as another."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def paged_in(dtype: torch.dtype, shape: AttentionShape) -> tuple[Paged, torch.Tensor, torch.Tensor]:
    """Histories as they are stored, and the same with the exact values that this stands for."""
    paged = Paged.random(shape, LENGTHS, seed=3)
    keys, values = pack(paged.keys, dtype), pack(paged.values, dtype)
    return Paged(shape, paged.page_size, paged.tables_SP, unpack(keys), unpack(values)), keys, values


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("size", HEAD_SIZES)
def test_the_library_writes_what_the_reference_writes(ops: NativeBackend, name: str, size: int) -> None:
    dtype, rows = DTYPES[name], rows_of_all_kinds(size)
    heads, kv_heads, num = 2, 2, len(rows) // 2
    qkv = torch.zeros(num, heads + 2 * kv_heads, size)
    qkv[:, heads : heads + kv_heads] = rows.view(num, kv_heads, size)
    qkv[:, heads + kv_heads :] = rows.flip(0).reshape(num, kv_heads, size)
    turns = torch.zeros(num, size // 2, 2)
    turns[..., 0] = 1.0
    slots = torch.arange(num).flip(0).contiguous()
    expected_keys, expected_values = (pack(qkv[:, heads:], dtype)[slots]).split(kv_heads, 1)
    keys, values = torch.ones(expected_keys.shape, dtype=dtype), torch.ones(expected_keys.shape, dtype=dtype)
    places = (address(qkv), address(keys), address(values))
    op = Op(TURN_AND_WRITE, n=(heads, kv_heads, size, KV_TYPES[dtype]), p=places)
    ops.pool.run([op], Step(num_rows=num, turns=address(turns), write_slots=address(slots)))
    # A turn by nothing adds 0 * x, which is NaN for what is no number: its neighbour in a float row, too.
    is_number = torch.isfinite(qkv[:, heads : heads + kv_heads]).all(-1)[slots]
    assert same(keys[is_number], expected_keys[is_number])
    assert bool(unpack(keys)[~is_number].isnan().any(-1).all())
    assert same(values, expected_values)


@pytest.mark.parametrize("size", HEAD_SIZES)
def test_codes_are_within_half_a_step_and_alone(size: int) -> None:
    rows = rows_of_all_kinds(size)
    packed = pack(rows, torch.int8)
    assert packed.nbytes == len(rows) * row_bytes(size, torch.int8) == len(rows) * (size + 8)
    for row, stored in zip(rows, packed, strict=True):
        assert torch.equal(pack(row[None], torch.int8)[0], stored)
    values, is_number = unpack(packed), torch.isfinite(rows).all(-1)
    assert bool(values[~is_number].isnan().all())
    most = rows[is_number].double().abs().topk(2, -1).values
    step = torch.maximum(most[:, 1:] / 127, most[:, :1] / 32000)
    error = (values[is_number].double() - rows[is_number].double()).abs()
    assert bool((error <= 0.5001 * step + 1e-30).all())


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("heads", "size"), [(HEADS[0], 64), (HEADS[1], 14), (HEADS[2], 80)])
def test_attention_over_every_type(
    ops: NativeBackend, name: str, heads: tuple[int, int], size: int, window: int | None
) -> None:
    paged, keys, values = paged_in(DTYPES[name], AttentionShape(*heads, size, window))
    rows = paged.rows(ENTRIES)
    q = random_values(len(rows.positions_T), heads[0], size, seed=9)
    got = ops.attend(q, keys, values, ops.plan_attention(rows, paged.shape))
    reference = ReferenceBackend("test", name)
    expected = reference.attend(q, keys, values, reference.plan_attention(rows, paged.shape))
    assert float((got - expected).abs().max()) < 2e-5
    sequences = [entry[0] for entry in ENTRIES for _ in range(entry[2])]
    for row, position in list(enumerate(rows.positions_T.tolist()))[::7]:
        alone = ops.plan_attention(paged.rows([(sequences[row], position, 1)]), paged.shape)
        assert torch.equal(ops.attend(q[row : row + 1], keys, values, alone)[0], got[row])
        naive = paged.naive(q[row], sequences[row], position)
        assert float((expected[row].double() - naive).abs().max()) < 2e-5


@pytest.mark.parametrize("name", DTYPES)
def test_sets_with_fused_operations_agree_in_every_bit(name: str) -> None:
    paged, keys, values = paged_in(DTYPES[name], AttentionShape(9, 3, 64, None))
    rows = paged.rows(ENTRIES)
    q = random_values(len(rows.positions_T), 9, 64, seed=9)
    results = []
    for set_name in SET_NAMES:
        if set_name != "portable":
            native = NativeBackend(pool_of(set_name))
            results.append(native.attend(q, keys, values, native.plan_attention(rows, paged.shape)))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("name", DTYPES)
def test_a_token_that_is_no_number_reaches_those_that_see_it_alone(ops: NativeBackend, name: str) -> None:
    paged, keys, values = paged_in(DTYPES[name], AttentionShape(4, 2, 16, None))
    rows = paged.rows([(0, 0, 130), (1, 0, 40)])
    q = random_values(170, 4, 16)
    reference = ReferenceBackend("test", name)
    for backend in (ops, reference):
        plan = backend.plan_attention(rows, paged.shape)
        clean = backend.attend(q, keys, values, plan)
        position = 20
        page = int(paged.tables_SP[0, position // paged.page_size])
        spoilt = values.clone()
        slot = page * paged.page_size + position % paged.page_size
        spoilt[slot] = pack(torch.full((2, 16), torch.nan), DTYPES[name])
        got = backend.attend(q, keys, spoilt, plan)
        assert torch.equal(got[:position], clean[:position])
        assert torch.equal(got[130:], clean[130:])
        assert bool(got[position:130].isnan().all())


def test_what_a_backend_cannot_hold_is_refused_by_name() -> None:
    refusals = [
        (lambda: pick_cpu_kernels("stock", 1, kv_dtype="int8"), "--kv-dtype int8", "--cpu-kernels auto"),
        (lambda: CudaBackend.open("auto", 0, "int8"), "--device cuda keeps keys", "--device cpu"),
        (lambda: CudaBackend.open("float32", 0, "bfloat16"), "in float32", "--kv-dtype auto"),
        (lambda: ReferenceBackend("test", "int3"), "--kv-dtype int3", "float16, bfloat16, int8"),
    ]
    for refused, words, remedy in refusals:
        with pytest.raises(UnsupportedError, match=words) as caught:
            refused()
        assert remedy in caught.value.hint
