"""Writes the descriptions of models that `firstlight plan` knows by name: src/firstlight/facts/built_in.

Names, types and shapes of all tensors follow from the published configuration by the rules of
`firstlight.facts.planning.declared`; the parts of Kimi-K2.5 that see images stand here, as their sizes are no
part of a language model's description. Run it after a change of either: `python
benchmarks/describe_headers.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from firstlight.facts.checkpoint.weight_schemes import read_scheme
from firstlight.facts.planning.declared import declared_rows
from firstlight.facts.planning.outline import describe
from firstlight.facts.planning.tensor_groups import HeaderRow

TARGET = Path(__file__).parents[1] / "src" / "firstlight" / "facts" / "built_in"

KIMI_TEXT: dict[str, Any] = {
    "model_type": "kimi_k2",
    "architectures": ["DeepseekV3ForCausalLM"],
    "torch_dtype": "bfloat16",
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-05,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 32,
                },
            }
        },
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        ],
    },
}
KIMI: dict[str, Any] = {
    "title": "Kimi-K2.5 in INT4 (experts in groups of 32, all else bf16)",
    "num_files": 64,
    "config": {"model_type": "kimi_k25", "text_config": KIMI_TEXT},
}
VISION_SIZE, VISION_INNER, VISION_LAYERS, PATCH, POSITIONS = 1152, 4304, 27, 14, 64


def kimi_vision() -> list[HeaderRow]:
    """MoonViT and the projector into the language model."""
    size, merged, hidden = VISION_SIZE, 4 * VISION_SIZE, int(KIMI_TEXT["hidden_size"])
    block = f"vision_tower.encoder.blocks.{{0-{VISION_LAYERS - 1}}}"
    linear = {
        f"{block}.wqkv": (3 * size, size),
        f"{block}.wo": (size, size),
        f"{block}.mlp.fc0": (VISION_INNER, size),
        f"{block}.mlp.fc1": (size, VISION_INNER),
        "mm_projector.proj.0": (merged, merged),
        "mm_projector.proj.2": (hidden, merged),
    }
    norms = (
        f"{block}.norm0",
        f"{block}.norm1",
        "vision_tower.encoder.final_layernorm",
        "mm_projector.pre_norm",
    )
    rows = [
        HeaderRow("vision_tower.patch_embed.proj.weight", "BF16", (size, 3, PATCH, PATCH)),
        HeaderRow("vision_tower.patch_embed.proj.bias", "BF16", (size,)),
        HeaderRow("vision_tower.patch_embed.pos_emb.weight", "BF16", (POSITIONS, POSITIONS, size)),
    ]
    for name, shape in linear.items():
        rows.append(HeaderRow(f"{name}.weight", "BF16", shape))
        rows.append(HeaderRow(f"{name}.bias", "BF16", shape[:1]))
    rows += [HeaderRow(f"{name}.{{weight,bias}}", "BF16", (size,)) for name in norms]
    return rows


def rows_of(model: dict[str, Any]) -> list[HeaderRow]:
    """All rows of a model's headers, by the rules."""
    description = describe(model["config"], "config")
    rows = declared_rows(description, read_scheme(model["config"], "config"), "language_model.")
    return rows + kimi_vision()


def text_of(model: dict[str, Any]) -> str:
    """The file, one row of headers a line."""
    head = json.dumps(model, indent=1)[:-2]
    rows = ",\n".join(
        "  " + json.dumps({"name": row.name, "dtype": row.dtype, "shape": row.shape})
        for row in rows_of(model)
    )
    return f'{head},\n "headers": [\n{rows}\n ]\n}}\n'


if __name__ == "__main__":
    TARGET.mkdir(exist_ok=True)
    (TARGET / "kimi-k2.5.json").write_text(text_of(KIMI))
