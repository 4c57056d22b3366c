"""A draft model from its file or folder: opened before the target is loaded, and loaded after.

Invariant: token ids mean the same to it and to the target, or it is refused.
"""

from __future__ import annotations

from pathlib import Path

from msgspec import structs

from firstlight.base.draft_tree import refuse_trees
from firstlight.base.errors import UnsupportedError
from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.speculation.draft_model import DraftModelDrafter
from firstlight.engine.speculation.host import Extra, Host
from firstlight.engine.speculation.places import Places
from firstlight.engine.speculation.shape import Shape
from firstlight.engine.worker.assemble import load_weights, make_runner
from firstlight.engine.worker.kv_pool import KVPool, token_row_bytes
from firstlight.engine.worker.not_numbers import Inspection
from firstlight.facts.checkpoint.checkpoint import Checkpoint, open_checkpoint
from firstlight.facts.planning.memory_budget import kv_bytes_per_token
from firstlight.loading.ties import settle_ties
from firstlight.models.declare import Declaration
from firstlight.models.layers.attention import attention_shape
from firstlight.models.registry import find
from firstlight.ops.collectives import Group
from firstlight.ops.contract import Backend
from firstlight.ops.cpu.native_backend import NativeBackend
from firstlight.ops.cpu.native_selection import NativeSelection
from firstlight.ops.selection import TorchSelection
from firstlight.text.model import TextModel

_PROBES = ("The quick brown fox, 12345 times.\n\n", "    def f(x):\n\treturn x", "Größe, naïve, 数, 🙂")
_ONE_TOKEN = StepPlan(0, [0], [0], [1], [0], [0], [(0, 0, [1])])
_SAME_TOKENIZER = "Use a draft model of the same family, with the target's own tokenizer."


class DraftModelDrafting:
    """A draft model that was opened."""

    layers = ()

    def __init__(self, checkpoint: Checkpoint, target: Checkpoint) -> None:
        self._checkpoint, self._target = checkpoint, target
        self.words = f"a model of its own, {checkpoint.description.architecture}"
        formats = ", ".join(checkpoint.formats)
        self.notes: tuple[str, ...] = (f"a model of its own: {checkpoint.path} ({formats})",)

    @classmethod
    def read(cls, path: Path, target: Checkpoint) -> DraftModelDrafting:
        """Opens it for a target. Raises the checkpoint's errors, and `UnsupportedError` for other tokens."""
        checkpoint = settle_ties(open_checkpoint(path))
        require_same_tokens(TextModel.load(path), TextModel.load(target.path), path)
        return cls(checkpoint, target)

    def check(self, shape: Shape) -> None:
        """See `Drafting`."""
        refuse_trees(shape.top_k, "a draft model")

    def extra(self, ops: Backend) -> Extra:
        """What it takes beside the target: of each token, and for its weights."""
        description = self._checkpoint.description
        shape = attention_shape(description, 0, 1)
        table_bytes = 2 * description.vocab_size * description.hidden_size
        weight_bytes = self._checkpoint.total_bytes + table_bytes
        rows = token_row_bytes(shape, ops)
        return Extra(kv_bytes_per_token(description, rows, shape.num_kv_heads), weight_bytes)

    def make(self, host: Host) -> DraftModelDrafter:
        """Loads it over the numbers of the target's pages. Raises `ModelFileError` for weights that are no
        numbers."""
        ops, description = host.ops, self._checkpoint.description
        alone = Group()
        declare = Declaration(ops, alone)
        decoder = find(description.architecture)(declare, description)
        ops.prepare(list(dict.fromkeys(declare.kinds(self._checkpoint))), two_copies=False)
        load_weights(self._checkpoint, declare, lambda done, total: None)
        num_slots = host.num_slots + host.num_scratch
        pool = KVPool(description.num_layers, num_slots, attention_shape(description, 0, 1), ops)
        # Its tables name a slot for each token, so that drafts can lie anywhere.
        section = structs.replace(host.section, page_size_tokens=1, max_model_len=host.max_positions)
        runner = make_runner(decoder, ops, pool, section, alone)
        if not bool(runner.run(_ONE_TOKEN).isfinite().all()):
            Inspection(self._checkpoint).look()  # its drafts would never be right, and nobody would know why
        pool.zero_null_page(host.section.page_size_tokens)
        places = Places(host.num_slots, host.shape.num_expanded, host.section.page_size_tokens)
        selection = NativeSelection(ops.pool) if isinstance(ops, NativeBackend) else TorchSelection()
        vocab_sizes = (self._target.description.vocab_size, description.vocab_size)
        return DraftModelDrafter(runner, places, selection, vocab_sizes, host.section.max_batched_tokens)


def require_same_tokens(ours: TextModel, theirs: TextModel, path: Path) -> None:
    """Raises `UnsupportedError` unless a draft model's tokens are the target's."""
    for probe in _PROBES:
        if ours.encode(probe) != theirs.encode(probe):
            raise UnsupportedError(
                f"--drafter {path} reads {probe!r} as other tokens than the target does.", _SAME_TOKENIZER
            )
    shared = min(ours.vocab_size, theirs.vocab_size)
    wrong = next((n for n in range(shared) if ours.token_bytes(n) != theirs.token_bytes(n)), None)
    if wrong is not None:
        raise UnsupportedError(
            f"--drafter {path}: token {wrong} is {ours.token_text(wrong)!r}, and the target's is "
            f"{theirs.token_text(wrong)!r}.",
            _SAME_TOKENIZER,
        )
