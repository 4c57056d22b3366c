"""A declared model becomes one that runs: its weights are read, and a runner is put over model and pool.

Invariant: a weight is delivered once, and `load_weights` returns only when all are.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from firstlight.base.config import EngineSection
from firstlight.engine.speculation.shape import shape_of
from firstlight.engine.worker.cuda_replay import CudaGraphReplay, record_graph
from firstlight.engine.worker.kv_pool import KVPool
from firstlight.engine.worker.model_runner import ModelRunner, PageTables
from firstlight.engine.worker.replay import EagerReplay, RecordedReplay, Replay
from firstlight.facts.checkpoint.checkpoint import Checkpoint
from firstlight.loading.reader import LoadReport, read_tensors
from firstlight.models.declare import Declaration
from firstlight.models.decoder import Decoder
from firstlight.models.layers.attention import attention_shape
from firstlight.models.layers.rotary import turn_table
from firstlight.ops.collectives import Group
from firstlight.ops.contract import Backend
from firstlight.ops.cpu.native_backend import NativeBackend
from firstlight.ops.cpu.operator_times import NativeOperatorTimes

OnBytes = Callable[[int, int], None]


def load_weights(checkpoint: Checkpoint, declare: Declaration, on_bytes: OnBytes) -> LoadReport:
    """Reads what was declared; `on_bytes(done, total)` hears of it ten times a second."""
    loaded = read_tensors(
        checkpoint,
        declare.wanted,
        declare.deliver,
        _throttled(on_bytes),
        declare.of_others,
    )
    declare.finish()
    return loaded


def _throttled(report: OnBytes, interval_s: float = 0.1) -> OnBytes:
    """At most ten reports a second, and always the last one."""
    last_s = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if done == total or now_s - last_s >= interval_s:
            last_s = now_s
            report(done, total)

    return progress


def make_runner(
    decoder: Decoder, ops: Backend, pool: KVPool, section: EngineSection, group: Group
) -> ModelRunner:
    """A model over its pool, as this backend runs it. `section` is resolved."""
    shape = attention_shape(decoder.description, group.rank, group.size)
    # A tree's nodes have places behind the last token, more of them than positions.
    most_places = section.max_model_len + (shape_of(section).nodes if section.draft_top_k > 1 else 0)
    max_pages = -(-most_places // section.page_size_tokens)
    tables = PageTables(section.max_num_seqs, max_pages, section.page_size_tokens)
    turns = turn_table(decoder.description, section.max_model_len, ops.device)
    replay: Replay | RecordedReplay
    if isinstance(ops, NativeBackend):
        torch.set_num_threads(1)  # what is left to PyTorch is small, and its threads would meet ours
        replay = RecordedReplay(decoder, ops, shape, pool, section.max_batched_tokens)
        replay.watched_by(group.recorder)
        group.clock.operators = NativeOperatorTimes(ops.pool)
    elif ops.device.type == "cuda" and decoder.description.experts is None:
        replay = CudaGraphReplay(decoder, record_graph, group.clock)
    else:
        replay = EagerReplay(decoder)
    return ModelRunner(replay, ops, pool, turns, shape, tables)
