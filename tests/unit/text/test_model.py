"""Loading the text side from folders and GGUF files, and every way these can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from firstlight.base.errors import ModelFileError, RequestError, UnsupportedError
from firstlight.text.gguf_tokenizer import build_tokenizer
from firstlight.text.model import TextModel
from support.byte_text import END, TEMPLATE, byte_text, byte_tokenizer
from support.gguf_vocabularies import MERGES, byte_level_metadata, sentence_piece_metadata

EDGES = [
    "hello world's 12345 ... \n\n  x",
    " \t\r\n 　 ",
    "naïve Ünï 你好 हिन्दी 🎉👩‍👩‍👧 e\u0301",
    "I'LL it's O'Neill 3.14159 $10,000 x_1+=2",
    "<|a|>hello<|b|> hello<think>",
]


def theirs(metadata: dict[str, object]) -> object:
    """transformers' own conversion of the same metadata."""
    names = {"tokens": "tokens", "merges": "merges", "token_type": "token_type", "scores": "scores"}
    given = {
        name: metadata[f"tokenizer.ggml.{key}"]
        for key, name in names.items()
        if f"tokenizer.ggml.{key}" in metadata
    }
    given |= {
        "tokenizer_type": metadata["tokenizer.ggml.model"],
        "pre_tokenizer_type": metadata.get("tokenizer.ggml.pre"),
    }
    tokenizer, _ = convert_gguf_tokenizer("llama", given)
    return tokenizer


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken"])
def test_byte_level_splits_as_transformers_does(pre: str) -> None:
    ours, other = build_tokenizer(byte_level_metadata(pre), "test"), theirs(byte_level_metadata(pre))
    for text in EDGES:
        if pre == "qwen2" and "e\u0301" in text:
            continue  # the published tokenizer composes first (NFC); a GGUF conversion elsewhere does not
        expected = other.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == expected, text


@given(st.text(alphabet=st.characters(codec="utf-8")))
def test_byte_level_text_comes_back(text: str) -> None:
    for tokenizer in (SMOLLM, LLAMA3):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


SMOLLM = build_tokenizer(byte_level_metadata("smollm"), "test")
LLAMA3 = build_tokenizer(byte_level_metadata("llama-bpe"), "test")


def test_digits_are_single_for_smollm_and_groups_of_three_for_llama3() -> None:
    digits = [token for token in SMOLLM.encode("12345").tokens]
    assert digits == ["1", "2", "3", "4", "5"]
    assert LLAMA3.encode("12345", add_special_tokens=False).tokens == ["123", "4", "5"]


def test_qwen2_composes_characters() -> None:
    qwen = build_tokenizer(byte_level_metadata("qwen2"), "test")
    assert qwen.encode("e\u0301").ids == qwen.encode("\u00e9").ids


def test_the_begin_token_is_added_where_the_family_or_the_file_says_so() -> None:
    metadata = byte_level_metadata("llama-bpe")
    bos = metadata["tokenizer.ggml.bos_token_id"]
    assert LLAMA3.encode("x").ids[0] == bos
    assert LLAMA3.encode("x", add_special_tokens=False).ids[0] != bos
    assert SMOLLM.encode("x").ids[0] != bos
    without = build_tokenizer({**metadata, "tokenizer.ggml.add_bos_token": False}, "test")
    assert without.encode("x").ids[0] != bos
    both = build_tokenizer({**metadata, "tokenizer.ggml.add_eos_token": True}, "test")
    assert both.encode("x").ids[-1] == metadata["tokenizer.ggml.eos_token_id"]


@given(st.text(alphabet="helowrd <>é你"))
def test_sentence_piece_joins_by_score_as_transformers_does(text: str) -> None:
    assert SPM.decode(SPM.encode(text).ids) == text
    text = "h" + text  # before a first space we put a prefix as SentencePiece does; transformers 5 does not
    assert (
        SPM.encode(text, add_special_tokens=False).ids == THEIR_SPM.encode(text, add_special_tokens=False).ids
    )


