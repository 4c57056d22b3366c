"""What crosses between the api process and rank 0: tagged msgspec structs, msgpack on the wire, never pickle.

The api process sends `Submit` and `Abort`, and seldom another; rank 0 answers with `Progress` while it
starts, `Ready` once, `StepOutputs` after each step that produced something, and a `Profile` where one was
asked for. Invariant: for every `Submit` there is exactly one `SequenceOutput` with a finish reason, also when
it was rejected, aborted or lost.
"""

from __future__ import annotations

import msgspec

from firstlight.engine.params import SamplingParams
from firstlight.engine.speculation.metrics import DraftCounts

# Sockets in the run directory (ipc://RUN_DIR/NAME): the engine binds both.
REQUESTS_SOCKET = "requests.sock"
OUTPUTS_SOCKET = "outputs.sock"

FINISH_STOP = "stop"  # an end token or a stop token id
FINISH_LENGTH = "length"  # max_tokens or the model's length
FINISH_ABORT = "abort"  # the client asked or went away
FINISH_REJECTED = "rejected"  # never ran: `error` says why
FINISH_ERROR = "error"  # the engine failed while it ran: `error` says how
# How `error` begins where a sequence ended alone: the fault is in its own numbers, or in the weights.
NOT_NUMBERS = "the model's logits are not numbers"


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """A new sequence. `params.seed` is set; lower `priority` runs first."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_ids: list[str]


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Finish what runs, then leave. Sequences still running after `deadline_s` are aborted."""

    deadline_s: float


class StartProfile(msgspec.Struct, frozen=True, tag="start-profile"):
    """Record so many decode steps, then send a `Profile`; one that is being made starts anew."""

    num_steps: int


class StopProfile(msgspec.Struct, frozen=True, tag="stop-profile"):
    """Send the `Profile` of what was recorded until now; nothing, if none is being made."""


ToEngine = Submit | Abort | Drain | StartProfile | StopProfile


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability and 1-based rank of the sampled token, and the likeliest ones, best first.

    They are those of the model's distribution before temperature and truncation, after bias and penalties.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class SequenceOutput(msgspec.Struct, array_like=True):
    """New tokens of one sequence in one step. The last one has a finish reason."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_token_id: int | None = None  # the token that ended it; it is the last of `token_ids`
    num_cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    error: str | None = None
    num_drafted: int = 0  # drafts that the step verified
    num_accepted: int = 0  # of `token_ids`, how many had been drafted


class EngineStats(msgspec.Struct, array_like=True):
    """State after a step, for metrics. Counters are totals since start."""

    num_running: int = 0
    num_waiting: int = 0
    pages_total: int = 0
    pages_used: int = 0  # held by running sequences
    pages_cached: int = 0  # held only by the prefix cache; evictable
    cache_query_tokens: int = 0
    cache_hit_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    step_s: float = 0.0  # the last step
    step_tokens: int = 0
    step_sequences: int = 0
    drafts: DraftCounts | None = None  # where there is a drafter
    num_not_numbers: int = 0  # sequences that ended because their logits were none


class StepOutputs(msgspec.Struct, tag="step"):
    outputs: list[SequenceOutput]
    stats: EngineStats


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine serves. `report` is the start-up report, for `/server_info` and the log."""

    max_model_len: int
    vocab_size: int
    report: dict[str, object]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine cannot go on; the process ends with `exit_code` after this message."""

    message: str
    hint: str
    exit_code: int


class StepGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Recorded decode steps of as many sequences and rows; times are sums over them, by rank."""

    num_sequences: int
    num_rows: int  # more than sequences where drafts were verified
    num_steps: int
    context_tokens: float  # mean length of a sequence before the step
    wall_s: list[float]
    kinds_s: list[dict[str, float]]  # by the words of `ops.step_clock`


class Profile(msgspec.Struct, frozen=True, kw_only=True, tag="profile"):
    """Where the time of decode steps went, on every rank. `window_s` is the time that was watched on rank 0.

    Steps alternate in blocks between recorded ones and ones with the clock off; `overhead` is by how much the
    recorded ones took longer, as a share, at the median. None: too few of them.
    """

    num_ranks: int
    num_steps: int  # recorded decode steps: those of `groups`
    num_plain_steps: int  # decode steps with the clock off
    num_other_steps: int  # with prompts in them, or after a pause
    window_s: float
    other_s: float  # of those
    idle_s: float  # without anything to do
    overhead: float | None
    groups: list[StepGroup]


FromEngine = StepOutputs | Ready | Failed | Profile

_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)
encode = msgspec.msgpack.Encoder().encode


def decode_to_engine(frame: bytes) -> ToEngine:
    return _to_engine.decode(frame)


def decode_from_engine(frame: bytes) -> FromEngine:
    return _from_engine.decode(frame)
