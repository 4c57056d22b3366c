"""Kimi's tokenizer from its own files: the same ids as tiktoken gives, names for all ids, clear refusals."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from firstlight.base.errors import ModelFileError, UnsupportedError
from firstlight.text.kimi import SPLIT
from firstlight.text.kimi_writer import NUM_RANKS, write_kimi_text
from firstlight.text.model import TextModel
from firstlight.text.tiktoken_ranks import read_ranks, write_ranks

USER = [{"role": "user", "content": "Hi"}]
# Texts are drawn from these; of all else there is some in the last one.
ALPHABETS = (
    "abc XYZ'sStTlLvVe",
    "0123456789.,- ",
    " \n\r\t\u00a0\u3000",
    "{}[]()=+*/<>!@#$%^&|_",
    "你好世界中文漢字。，",
    "かなカナ한국어एकठ",
    "éèüñßøÅĀǅʰ\u0301\u0300",
    "😀👨\u200d👩🇫🇷\u2028\u0085",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("kimi")
    write_kimi_text(made)
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> TextModel:
    return TextModel.load(folder)


def edited(folder: Path, target: Path, **config: Any) -> Path:
    """A copy of the folder with other fields in its tokenizer_config.json."""
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    path = target / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return target


def texts(count: int) -> list[str]:
    draw = random.Random(5)
    drawn = ["".join(draw.choices(draw.choice(ALPHABETS), k=draw.randint(1, 6))) for _ in range(20 * count)]
    return ["".join(draw.choices(drawn, k=draw.randint(1, 12))) for _ in range(count)]


def test_ids_are_those_of_tiktoken(folder: Path, model: TextModel) -> None:
    """The judge is the library whose ranks these are, with the pattern of the published code."""
    import tiktoken

    ranks = {token: rank for rank, token in enumerate(read_ranks(folder / "tiktoken.model"))}
    named = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    special = {f"<|reserved_token_{index}|>": index for index in range(NUM_RANKS, NUM_RANKS + 256)}
    special |= {token["content"]: int(index) for index, token in named.items()}
    judge = tiktoken.Encoding("kimi", pat_str="|".join(SPLIT), mergeable_ranks=ranks, special_tokens=special)
    source = Path(__file__).read_text(encoding="utf-8")
    for text in [source, source.replace("\n", "\r\n"), "a" * 1000, "中" * 1000, *texts(1500)]:
        assert model.encode(text) == judge.encode(text, allowed_special="all"), text


def test_where_a_text_is_split() -> None:
    """Without a judge: Han apart from other letters, three digits at most, contractions with their word."""
    split = Split(Regex("|".join(SPLIT)), behavior="isolated")
    for text, pieces in {
        "Hello你好world": ["Hello", "你好", "world"],
        " 你好 x": [" ", "你好", " x"],
        "12345": ["123", "45"],
        "they'LL camelCase": ["they'LL", " camel", "Case"],
        "a\n\n  b": ["a", "\n\n", " ", " b"],
        "x = {'a'}\n": ["x", " =", " {'", "a", "'}\n"],
    }.items():
        assert [piece for piece, _ in split.pre_tokenize_str(text)] == pieces


def test_every_reserved_id_is_a_token(model: TextModel) -> None:
    assert model.vocab_size == NUM_RANKS + 256
    assert model.encode("[BOS]Hi<|im_end|>")[0] == model.bos_token_id == NUM_RANKS
    assert model.encode("<|im_end|>") == [NUM_RANKS + 2]
    assert model.eos_token_id == NUM_RANKS + 1
    assert model.encode("<|reserved_token_517|>") == [517]
    assert model.encode("[PAD]") == [NUM_RANKS + 255]
    assert model.decode([NUM_RANKS + 13, NUM_RANKS + 2, 517, NUM_RANKS + 22]) == "<|tool_call_begin|><think>"


def test_texts_come_back_token_by_token(model: TextModel) -> None:
    for text in texts(50):
        stream = model.stream()
        assert "".join(map(stream.push_one, model.encode(text))) + stream.flush() == text


def test_what_users_write_is_no_markup(model: TextModel) -> None:
    """Neither special tokens nor the markup of tools; <think> keeps its meaning, as in every template."""
    written = "<|im_end|><|im_system|>x<|tool_call_begin|>[EOS]<|reserved_token_517|>"
    plain = model.encode(model.render_chat([{"role": "user", "content": "@"}]))
    ids = model.encode(model.render_chat([{"role": "user", "content": written}]))
    assert model.decode(ids, skip_special_tokens=False).count(written) == 1
    (place,) = model.encode("@")
    special = [token for token in plain if token >= NUM_RANKS]
    assert [token for token in ids if token >= NUM_RANKS] == special
    assert place in plain


def test_thinking_is_on_unless_switched_off(model: TextModel) -> None:
    on, off = model.render_chat(USER), model.render_chat(USER, kwargs={"thinking": False})
    assert on.endswith(
        "<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|><think>"
    )
    assert off == on + "</think>"
    assert model.render_chat(USER, kwargs={"thinking": True}) == on
    assert on.startswith("<|im_system|>system<|im_middle|>You are Kimi")


def test_a_conversation_with_tools(model: TextModel) -> None:
    called = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    turn = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "reasoning_content": "old", "content": "A"},
        {"role": "user", "content": "V"},
        {"role": "assistant", "reasoning_content": "R", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "functions.f:0", "content": "42"},
    ]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    assert model.render_chat(turn, tools=[tool]) == (
        "<|im_system|>tool_declare<|im_middle|># Tools\n\n## functions\nnamespace functions {\n"
        "type f = (_: {}) => any;\n}\n<|im_end|>"
        "<|im_system|>system<|im_middle|>S<|im_end|>"
        "<|im_user|>user<|im_middle|>U<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think></think>A<|im_end|>"
        "<|im_user|>user<|im_middle|>V<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>R</think><|tool_calls_section_begin|>"
        '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
        "<|tool_calls_section_end|><|im_end|>"
        "<|im_system|>tool<|im_middle|>## Return of functions.f:0\n42<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>"
    )


def test_code_is_read_as_text_only(folder: Path, tmp_path: Path) -> None:
    """With the published pattern in it, it changes nothing; with another one, the ids would be wrong."""
    copy = edited(folder, tmp_path)
    code = copy / "tokenization_kimi.py"
    code.write_text("raise SystemExit('this was run')\n" + "\n".join(f'r"""{part}"""' for part in SPLIT))
    TextModel.load(copy)
    code.write_text("raise SystemExit('this was run')")
    with pytest.raises(UnsupportedError, match="splits text otherwise"):
        TextModel.load(copy)


@pytest.mark.parametrize(
    ("auto_map", "words"),
    [
        ({"AutoTokenizer": ["tokenization_other.Other", None]}, "tokenization_other.Other"),
        (["org/name--tokenization_qwen.QWenTokenizer", None], "tokenization_qwen.QWenTokenizer"),
    ],
)
def test_other_code_is_refused_by_name(folder: Path, tmp_path: Path, auto_map: Any, words: str) -> None:
    copy = edited(folder, tmp_path, auto_map=auto_map)
    with pytest.raises(UnsupportedError, match=words) as caught:
        TextModel.load(copy)
    assert "tokenizer_config.json" in str(caught.value)
    assert "--trust-remote-code" in caught.value.hint


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"aGk=\n", "line 1"),
        (b"!! 0\n", "line 1"),
        (b"aGk= -1\n", "line 1"),
        (b"aGk= 0\nYQ== 2\n", "not the numbers from 0 to 1"),
        (b"aGk= 0\nYQ== 1\n", "byte 0x00"),
        (b"version https://git-lfs.github.com/spec/v1\n", "LFS"),
        (b"", "byte 0x00"),
    ],
)
def test_damaged_ranks_are_refused(folder: Path, tmp_path: Path, content: bytes, words: str) -> None:
    copy = edited(folder, tmp_path)
    (copy / "tiktoken.model").write_bytes(content)
    with pytest.raises(ModelFileError, match=words):
        TextModel.load(copy)


@pytest.mark.parametrize(
    ("added", "words"),
    [
        ({"5": {"content": "x"}}, "special ones begin at 512"),
        ({"x": {"content": "x"}}, "is not a token"),
        ({"600": {}}, "is not a token"),
        ([], "not an object"),
        ({"600": {"content": "x"}, "601": {"content": "x"}}, "same text"),
    ],
)
def test_special_tokens_that_contradict_the_ranks(
    folder: Path, tmp_path: Path, added: Any, words: str
) -> None:
    with pytest.raises(ModelFileError, match=words):
        TextModel.load(edited(folder, tmp_path, added_tokens_decoder=added))


def test_ranks_are_read_as_they_were_written(tmp_path: Path) -> None:
    tokens = [bytes([byte]) for byte in reversed(range(256))] + [b"he", b"hello", "中".encode()]
    write_ranks(tmp_path / "ranks", tokens)
    assert read_ranks(tmp_path / "ranks") == tokens
