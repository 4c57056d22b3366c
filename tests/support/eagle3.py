"""EAGLE-3 drafters in engines, and what they must have and draft: as from the text in one piece.

`Pair` is an engine with a drafter and, beside it, one that sees each text whole. `Checked` compares the two
at every proposal: states, keys and values of the sequence's slots, and drafts. Invariant: the comparison
uses nothing that the engine under test has kept.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from pathlib import Path
from typing import Any

import numpy as np
import torch

from firstlight.engine.messages import Submit
from firstlight.engine.params import SamplingParams
from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.scheduler.sequence import Sequence
from firstlight.engine.speculation.drafter import Drafter, Tree, TreeDrafter
from firstlight.engine.speculation.eagle3 import Eagle3TreeDrafter
from firstlight.engine.speculation.eagle3_native import NativeLayer
from firstlight.engine.speculation.places import slots_of
from firstlight.engine.speculation.shape import Shape
from firstlight.models.eagle3 import Eagle3Drafter
from firstlight.models.eagle3_file import save_eagle3
from support.checkpoints import random_weights, tiny_description, write_hf_folder
from support.drafters import random_drafter
from support.engines import Harness, Result
from support.knowing import KnowingTrees

VOCABULARY, LENGTH, NUM = 96, 128, 3
DESCRIPTION = tiny_description(num_layers=4, vocab_size=VOCABULARY, max_position=LENGTH)
SIZES: dict[str, Any] = {"max_num_seqs": 8, "max_batched_tokens": 64, "page_size_tokens": 4}
Make = Callable[[Eagle3TreeDrafter], Drafter]


def write_pair(folder: Path, **changes: Any) -> tuple[Path, Path]:
    """A tiny target and a random drafter for it."""
    target = write_hf_folder(folder / "target", DESCRIPTION, random_weights(DESCRIPTION))
    drafter = tiny_eagle3(**changes)
    (folder / "drafter").mkdir()
    save_eagle3(folder / "drafter", drafter, torch.float32)
    return target, folder / "drafter"


def tiny_eagle3(**changes: Any) -> Eagle3Drafter:
    """Of the widths that our own kernels take."""
    sizes = {
        "hidden_size": 64,
        "target_hidden_size": 64,
        "head_size": 16,
        "intermediate_size": 96,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": 40,
        "max_position": LENGTH,
        "state_layers": (1, 2, 4),
    }
    return random_drafter(5, **{**sizes, **changes}).requires_grad_(False)


class Checked:
    """Lets `knowing` draft, and keeps what the drafter under test has and would have drafted."""

    name = "checked"
    is_model = False

    def __init__(self, drafter: Eagle3TreeDrafter, told: Drafter, knowing: KnowingTrees, pair: Pair) -> None:
        self._drafter, self._told, self._knowing, self._pair = drafter, told, knowing, pair
        self.layers = drafter.layers
        self.num_seen = 0

    def observe(self, plan: StepPlan, sequences: Rows[Sequence]) -> None:
        self._told.observe(plan, sequences)

    def propose(self, sequences: Rows[Sequence], num: int) -> list[list[int]]:
        self._check(sequences)
        return self._knowing.propose(sequences, num)

    def propose_trees(self, sequences: Rows[Sequence], shape: Shape) -> list[Tree]:
        self._check(sequences)
        return self._knowing.propose_trees(sequences, shape)

    def moved(self, from_slots: Rows[int], to_slots: Rows[int]) -> None:
        if isinstance(self._told, TreeDrafter):
            self._told.moved(from_slots, to_slots)

    def _check(self, sequences: Rows[Sequence]) -> None:
        drafts = self._drafter.propose(sequences, NUM)
        for sequence, mine in zip(sequences, drafts, strict=True):
            if sequence.num_tokens > 1:
                self._pair.check(self._drafter, sequence, mine)
                self.num_seen += 1


class Pair:
    """See the module. `dtype` float32: the plain layer; auto: our own kernels."""

    def __init__(self, target: Path, drafter: Path, dtype: str = "float32", **sizes: Any) -> None:
        options = {
            **SIZES,
            "drafter": str(drafter),
            "draft_tokens": NUM,
            "cpu_kernels": "native",
            "dtype": dtype,
        }
        self.engine = Harness(target, **{**options, **sizes})
        trees = {name: sizes[name] for name in ("draft_top_k", "draft_nodes") if name in sizes}
        self._beside = Harness(target, **{**options, **trees, "max_batched_tokens": LENGTH})
        self.num_cached = 0

    @property
    def drafter(self) -> Eagle3TreeDrafter:
        found = self.engine.started.drafter
        assert isinstance(found, Eagle3TreeDrafter)
        return found

    def run(
        self,
        submits: list[Submit],
        answers: dict[str, Result],
        wrong: float = 0.3,
        told: Make = lambda drafter: drafter,
        tree: Shape | None = None,
    ) -> int:
        """Runs with checked drafts, and gives the number of checks. `told`: who hears of steps."""
        known = {name: result.tokens for name, result in answers.items()}
        knowing = KnowingTrees(known, VOCABULARY, wrong)
        checked = Checked(self.drafter, told(self.drafter), knowing, self)
        self.engine.draft_with(checked, NUM, tree)
        results = self.engine.run(submits)
        assert [name for name in results if results[name].tokens != answers[name].tokens] == []
        self.num_cached = sum(result.num_cached_tokens for result in results.values())
        return checked.num_seen

    def check(self, drafter: Eagle3TreeDrafter, sequence: Sequence, drafts: list[int]) -> None:
        """Asserts that a sequence's slots hold what its text gives, and the drafts are that text's."""
        num = sequence.num_tokens - 1
        whole = self.whole(sequence.tokens, sequence.params)
        size = self.engine.started.section.page_size_tokens
        mine = _content(drafter, slots_of(sequence.pages, num, size))
        right = _content(self.other, slots_of(whole.pages, num, size))
        # Our own kernels are row-invariant; plain products are not.
        most = 0.0 if isinstance(drafter._layer, NativeLayer) else 1e-4
        for name, (ours, theirs) in {k: (mine[k], right[k]) for k in mine}.items():
            torch.testing.assert_close(ours, theirs, rtol=0, atol=most, msg=f"{name} of {sequence.tokens}")
        assert drafts == self.other.propose([whole], NUM)[0], sequence.tokens

    def whole(self, tokens: list[int], params: SamplingParams) -> Sequence:
        """The engine beside runs all but the last token in one piece; a sequence that lies so."""
        num, size = len(tokens) - 1, self.engine.started.section.page_size_tokens
        sequence = Sequence(Submit("whole", list(tokens), params), 0, frozenset(), LENGTH)
        sequence.pages = list(range(1, -(-num // size) + 1))
        plan = StepPlan(0, [0], [0], [num], tokens[:-1], [num - 1], [(0, 0, sequence.pages)])
        self._beside.started.runner.run(plan)
        self.other.observe(plan, [sequence])
        return sequence

    @property
    def embedding(self) -> Any:
        """The target's."""
        return self._beside.started.runner.replay._model.embedding  # type: ignore[union-attr]

    @property
    def states(self) -> torch.Tensor:
        """Of the text that was last run `whole`."""
        return self._beside.started.runner.states.clone()

    @property
    def other(self) -> Eagle3TreeDrafter:
        found = self._beside.started.drafter
        assert isinstance(found, Eagle3TreeDrafter)
        return found


def _content(drafter: Eagle3TreeDrafter, slots: np.ndarray) -> dict[str, torch.Tensor]:
    """What stands in the slots; a first token has no keys, because there is no state before it."""
    drafter.catch_up()
    layer: Any = drafter._layer
    keys, values = (layer.keys, layer.values) if not isinstance(layer, NativeLayer) else _first(layer)
    places = torch.from_numpy(slots)
    return {"states": layer.states[places], "keys": keys[places[1:]], "values": values[places[1:]]}


def _first(layer: NativeLayer) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.pool.keys[0], layer.pool.values[0]
