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

PROBES = "probes/probes.safetensors"  # not beside the weights: engines load every such file there
NUM_INDICES = 48
NUM_PROBED = 4  # indices from which is drafted
NUM_DRAFTS = 3
TOP = 5
MAX_LOGIT_GAP = 1e-3  # of the same computation in float32 on another machine


def write_probes(folder: Path, stored: Eagle3Drafter, shard: Shard) -> None:
    """Stores the first indices of a document and the five best tokens of each draft from the last of them.

    `stored` was read from the folder: its weights are rounded, and its embedding too where it has one.
    """
    _, span = max(shard.spans(), key=lambda item: item[0].num_indices)
    states, tokens = shard.states[span][:NUM_INDICES], shard.tokens[span][:NUM_INDICES].long()
    ids, values = _top(stored, states, tokens)
    tensors = {"states": states, "tokens": tokens.to(torch.int32), "expected": ids, "logits": values}
    what = "states h_j, tokens x_(j+1), best target ids of drafts"
    write_tensor_file(folder / PROBES, tensors, {"what": what})


def check_probes(folder: Path, target: Target, embedding_VH: torch.Tensor) -> str:
    """Loads the drafter of a folder and drafts from the stored states.

    Raises `ModelFileError` where the best tokens are others.
    """
    loaded = load_eagle3(folder, target.checkpoint.description, embedding_VH)
    stored = read_tensor_file(folder / PROBES)
    ids, values = _top(loaded.drafter, stored["states"], stored["tokens"].long())
    gap = float((values - stored["logits"]).abs().max())
    num = stored["expected"][..., 0].numel()
    same = int((ids[..., 0] == stored["expected"][..., 0]).sum())
    if same < num or not gap <= MAX_LOGIT_GAP:
        raise ModelFileError(
            f"{folder / PROBES}: {num - same} of {num} drafts differ from what was stored, logits by up to "
            f"{gap:.1e}: the weights, the norms or the target's embedding are others.",
            "Export the drafter again, or use the target that it was trained for.",
        )
    return f"{same} of {num} probed drafts equal"


@torch.no_grad()
def _top(drafter: Eagle3Drafter, states: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Target ids and their logits [probes, drafts, 5], from chains that start at the last few indices."""
    rows, logits = [], []
    fused = drafter.fuse(states)
    for index in range(len(tokens) - NUM_PROBED, len(tokens)):
        cache = DraftCache()
        output = drafter.advance(fused[: index + 1], tokens[: index + 1], cache)[-1:]
        drafts = []
        for _ in range(NUM_DRAFTS):
            found = drafter.logits(output)[0].topk(TOP)
            best = drafter.target_ids_R[found.indices]
            drafts.append(best)
            logits.append(found.values)
            output = drafter.advance(drafter.feedback(output), best[:1], cache)
        rows.append(torch.stack(drafts))
    ids = torch.stack(rows).to(torch.int32)
    return ids, torch.stack(logits).view(ids.shape)