SPM = build_tokenizer(sentence_piece_metadata(), "test")
THEIR_SPM = theirs(sentence_piece_metadata())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tokenizer.ggml.model": None}, ModelFileError, "no tokenizer"),
        ({"tokenizer.ggml.model": "bert"}, UnsupportedError, "'bert'"),
        ({"tokenizer.ggml.pre": "poro-chat"}, UnsupportedError, "'poro-chat'"),
        ({"tokenizer.ggml.merges": None}, ModelFileError, "merges is missing"),
        ({"tokenizer.ggml.merges": ["hello"]}, ModelFileError, "not a pair"),
        ({"tokenizer.ggml.merges": ["zz yy"]}, ModelFileError, "contradict"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, ModelFileError, "repeated"),
        ({"tokenizer.ggml.token_type": [3] * 999}, ModelFileError, "longer than the vocabulary"),
    ],
)
def test_a_wrong_tokenizer_is_named(change: dict[str, object], error: type[Exception], message: str) -> None:
    metadata = {**byte_level_metadata("gpt-2"), **change}
    with pytest.raises(error, match=message):
        build_tokenizer({key: value for key, value in metadata.items() if value is not None}, "test")


def test_sentence_piece_without_scores_is_refused() -> None:
    metadata = sentence_piece_metadata()
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(ModelFileError, match="scores"):
        build_tokenizer(metadata, "test")


# --- loading ---


def write_folder(path: Path, **config: object) -> Path:
    byte_tokenizer().save(str(path / "tokenizer.json"))
    settings = {
        "eos_token": {"__type": "AddedToken", "content": "<|end|>"},
        "bos_token": "<|start|>",
        **config,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return path


def test_a_folder_gives_what_transformers_gives(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, chat_template=TEMPLATE, tokenizer_class="PreTrainedTokenizerFast")
    ours, other = TextModel.load(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    messages = [{"role": "user", "content": "Hé, <|end|>?"}]
    prompt = ours.render_chat(messages, kwargs={"mood": "calm"})
    assert prompt == other.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, mood="calm"
    )
    assert ours.encode(str(prompt)) == other.encode(
        prompt
    )  # as a raw prompt; in a chat, users cannot end a turn
    assert (ours.bos_token_id, ours.eos_token_id, ours.vocab_size) == (256, END, 259)


TRUNCATION = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 40},
    "direction": "Left",
    "pad_to_multiple_of": None,
    "pad_id": END,
    "pad_type_id": 0,
    "pad_token": "<|end|>",
}


