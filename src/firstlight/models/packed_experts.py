"""Routed experts in four bits, as Kimi-K2.5 is published: compressed-tensors "pack-quantized", groups of 32.

A `random_model.Packing`; used by `firstlight make-model` and by tests. Invariant: attention, shared experts,
dense layers and both ends are written as they are, and so is said in config.json.

A group's scale is the bfloat16 that its largest value reaches 7 with; codes go from -8 to 7.
"""

from __future__ import annotations

from typing import Any

import torch

from firstlight.models.random_model import Unpacked

GROUP, CODES_OF_WORD = 32, 8
IGNORED = (
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
)
_WEIGHT = ".weight"


class PackedExperts(Unpacked):
    """See the module. `dtype`: of all that is not packed."""

    def config(self) -> dict[str, Any]:
        weights = {
            "num_bits": 4,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": GROUP,
            "actorder": None,
            "dynamic": False,
        }
        group = {"targets": ["Linear"], "weights": weights}
        return {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"group_0": group},
                "ignore": list(IGNORED),
                "kv_cache_scheme": None,
                "quantization_status": "compressed",
            }
        }

    def written(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        if not _is_packed(name):
            return super().written(name, shape)
        outputs, inputs = shape
        return {
            f"{name}_packed": (torch.int32, (outputs, inputs // CODES_OF_WORD)),
            f"{name}_scale": (torch.bfloat16, (outputs, inputs // GROUP)),
            f"{name}_shape": (torch.int32, (2,)),
        }

    def pack(self, name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
        if not _is_packed(name):
            return super().pack(name, values)
        groups = values.unflatten(1, (-1, GROUP))
        scales = (groups.abs().amax(-1) / 7.0).clamp(min=1e-8).to(torch.bfloat16)
        codes = (groups / scales.float()[..., None]).round().clamp(-8, 7).to(torch.int32) + 8
        words = torch.zeros(*codes.shape[:2], GROUP // CODES_OF_WORD, dtype=torch.int32)
        for place in range(CODES_OF_WORD):
            words |= codes[..., place::CODES_OF_WORD] << 4 * place  # the eighth one sets the sign
        return {
            f"{name}_packed": words.flatten(1),
            f"{name}_scale": scales,
            f"{name}_shape": torch.tensor(values.shape, dtype=torch.int32),
        }


def _is_packed(name: str) -> bool:
    return ".experts." in name and name.endswith(_WEIGHT)
