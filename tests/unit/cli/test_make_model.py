"""`firstlight make-model`: names and nesting as published, the size that was asked for, refusals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors import safe_open
from typer.testing import CliRunner

from firstlight.cli.main import make_app
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.models.packed_experts import PackedExperts
from firstlight.text.model import TextModel
from support.engines import Harness, submit
from support.serving import byte_tokenizer, write_tokenizer

SMALL = ["--layers", "3", "--experts", "8"]


def make(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(make_app(), ["make-model", *arguments])
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("made")
    (made / "other").mkdir()
    write_tokenizer(made / "other", byte_tokenizer())
    code, output = make(
        "kimi-k2.5", str(made / "kimi"), "--size", "2M", "--tokenizer", str(made / "other"), *SMALL
    )
    assert code == 0, output
    return made / "kimi"


def test_names_and_nesting_are_those_of_the_published_model(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "kimi_k25"
    assert config["text_config"]["model_type"] == "kimi_k2"
    assert config["text_config"]["architectures"] == ["DeepseekV3ForCausalLM"]
    with safe_open(folder / "model.safetensors", "pt") as file:
        types = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    of_layer = "language_model.model.layers.2."
    for name in (
        "language_model.lm_head.weight",
        "language_model.model.embed_tokens.weight",
        "language_model.model.layers.0.mlp.gate_proj.weight",
        f"{of_layer}self_attn.kv_a_proj_with_mqa.weight",
        "language_model.model.layers.1.mlp.gate.weight",
        f"{of_layer}mlp.shared_experts.up_proj.weight",
    ):
        assert types[name] == "BF16", name
    assert types[f"{of_layer}mlp.gate.e_score_correction_bias"] == "F32"
    packed = {"packed": "I32", "scale": "BF16", "shape": "I32"}
    assert {word: types[f"{of_layer}mlp.experts.7.down_proj.weight_{word}"] for word in packed} == packed


def test_experts_stand_for_what_was_drawn_to_half_a_step() -> None:
    """Read by the format's own library."""
    values = torch.randn(48, 96, generator=torch.Generator().manual_seed(0))
    packing, name = PackedExperts(torch.bfloat16), "model.layers.1.mlp.experts.0.up_proj.weight"
    stored = packing.pack(name, values)
    assert {key: (t.dtype, tuple(t.shape)) for key, t in stored.items()} == packing.written(name, (48, 96))
    codes = unpack_from_int32(stored[f"{name}_packed"], 4, torch.Size(values.shape)).float()
    scales = stored[f"{name}_scale"].float()
    meant = codes.unflatten(1, (-1, 32)) * scales[..., None]
    assert ((meant - values.unflatten(1, (-1, 32))).abs() <= 0.51 * scales[..., None]).all()


def test_without_a_tokenizer_it_has_one_of_its_own_kind(tmp_path: Path) -> None:
    """Served as it is: it ends at <|im_end|>, as config.json says, and at the tokenizer's own [EOS]."""
    code, output = make("kimi-k2.5", str(tmp_path / "kimi"), "--size", "2M", *SMALL)
    assert code == 0, output
    files = {path.name for path in (tmp_path / "kimi").iterdir()}
    assert {"tiktoken.model", "tokenizer_config.json", "chat_template.jinja"} <= files
    text = TextModel.load(tmp_path / "kimi")
    description = open_checkpoint(tmp_path / "kimi").description
    assert description.vocab_size == text.vocab_size
    assert set(description.eos_token_ids) == {text.token_id("<|im_end|>"), text.token_id("[EOS]")}
    config = json.loads((tmp_path / "kimi" / "config.json").read_text())
    assert config["eos_token_id"] == text.token_id("<|im_end|>")


def test_it_is_as_large_as_was_asked_for_and_runs(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert 1_000_000 < checkpoint.total_bytes <= 2 * 2**20
    assert checkpoint.description.vocab_size == byte_tokenizer().get_vocab_size()
    result = Harness(folder).run([submit("a", range(3, 30), max_tokens=5, ignore_eos=True)])["a"]
    assert len(result.tokens) == 5


def test_what_cannot_be_made_is_said(tmp_path: Path) -> None:
    for arguments, words in (
        (["llama", "new"], "no shape 'llama'"),
        (["kimi-k2.5", str(tmp_path)], "exists already"),
        (["kimi-k2.5", "new", "--dtype", "q4"], "dtype 'q4'"),
        (["kimi-k2.5", "new", "--packing", "int3"], "no packing 'int3'"),
        (["kimi-k2.5", "new", "--size", "many"], "'many' is not a size"),
        (["kimi-k2.5", "new", "--size", "10K"], "larger --size"),
    ):
        code, output = make(*arguments)
        assert code != 0
        assert words in " ".join(output.split()), output


def test_a_disk_without_room_is_noticed_before_writing(tmp_path: Path) -> None:
    code, output = make("kimi-k2.5", str(tmp_path / "big"), "--size", "90000G")
    assert code == 5, output
    assert "free; the model needs" in " ".join(output.split())
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for target in ("/proc/x", str(tmp_path / "file" / "x")):
        code, output = make("kimi-k2.5", target, "--size", "2M", *SMALL)
        assert code == 2, output
        words = " ".join(output.split())
        assert f"The folder {target} cannot be made: " in words
        assert "Give a folder where you may write." in words


def test_sigterm_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "firstlight", "make-model", "kimi-k2.5", str(tmp_path / "big")]
    with subprocess.Popen([*command, "--size", "1G"], stderr=subprocess.DEVNULL) as process:
        deadline_s = time.monotonic() + 60.0
        while not any(tmp_path.glob(".big.partial-*/model*")) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60.0) == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())