@pytest.mark.parametrize(
    "changes",
    [
        {"truncation": TRUNCATION},
        {"truncation": {**TRUNCATION, "direction": "Left"}, "padding": PADDING},
        {"padding": {**PADDING, "strategy": "BatchLongest"}},
        {"padding": {**PADDING, "strategy": "BatchLongest", "pad_to_multiple_of": 16}},
    ],
)
def test_a_tokenizer_neither_cuts_nor_fills_up(tmp_path: Path, changes: dict[str, object]) -> None:
    """Settings of a training, left in tokenizer.json, would make an answer to another question."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    content = json.loads(byte_tokenizer().to_str()) | changes
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    text, long, short = TextModel.load(tmp_path), "What is the capital of France?", "A"
    assert text.encode(long) == [*long.encode()]
    assert text.encode(short) == [*short.encode()]
    assert text.encode(long) == PreTrainedTokenizerFast.from_pretrained(tmp_path).encode(long)
    written = json.loads(text.tokenizer_json())
    assert (written["truncation"], written["padding"]) == (None, None)  # what is converted, too
    chat = TextModel(Tokenizer.from_str(json.dumps(content)), {}, TEMPLATE, "test")
    prompt = chat.render_chat([{"role": "user", "content": "say <|end|> once"}])
    assert len(chat.encode(prompt)) > 3 + len("say <|end|> once")  # by the guard's own copy


def test_a_tokenizer_splits_nothing_at_random(tmp_path: Path) -> None:
    model = models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")], dropout=0.9)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = TextModel.load(tmp_path)
    assert {tuple(text.encode("ab")) for _ in range(50)} == {(2,)}


def test_split_special_tokens_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"split_special_tokens": True}))
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedError, match="split_special_tokens = true"):
        TextModel.load(tmp_path)


def test_a_template_file_in_the_folder_comes_first_and_the_servers_own_before_it(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, chat_template="config")
    assert TextModel.load(folder).chat_template == "config"
    (folder / "chat_template.jinja").write_text("file")
    assert TextModel.load(folder).chat_template == "file"
    (own := tmp_path / "own.jinja").write_text("own")
    assert TextModel.load(folder, own).chat_template == "own"


def test_the_default_of_several_templates_is_taken(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    assert TextModel.load(write_folder(tmp_path, chat_template=named)).chat_template == "d"


def test_a_gguf_file_brings_tokenizer_and_template(tmp_path: Path) -> None:
    metadata = byte_level_metadata("smollm")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(metadata["tokenizer.ggml.eos_token_id"])
    writer.add_chat_template("{{ messages[0].content }}{{ eos_token }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = TextModel.load(tmp_path / "m.gguf")
    assert model.render_chat([{"role": "user", "content": "hi"}]) == "hi<|b|>"
    assert model.encode("hello 12") == SMOLLM.encode("hello 12").ids
    again = PreTrainedTokenizerFast(tokenizer_object=type(SMOLLM).from_str(model.tokenizer_json()))
    assert again.encode("hello 12<|b|>") == model.encode("hello 12<|b|>")


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ({}, ModelFileError, "no tokenizer.json"),
        ({"tokenizer.model": ""}, UnsupportedError, "only tokenizer.model"),
        ({"tokenizer.json": "{"}, ModelFileError, "not a valid tokenizer"),
    ],
)
def test_a_folder_without_a_usable_tokenizer(
    tmp_path: Path, files: dict[str, str], error: type[Exception], message: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(error, match=message):
        TextModel.load(tmp_path)


def test_template_files_that_cannot_be_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    with pytest.raises(ModelFileError, match=r"none\.jinja cannot be read: No such file or directory\.$"):
        TextModel.load(folder, tmp_path / "none.jinja")
    (bad := tmp_path / "bad.jinja").write_bytes(b"ab\xff")
    with pytest.raises(ModelFileError, match=r"cannot be read: byte 2 is not UTF-8\.$"):
        TextModel.load(folder, bad)
    (large := tmp_path / "large.jinja").write_bytes(b"x" * (1024 * 1024 + 1))
    with pytest.raises(ModelFileError, match="too large"):
        TextModel.load(folder, large)


def test_a_template_is_named_by_the_place_where_it_stands(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, chat_template="{{ nothing() }}")
    with pytest.raises(ModelFileError, match=r"tokenizer_config\.json \(chat_template\): the chat template"):
        TextModel.load(folder).check_template()
    (folder / "chat_template.jinja").write_text("{{ nothing() }}")
    with pytest.raises(ModelFileError, match=r"chat_template\.jinja: the chat template cannot render"):
        TextModel.load(folder).check_template()
    byte_text().check_template()
    byte_text(None).check_template()


def test_variables_of_a_client_that_a_template_cannot_take_are_the_clients_error() -> None:
    model = byte_text("{{ messages[0].content + (mood or '') }}")
    messages = [{"role": "user", "content": "hi"}]
    assert model.render_chat(messages, kwargs={"mood": "!"}) == "hi!"
    with pytest.raises(RequestError, match="TypeError") as caught:
        model.render_chat(messages, kwargs={"mood": 5})
    assert (caught.value.status, caught.value.param) == (400, "chat_template_kwargs")


def test_without_a_template_chats_are_refused() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        byte_text(None).render_chat([{"role": "user", "content": "hi"}])


def test_reserved_variables_cannot_be_set_by_a_client() -> None:
    for name in ("messages", "tools", "_firstlight_budget"):
        with pytest.raises(RequestError, match=name):
            byte_text().render_chat([{"role": "user", "content": "hi"}], kwargs={name: []})


def test_single_tokens_for_people() -> None:
    model = byte_text()
    assert model.token_text(0xE9) == r"\xe9"
    assert model.token_text(0x41) == "A"
    assert model.token_bytes(0xE9) == b"\xe9"
    assert model.encode("bc") == [98, 99]
