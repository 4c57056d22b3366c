"""An EAGLE-3 drafter from its folder: read before the target is, whose layers it names, and laid out after.

Invariant: the strict reader of `models.eagle3_file` saw every tensor; what is laid out here computes what
`models.eagle3` does, up to rounding.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from firstlight.base.errors import UsageError
from firstlight.engine.speculation.eagle3 import Eagle3TreeDrafter
from firstlight.engine.speculation.eagle3_layer import Layer
from firstlight.engine.speculation.eagle3_native import NativeLayer, Room, why_not
from firstlight.engine.speculation.eagle3_plain import PlainLayer
from firstlight.engine.speculation.host import Extra, Host
from firstlight.engine.speculation.places import Places
from firstlight.engine.speculation.shape import Shape
from firstlight.facts.description import ModelDescription
from firstlight.models.eagle3 import Eagle3Drafter
from firstlight.models.eagle3_file import load_eagle3
from firstlight.ops.contract import Backend
from firstlight.ops.cpu.native_backend import NativeBackend
from firstlight.ops.kv_rows import row_bytes

_Q8_BYTES = 34 / 32  # of a value


def _norms(model: Eagle3Drafter) -> str:
    c = model.config
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return "norms: " + ", ".join(f"{flag} {str(getattr(c, flag)).lower()}" for flag in flags)


class Eagle3Drafting:
    """A drafter that was read. `layers` are those of the target whose states it needs."""

    def __init__(self, model: Eagle3Drafter, notes: tuple[str, ...]) -> None:
        self._model = model
        self.layers = model.config.state_layers
        self.notes = notes
        self.words = f"EAGLE-3 ({notes[0]}), over states {list(self.layers)}"

    @classmethod
    def read(cls, folder: Path, target: ModelDescription) -> Eagle3Drafting:
        """Reads it for a target. Raises `ModelFileError` or `UnsupportedError`."""
        nowhere = torch.zeros(1, 1).expand(target.vocab_size, target.hidden_size)
        loaded = load_eagle3(folder, target, nowhere)
        model = loaded.drafter.float().eval().requires_grad_(False)
        if model.embedding_VH.data_ptr() == nowhere.data_ptr():
            model.look_up = _not_yet
        layers = f"states of the target's layers {list(model.config.state_layers)} (blocks that have run)"
        return cls(model, (*loaded.notes, layers, _norms(model)))

    def check(self, shape: Shape) -> None:
        """See `Drafting`."""
        size = self._model.config.draft_vocab_size
        if shape.top_k > size:
            raise UsageError(
                f"--draft-top-k {shape.top_k}: this drafter's vocabulary has {size} tokens.",
                f"Use at most --draft-top-k {size}.",
            )

    def extra(self, ops: Backend) -> Extra:
        """What it takes beside the target: of each token, and for its weights."""
        c = self._model.config
        num_values = sum(parameter.numel() for parameter in self._model.parameters())
        state_bytes = 4 * c.hidden_size
        if self._reason(ops) is not None:
            heads, key_size, value_size = self._model.kv_shape
            of_token = key_size if c.latent is not None else heads * (key_size + value_size)
            return Extra(state_bytes + 4 * of_token, 4 * num_values)
        rows = row_bytes(c.head_size, ops.key_dtype) + row_bytes(c.head_size, ops.value_dtype)
        return Extra(state_bytes + c.num_kv_heads * rows, int(num_values * _Q8_BYTES))

    def make(self, host: Host) -> Eagle3TreeDrafter:
        """The drafter over the target's pages."""
        model = self._model
        if model.look_up is not None:
            model.look_up = host.decoder.embedding
            model.embedding_VH = torch.empty(0)
        num_slots = host.num_slots + host.num_scratch
        max_rows = max(host.section.max_num_seqs, host.shape.top_k)
        reason = self._reason(host.ops)
        layer: Layer
        if reason is None and isinstance(host.ops, NativeBackend):
            room = Room(num_slots, max_rows, host.max_positions, host.section.page_size_tokens)
            layer = NativeLayer(model, host.ops, host.decoder.embedding, room)
            _forget_floats(model)
            self.notes += ("weights in 8 bits, by our own kernels",)
        else:
            layer = PlainLayer(model, num_slots, host.ops.device)
            self.notes += (f"in float32, by PyTorch: {reason}",)
        places = Places(host.num_slots, host.shape.num_expanded, host.section.page_size_tokens)
        ids_R = model.target_ids_R.cpu().numpy()
        return Eagle3TreeDrafter(layer, self.layers, ids_R, places, host.runner, max_rows)

    def _reason(self, ops: Backend) -> str | None:
        """Why it cannot run on our own kernels."""
        return why_not(self._model) if isinstance(ops, NativeBackend) else f"the backend is {ops.name}"


def _not_yet(tokens_T: torch.Tensor) -> torch.Tensor:
    raise AssertionError("the target's embedding is asked for before the target is loaded")


def _forget_floats(model: Eagle3Drafter) -> None:
    """Drops the matrices that were laid out; `fc` stays where PyTorch multiplies with it."""
    for name, layer in model.named_children():
        if isinstance(layer, nn.Linear) and not (name == "fc" and model.config.fc_norm):
            layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)
