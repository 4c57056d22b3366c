"""Operators for one CUDA device, of stock PyTorch: bfloat16 weights and KV, scaled_dot_product_attention.

Picked by `--device cuda`. The same models and the same engine run on it as on a CPU. With `--dtype float32`
it keeps everything in float32. Written so that its arithmetic also runs on a CPU device, where tests compare
it with the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from firstlight.base.errors import ResourceError, UnsupportedError
from firstlight.ops import padded_attention
from firstlight.ops.contract import ROUTER, AttentionShape, LinearOp, MatrixKind, StepRows
from firstlight.ops.expert_layer import ByOperators
from firstlight.ops.groups import HeadsOp
from firstlight.ops.heads import HeadsByBatch
from firstlight.ops.kv_rows import name_of, refused
from firstlight.ops.matrix import Matrix


class CudaLinear:
    """y = x W^T with a dense weight in the compute type."""

    def __init__(self, weight_OI: torch.Tensor, *, float_result: bool) -> None:
        self.weight_OI = weight_OI
        self.layout = str(weight_OI.dtype).removeprefix("torch.")
        self.num_bytes = weight_OI.numel() * weight_OI.element_size()
        self._float_result = float_result

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self._float_result and self.weight_OI.dtype != torch.float32:
            # Logits rounded to bfloat16 would tie; tensor cores sum in float32 and can return it.
            return torch.mm(x_TI.to(self.weight_OI.dtype), self.weight_OI.t(), out_dtype=torch.float32)
        return F.linear(x_TI.to(self.weight_OI.dtype), self.weight_OI)

    def rows(self, indices_T: torch.Tensor) -> torch.Tensor:
        return self.weight_OI.index_select(0, indices_T).float()


class CudaBackend(ByOperators):
    """See `contract.Backend`."""

    name = "cuda"
    row_invariant = False

    def __init__(self, reason: str, device: torch.device, dtype: torch.dtype) -> None:
        self.reason = reason
        self.device = device
        self.key_dtype = self.value_dtype = dtype

    @classmethod
    def open(cls, dtype: str, rank: int, kv_dtype: str = "auto") -> CudaBackend:
        """The backend on this rank's device. Raises with the remedy where there is none."""
        compute = torch.float32 if dtype == "float32" else torch.bfloat16
        if kv_dtype not in ("auto", name_of(compute)):
            where = f"--device cuda keeps keys and values as it computes, in {name_of(compute)}"
            raise refused(kv_dtype, where, "Use --kv-dtype auto, or --device cpu.")
        if not torch.backends.cuda.is_built():
            raise UnsupportedError(
                f"--device cuda: this build of torch ({torch.__version__}) has no CUDA support",
                "Install a CUDA build of torch (TORCH_SPEC for make), or use --device cpu.",
            )
        num_devices = torch.cuda.device_count()
        if rank >= num_devices:
            raise ResourceError(
                f"--device cuda: rank {rank} needs a device of its own, and {num_devices} are visible",
                "Lower --tensor-parallel, or check CUDA_VISIBLE_DEVICES and the driver with nvidia-smi.",
            )
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        name = torch.cuda.get_device_name(device)
        return cls(f"--device cuda: {name}, computing in {compute}", device, compute)

    def prepare(self, kinds: Sequence[MatrixKind], *, two_copies: bool) -> None:
        pass  # one layout: dense in the compute type

    def resident_bytes(self, kind: MatrixKind) -> int:
        itemsize = 4 if kind.role == ROUTER else self.key_dtype.itemsize
        return kind.shape[0] * kind.shape[1] * itemsize

    def layout_notes(self) -> list[str]:
        return [f"every matrix: dense {self.key_dtype}"]

    def linear(self, weight: Matrix, *, role: str) -> LinearOp:
        # Converted on the host, so that the device never holds the float32 form.
        dtype = torch.float32 if role == ROUTER else self.key_dtype
        dense = weight.dequantize().to(dtype).to(self.device)
        return CudaLinear(dense, float_result=role == "head")

    def heads_linear(self, weights: Sequence[Matrix]) -> HeadsOp:
        return HeadsByBatch(weights, self.key_dtype, self.device)

    def rms_norm(self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        return x_TH * torch.rsqrt(x_TH.square().mean(-1, keepdim=True) + eps) * weight_H

    def rotate(self, x_TND: torch.Tensor, turn_TD: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x_TND.unflatten(-1, (-1, 2)).contiguous())
        turned = pairs * torch.view_as_complex(turn_TD).unsqueeze(1)
        return torch.view_as_real(turned).flatten(-2)

    def gated_silu(self, gate_up_TO: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up_TO.chunk(2, -1)
        return F.silu(gate) * up

    def plan_attention(self, rows: StepRows, shape: AttentionShape) -> list[padded_attention.Batch]:
        return padded_attention.plan(rows, shape, list(range(len(rows.counts))), self.device)

    def attend(
        self, q_TND: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: Any
    ) -> torch.Tensor:
        out = q_TND.new_empty(*q_TND.shape[:2], plan[0].shape.out_size)
        padded_attention.attend(q_TND, keys, values, plan, out)
        return out
