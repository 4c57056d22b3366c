"""A product that gives only some of its outputs: a head over a draft vocabulary, for example.

`Backend.only_outputs` makes it. Backends without a form of their own take the whole product and pick from it,
which is also the meaning of correct. Invariant: every value has the bits that the whole product gives it.

Shapes: T rows, O outputs of the whole product, I inputs, N outputs that are wanted.
"""

from __future__ import annotations

import torch

from firstlight.base.errors import UnsupportedError
from firstlight.ops.contract import LinearOp


class PickedOutputs:
    """See `contract.LinearOp`. The whole product, and then the wanted outputs of it in their order."""

    def __init__(self, whole: LinearOp, outputs_N: torch.Tensor) -> None:
        self._whole = whole
        self._outputs_N = outputs_N.to(torch.int64)
        self.layout = f"{whole.layout}; {len(outputs_N)} outputs picked from its result"
        self.num_bytes = 0  # the weight is the whole product's

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        out = self._whole(x_TI)
        return out.index_select(1, self._outputs_N.to(out.device))

    def rows(self, indices_T: torch.Tensor) -> torch.Tensor | None:
        return self._whole.rows(self._outputs_N[indices_T])


def check_outputs(outputs_N: torch.Tensor, num_outputs: int) -> None:
    """Raises `UnsupportedError` for an empty list, and for one that names an output that is not there."""
    if len(outputs_N) and int(outputs_N.min()) >= 0 and int(outputs_N.max()) < num_outputs:
        return
    what = f"numbers {int(outputs_N.min())} to {int(outputs_N.max())}" if len(outputs_N) else "nothing"
    raise UnsupportedError(
        f"a list of outputs names {what}, and the matrix has outputs 0 to {num_outputs - 1}",
        "A draft vocabulary (d2t) must fit the target model: use the drafter that was trained for it.",
    )


def pick(whole: LinearOp, outputs_N: torch.Tensor, num_outputs: int) -> PickedOutputs:
    """`Backend.only_outputs` of a backend without a form of its own."""
    check_outputs(outputs_N, num_outputs)
    return PickedOutputs(whole, outputs_N)
