"""How a model says which tensors it needs: layers declare them while they are built, the loader fills them.

A `Declaration` is made by `engine.worker.startup`, handed down through the constructors of a model, and then
delivers each weight to the layer that declared it, as soon as it is read. Invariant: each name is declared
once and delivered once; `finish` fails if anything is missing.
"""

from __future__ import annotations

from collections.abc import Callable

from firstlight.facts.checkpoint.checkpoint import Checkpoint
from firstlight.loading.plan import Wanted
from firstlight.ops.collectives import Group
from firstlight.ops.contract import Backend, MatrixKind
from firstlight.quant.weight import Weight

Sink = Callable[[Weight], None]
Kinds = Callable[[Checkpoint], list[MatrixKind]]


class Declaration:
    """Collects what the layers want. `ops` and `group` are what the layers will run on.

    `on_layer` hears how many layers are built, of how many. `expert_parallel`: each rank of the group holds
    whole experts.
    """

    def __init__(
        self,
        ops: Backend,
        group: Group,
        on_layer: Callable[[int, int], None] = lambda done, total: None,
        *,
        expert_parallel: bool = False,
    ) -> None:
        self.ops = ops
        self.group = group
        self.expert_parallel = expert_parallel
        self.on_layer = on_layer
        self._sinks: dict[str, tuple[Wanted, Sink]] = {}
        self._delivered: set[str] = set()
        self.of_others: set[str] = set()  # tensors of the model that other ranks hold
        self._kinds: list[Kinds] = []

    @property
    def wanted(self) -> list[Wanted]:
        return [wanted for wanted, _ in self._sinks.values()]

    def want(self, wanted: Wanted, sink: Sink) -> None:
        if wanted.name in self._sinks:
            raise ValueError(f"two layers want the tensor {wanted.name}")
        self._sinks[wanted.name] = (wanted, sink)

    def will_lay_out(self, kinds: Kinds) -> None:
        """A linear layer announces the matrices it will lay out, given the formats in the checkpoint."""
        self._kinds.append(kinds)

    def kinds(self, checkpoint: Checkpoint) -> list[MatrixKind]:
        """The kind of each matrix that this model will lay out."""
        return [kind for kinds in self._kinds for kind in kinds(checkpoint)]

    def deliver(self, wanted: Wanted, weight: Weight) -> None:
        assert wanted.name not in self._delivered, f"{wanted.name} was delivered twice"
        self._delivered.add(wanted.name)
        self._sinks[wanted.name][1](weight)

    def finish(self) -> None:
        missing = self._sinks.keys() - self._delivered
        assert not missing, f"the reader did not deliver {sorted(missing)[:3]}"
