"""Grouped linear layers: a weight for each group of rows, from declared tensors to one resident operator.

Parts of one group are stacked along its outputs, as in `linear`. Invariant: a group is laid out, and its raw
blocks dropped, as soon as its last part has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from firstlight.base.errors import UnsupportedError
from firstlight.facts.checkpoint.checkpoint import Checkpoint
from firstlight.loading.plan import Wanted
from firstlight.models.declare import Declaration
from firstlight.models.layers.linear import StoredMatrix, same_order, stack
from firstlight.ops.contract import GROUPED, Backend, MatrixKind
from firstlight.ops.groups import GroupedLinearOp
from firstlight.quant.weight import Weight


def require_order(ops: Backend, name: str, weight: Weight) -> None:
    """Refuses columns in an order that a backend does not know in products of groups and of heads."""
    if weight.order is not None and not ops.groups_take_order:
        module = name.removesuffix(".weight")
        raise UnsupportedError(
            f"the weight of {module} has columns in another order than their groups (GPTQ's desc_act), which "
            "our own kernels do not take for experts, nor for the heads of latent attention.",
            "Serve it with --cpu-kernels stock, or use a file made without desc_act.",
        )


class GroupedLinear:
    """`groups[g]`: the tensors that make up the weight of group g."""

    def __init__(self, declare: Declaration, groups: Sequence[Sequence[Wanted]]) -> None:
        self._groups, self._ops = groups, declare.ops
        self.operator: GroupedLinearOp = declare.ops.grouped_linear(len(groups))
        self._arrived: dict[int, dict[str, Weight]] = {}
        self._format: str | None = None
        declare.will_lay_out(self._kinds)
        for group, parts in enumerate(groups):
            for part in parts:
                declare.want(part, partial(self._take, group, part))

    def _kinds(self, checkpoint: Checkpoint) -> list[MatrixKind]:
        kinds = []
        for parts in self._groups:
            facts = checkpoint.tensors.get(parts[0].name)
            if facts is None:
                return []  # the reader will say which tensor is missing
            outputs = sum(part.slice_shape[0] for part in parts)
            kinds.append(MatrixKind(GROUPED, facts.format, (outputs, parts[0].slice_shape[1])))
        return kinds

    def _take(self, group: int, part: Wanted, weight: Weight) -> None:
        self._format = self._format or weight.format
        if weight.format != self._format:
            raise UnsupportedError(
                f"the tensor {part.name} has the format {weight.format}, and other experts of its layer have "
                f"{self._format}.",
                "Use a checkpoint whose experts all have one format.",
            )
        require_order(self._ops, part.name, weight)
        arrived = self._arrived.setdefault(group, {})
        arrived[part.name] = weight
        if len(arrived) == len(self._groups[group]):
            del self._arrived[group]
            weights = [arrived[wanted.name] for wanted in self._groups[group]]
            if not all(same_order(weights[0], one) for one in weights):
                modules = " and ".join(wanted.name.removesuffix(".weight") for wanted in self._groups[group])
                raise UnsupportedError(
                    f"the weights of {modules} have their columns in different orders (GPTQ's desc_act), and "
                    "are multiplied together.",
                    "Use a file made without desc_act.",
                )
            self.operator.put(group, StoredMatrix(stack(weights)))
