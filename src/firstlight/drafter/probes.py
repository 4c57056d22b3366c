"""Probes: states and expected drafts, stored with an export, with which a server tests its own wiring.

Written by `export`, read by `firstlight drafter probe` and by whoever serves. Invariant: what is expected
was computed by the drafter as it is stored, in float32.
"""

from __future__ import annotations

from pathlib import Path

import torch

from firstlight.base.errors import ModelFileError
from firstlight.drafter.shards import Shard
from firstlight.drafter.target import Target
from firstlight.loading.tensor_file import read_tensor_file, write_tensor_file
from firstlight.models.eagle3 import DraftCache, Eagle3Drafter
from firstlight.models.eagle3_file import load_eagle3

PROBES = "probes.safetensors"
NUM_INDICES = 48
NUM_PROBED = 4  # indices from which is drafted
NUM_DRAFTS = 3
TOP = 5


def write_probes(folder: Path, drafter: Eagle3Drafter, shard: Shard) -> None:
    """Stores the first indices of a document and the five best tokens of each draft from the last of them."""
    stored = Eagle3Drafter(drafter.config, drafter.embedding_VH)
    rounded = {name: v.to(torch.bfloat16).to(v.dtype) for name, v in drafter.state_dict().items()}
    stored.load_state_dict(rounded)
    stored.target_ids_R.copy_(drafter.target_ids_R)
    _, span = max(shard.spans(), key=lambda item: item[0].num_indices)
    states, tokens = shard.states[span][:NUM_INDICES], shard.tokens[span][:NUM_INDICES].long()
    tensors = {"states": states, "tokens": tokens.to(torch.int32), "expected": _top(stored, states, tokens)}
    what = "states h_j, tokens x_(j+1), best target ids of drafts"
    write_tensor_file(folder / PROBES, tensors, {"what": what})


def check_probes(folder: Path, target: Target, embedding_VH: torch.Tensor) -> str:  # noqa: N803
    """Loads the drafter of a folder and drafts from the stored states.

    Raises `ModelFileError` where the best tokens are others.
    """
    loaded = load_eagle3(folder, target.checkpoint.description, embedding_VH)
    stored = read_tensor_file(folder / PROBES)
    found = _top(loaded.drafter, stored["states"], stored["tokens"].long())
    expected = stored["expected"]
    same = int((found[..., 0] == expected[..., 0]).sum())
    num = expected[..., 0].numel()
    if same < num:
        raise ModelFileError(
            f"{folder / PROBES}: {num - same} of {num} drafts differ from what "
            "was stored with the drafter: the weights, the norms or the target's embedding are others.",
            "Export the drafter again, or use the target that it was trained for.",
        )
    return f"{same} of {same} probed drafts equal"


@torch.no_grad()
def _top(drafter: Eagle3Drafter, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Target ids [probes, drafts, 5], from chains that start at the last few indices."""
    rows = []
    fused = drafter.fuse(states)
    for index in range(len(tokens) - NUM_PROBED, len(tokens)):
        cache = DraftCache()
        output = drafter.advance(fused[: index + 1], tokens[: index + 1], cache)[-1:]
        drafts = []
        for _ in range(NUM_DRAFTS):
            best = drafter.target_ids_R[drafter.logits(output)[0].topk(TOP).indices]
            drafts.append(best)
            output = drafter.advance(drafter.feedback(output), best[:1], cache)
        rows.append(torch.stack(drafts))
    return torch.stack(rows).to(torch.int32)
