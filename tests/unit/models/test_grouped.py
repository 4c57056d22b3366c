"""Weights of experts and of heads whose columns lie in another order than their groups (GPTQ's desc_act)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace as changed
from safetensors.torch import load_file, save_file

from firstlight.base.errors import UnsupportedError
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.loading.plan import Wanted
from firstlight.loading.reader import read_tensors
from firstlight.models.declare import Declaration
from firstlight.models.layers.grouped import GroupedLinear
from firstlight.models.layers.latent import Expanding
from firstlight.models.registry import find
from firstlight.ops.collectives import Group
from firstlight.ops.contract import Backend
from firstlight.ops.cpu.backend import CpuBackend
from firstlight.ops.cpu.library import open_library, open_pool
from firstlight.ops.cpu.native_backend import NativeBackend
from support.experts import SOFTMAX, description_of, write_experts
from support.operators import matrix, random_values
from support.quantised import RECIPES


@pytest.fixture(scope="module")
def native() -> NativeBackend:
    return NativeBackend(open_pool(open_library(), 1))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Experts are stored so, and nothing else."""
    experts = changed(SOFTMAX, num=2, inner_size=256)
    write_experts(tmp_path, description_of("qwen3_moe", num_layers=1, hidden_size=256, experts=experts))
    recipe, config = RECIPES["gptq desc_act"], json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": recipe.config}))
    tensors: dict[str, torch.Tensor] = {}
    for name, values in load_file(tmp_path / "model.safetensors").items():
        if ".experts." in name:
            module = name.removesuffix("weight")
            tensors |= {module + word: tensor for word, tensor in recipe.store(values)[0].items()}
        else:
            tensors[name] = values
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    return tmp_path


def load(folder: Path, ops: Backend) -> None:
    checkpoint = open_checkpoint(folder)
    declare = Declaration(ops, Group())
    find(checkpoint.description.architecture)(declare, checkpoint.description)
    read_tensors(checkpoint, declare.wanted, declare.deliver)
    declare.finish()


def test_our_own_kernels_refuse_such_experts_by_name_and_with_a_remedy(
    folder: Path, native: NativeBackend
) -> None:
    module = r"model\.layers\.0\.mlp\.experts\.\d\.(gate|up|down)_proj has columns in another order"
    with pytest.raises(UnsupportedError, match=module) as caught:
        load(folder, native)
    assert "--cpu-kernels stock" in caught.value.hint
    assert "without desc_act" in caught.value.hint


def test_the_remedy_works(folder: Path) -> None:
    load(folder, CpuBackend("test"))


def test_parts_of_one_expert_in_different_orders_are_named() -> None:
    declare = Declaration(CpuBackend("test"), Group())
    gate, up = (Wanted.whole(f"experts.7.{name}.weight", (32, 64)) for name in ("gate_proj", "up_proj"))
    GroupedLinear(declare, [[gate, up]])
    stored = matrix(random_values(32, 64), "INT4")._weight
    declare.deliver(gate, stored)
    with pytest.raises(UnsupportedError, match=r"experts\.7\.gate_proj and experts\.7\.up_proj") as caught:
        declare.deliver(up, replace(stored, order=torch.arange(64).flip(0)))
    assert "without desc_act" in caught.value.hint


def test_heads_of_latent_attention_are_named_too(native: NativeBackend) -> None:
    declare = Declaration(native, Group())
    wanted = Wanted.whole("model.layers.3.self_attn.kv_b_proj.weight", (64, 64))
    Expanding(declare, wanted, 16, 16)
    stored = replace(matrix(random_values(64, 64), "INT4")._weight, order=torch.arange(64).flip(0))
    with pytest.raises(UnsupportedError, match=r"layers\.3\.self_attn\.kv_b_proj has columns"):
        declare.deliver(wanted, stored)
