"""The GGUF header against the gguf package, and against files made to harm."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.base.errors import FirstlightError, ModelFileError, UnsupportedError
from firstlight.facts.gguf import gguf_cursor
from firstlight.facts.gguf.gguf_header import read_gguf
from support.checkpoints import mixed_formats, random_weights, tiny_description, write_gguf

U32, STRING, ARRAY = 4, 8, 9


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def key_value(key: bytes, kind: int, payload: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + payload


def tensor(name: bytes, shape: tuple[int, ...] = (4,), type_id: int = 0, offset: int = 0) -> bytes:
    sizes = b"".join(struct.pack("<Q", size) for size in shape)
    return string(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", type_id, offset)


def header(
    entries: list[bytes],
    tensors: list[bytes] | None = None,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    tensors = tensors or []
    num_tensors, num_entries = counts or (len(tensors), len(entries))
    return struct.pack("<4sIQQ", b"GGUF", version, num_tensors, num_entries) + b"".join(entries + tensors)


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    description = tiny_description()
    return write_gguf(
        tmp_path / "m.gguf",
        description,
        random_weights(description),
        format_of=mixed_formats,
        edit=lambda writer: (
            writer.add_array("test.floats", [0.5, 1.5]),
            writer.add_array("test.flags", [True, False]),
            writer.add_bool("test.flag", True),
            writer.add_int64("test.long", -(1 << 40)),
            writer.add_float64("test.double", 0.1),
            writer.add_string("test.text", "größer"),
        ),
    )


def test_equals_the_gguf_package(model: Path) -> None:
    ours, theirs = read_gguf(model), gguf.GGUFReader(model)
    for key, field in theirs.fields.items():
        if key.startswith("GGUF."):
            continue
        value = ours.metadata[key]
        expected = field.contents()
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == expected, key
    assert {t.name for t in theirs.tensors} == ours.tensors.keys()
    for tensor_ in theirs.tensors:
        assert ours.tensors[tensor_.name].offset == tensor_.data_offset
        assert list(ours.tensors[tensor_.name].shape) == tensor_.shape.tolist()[::-1]
    assert ours.version == 3
    assert ours.architecture == "llama"
    assert ours.data_offset == theirs.data_offset


def test_arrays_are_decoded_once_and_only_when_asked(model: Path) -> None:
    metadata = read_gguf(model).metadata
    assert "tokenizer.ggml.tokens" in metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    assert tokens is metadata["tokenizer.ggml.tokens"]
    assert tokens[:4] == ["<pad>", "<s>", "</s>", "t3"]
    assert metadata["tokenizer.ggml.token_type"].dtype == np.int32
    assert len(metadata) == len(list(metadata))
    assert metadata.get("absent") is None


def test_a_header_longer_than_the_first_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_cursor, "FIRST_READ_BYTES", 7)
    words = [f"word {number} " * (number % 5) for number in range(2000)]
    array = struct.pack("<IQ", STRING, len(words)) + b"".join(string(word.encode()) for word in words)
    content = header([key_value(b"words", ARRAY, array), key_value(b"n", U32, struct.pack("<I", 7))])
    metadata = read_gguf(write(tmp_path, content)).metadata
    assert metadata["words"] == words
    assert metadata["n"] == 7


def test_version_2_is_read_and_others_refused(tmp_path: Path) -> None:
    assert read_gguf(write(tmp_path, header([], version=2))).version == 2
    for version in (0, 1, 4, 1 << 31 | 1):
        with pytest.raises(UnsupportedError, match=f"GGUF version {version}"):
            read_gguf(write(tmp_path, header([], version=version)))
    with pytest.raises(UnsupportedError, match="big-endian"):
        read_gguf(write(tmp_path, struct.pack(">4sIQQ", b"GGUF", 3, 0, 0)))


HUGE = (1 << 63) - 1
HOSTILE = {
    "magic": b"GGML" + bytes(20),
    "short": b"GGUF\x03",
    "tensor count": header([], counts=(HUGE, 0)),
    "metadata count": header([], counts=(0, HUGE)),
    "counts without content": header([], counts=(1000, 1000)),
    "key length": header([struct.pack("<Q", HUGE)], counts=(0, 1)),
    "long key": header([string(b"k" * 70_000)], counts=(0, 1)),
    "string length": header([key_value(b"k", STRING, struct.pack("<Q", HUGE))]),
    "wrapping string length": header([key_value(b"k", STRING, struct.pack("<Q", (1 << 64) - 8))]),
    "array count": header([key_value(b"k", ARRAY, struct.pack("<IQ", U32, HUGE))]),
    "string array count": header([key_value(b"k", ARRAY, struct.pack("<IQ", STRING, HUGE))]),
    "string in array": header([key_value(b"k", ARRAY, struct.pack("<IQQ", STRING, 1, HUGE))]),
    "wrapping string in array": header(
        [key_value(b"k", ARRAY, struct.pack("<IQQ", STRING, 1, (1 << 64) - 8))]
    ),
    "nested array": header([key_value(b"k", ARRAY, struct.pack("<IQ", ARRAY, 1))]),
    "unknown type": header([key_value(b"k", 99, bytes(8))]),
    "unknown array type": header([key_value(b"k", ARRAY, struct.pack("<IQ", 99, 1))]),
    "key encoding": header([key_value(b"\xff", U32, bytes(4))]),
    "value encoding": header([key_value(b"k", STRING, string(b"\xff"))]),
    "duplicate key": header([key_value(b"k", U32, bytes(4))] * 2),
    "duplicate tensor": header([], [tensor(b"t"), tensor(b"t")]) + bytes(64),
    "alignment": header([key_value(b"general.alignment", U32, struct.pack("<I", 3))]),
    "zero alignment": header([key_value(b"general.alignment", U32, bytes(4))]),
    "text alignment": header([key_value(b"general.alignment", STRING, string(b"32"))]),
    "dimensions": header([], [string(b"t") + struct.pack("<I", 1 << 30)]),
    "empty dimension": header([], [tensor(b"t", (0, 4))]),
    "huge dimension": header([], [tensor(b"t", (HUGE,))]),
    "overflowing product": header([], [tensor(b"t", (1 << 40, 1 << 40))]),
    "offset past the end": header([], [tensor(b"t", offset=1 << 40)]),
    "unaligned offset": header([], [tensor(b"t", offset=4)]) + bytes(64),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_headers_are_one_clear_error_and_cost_no_memory(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path, content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match=r"m\.gguf"):
            read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def test_bad_text_inside_an_array_is_found_when_it_is_decoded(tmp_path: Path) -> None:
    array = struct.pack("<IQ", STRING, 2) + string(b"fine") + string(b"\xff\xfe")
    metadata = read_gguf(write(tmp_path, header([key_value(b"k", ARRAY, array)]))).metadata
    with pytest.raises(ModelFileError, match="entry 1 of the metadata k"):
        metadata["k"]


def test_a_header_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_cursor, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(ModelFileError, match="header is larger than 1000"):
        read_gguf(write(tmp_path, header([key_value(b"k", STRING, string(b"x" * 2000))])))


def test_a_missing_architecture(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"general\.architecture"):
        _ = read_gguf(write(tmp_path, header([]))).architecture


def test_every_truncation_is_noticed(model: Path) -> None:
    content = model.read_bytes()
    data_offset = read_gguf(model).data_offset
    chosen = random.Random(0).sample(range(data_offset - 64), 200)
    for size in (*range(40), *chosen):
        model.write_bytes(content[:size])
        with pytest.raises(ModelFileError, match=r"m\.gguf"):
            read_gguf(model)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_random_damage_never_escapes_as_another_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    entries = [
        key_value(b"general.architecture", STRING, string(b"llama")),
        key_value(
            b"tokens", ARRAY, struct.pack("<IQ", STRING, 3) + string(b"a") + string(b"bc") + string(b"")
        ),
        key_value(b"numbers", ARRAY, struct.pack("<IQ", U32, 2) + bytes(8)),
    ]
    content = bytearray(header(entries, [tensor(b"t", (4, 2))]) + bytes(64))
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(4, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content)
    try:
        file = read_gguf(path)
        for key in file.metadata:
            assert file.metadata[key] is not None
    except FirstlightError:
        pass
