"""Whether a model can be run as it was asked for, as far as its headers tell: length, step and ranks.

Needs no torch. Invariant: what is refused here is refused with a value that works.
"""

from __future__ import annotations

from firstlight.base.config import EngineSection
from firstlight.base.errors import ResourceError, UsageError
from firstlight.base.resolve_config import check_engine
from firstlight.facts.checkpoint.formats import SUPPORTED
from firstlight.facts.checkpoint.tensor_facts import Checkpoint
from firstlight.facts.machine.machine import Machine
from firstlight.facts.planning.memory_budget import format_bytes
from firstlight.loading.plan import split_evenly

# What a process has for itself alone once its imports are done: measured with PyTorch 2.13 on x86-64.
RANK_BYTES = 150 * 2**20
API_BYTES = 60 * 2**20


def require_fit(checkpoint: Checkpoint, section: EngineSection) -> None:
    """Raises a `UsageError` where the section asks for what this model cannot give."""
    check_engine(section)
    longest = checkpoint.description.max_position
    if section.max_model_len > longest:
        raise UsageError(
            f"--max-model-len {section.max_model_len} is more than the model's {longest} positions.",
            f"Use {longest} or less.",
        )
    if section.expert_parallel:
        _require_experts(checkpoint, section.tensor_parallel)
    possible = possible_ranks(checkpoint)
    if section.tensor_parallel not in possible:
        raise _too_many_ranks(checkpoint, section.tensor_parallel, possible)


def require_memory(checkpoint: Checkpoint, num_ranks: int, machine: Machine) -> None:
    """Raises a `ResourceError` where not even the processes and the weights can have room.

    Else the kernel would end a rank while it imports, which says nothing of the reason.
    """
    weight_bytes = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    needed_bytes = num_ranks * RANK_BYTES + API_BYTES + weight_bytes
    if needed_bytes > machine.memory_available_bytes:
        ranks = f"{num_ranks} ranks" if num_ranks > 1 else "a rank"
        raise ResourceError(
            f"Not enough memory: {ranks} with PyTorch ({format_bytes(num_ranks * RANK_BYTES)}), the api "
            f"process ({format_bytes(API_BYTES)}) and the weights ({format_bytes(weight_bytes)}) take "
            f"{format_bytes(needed_bytes)} before the first token, and "
            f"{format_bytes(machine.memory_available_bytes)} are available ({machine.memory_reason}).",
            "Give the container or service more (--memory, MemoryMax=, resources.limits.memory)"
            + (", lower --tensor-parallel" if num_ranks > 1 else "")
            + ", or use a smaller or more strongly quantised model.",
        )


def _require_experts(checkpoint: Checkpoint, num_ranks: int) -> None:
    experts, architecture = checkpoint.description.experts, checkpoint.description.architecture
    if experts is None:
        raise UsageError(
            f"--expert-parallel does not fit this model: {architecture} has no experts.",
            "Leave it out.",
        )
    if experts.num < num_ranks:
        raise UsageError(
            f"--expert-parallel does not fit: {experts.num} experts cannot be shared by {num_ranks} ranks.",
            f"Leave it out, or use --tensor-parallel {experts.num} or less.",
        )


def possible_ranks(checkpoint: Checkpoint) -> list[int]:
    """The sizes of --tensor-parallel that give every rank whole key-value groups in whole weight blocks."""
    return [num for num in range(1, checkpoint.description.num_kv_heads + 1) if _can_share(checkpoint, num)]


def _can_share(checkpoint: Checkpoint, num_ranks: int) -> bool:
    description = checkpoint.description
    value_size = description.latent.value_size if description.latent else description.head_size
    columns = description.num_heads // description.num_kv_heads * value_size
    blocks = {
        SUPPORTED[tensor.format].block_values
        for name, tensor in checkpoint.tensors.items()
        if name.endswith(".self_attn.o_proj.weight")
    }
    starts = [split_evenly(description.num_kv_heads, 1, rank, num_ranks)[0] for rank in range(num_ranks)]
    return all(start * columns % block == 0 for start in starts for block in blocks)


def _too_many_ranks(checkpoint: Checkpoint, asked: int, possible: list[int]) -> UsageError:
    description = checkpoint.description
    kv_heads = description.num_kv_heads
    heads = (
        f"{description.num_heads} attention heads and {kv_heads} key-value head{'s' if kv_heads > 1 else ''}"
    )
    if asked > kv_heads:
        reason = "each rank needs a key-value head of its own"
    else:
        reason = f"that many ranks would cut through blocks of its {', '.join(checkpoint.formats)} weights"
    shown = ", ".join(map(str, possible[:-1])) + (" or " if len(possible) > 1 else "") + str(possible[-1])
    return UsageError(
        f"--tensor-parallel {asked} does not fit this model: it has {heads}, and {reason}.",
        f"Use --tensor-parallel {shown}.",
    )
