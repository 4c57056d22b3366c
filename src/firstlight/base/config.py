"""The resolved configuration: frozen sections, one for each part, written once to the run directory.

The cli resolves flags and the TOML file into a `RunConfig`; the api process and the ranks read it from
`RUN_DIR/config.json`. A constructor receives only its own section. Invariant: nothing here changes after
it was resolved, and nothing here is a secret (API keys travel in a file of mode 0600 beside it).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

CONFIG_FILE = "config.json"
API_KEYS_FILE = "api-keys"
REPORT_FILE = "report.json"  # rank 0's start-up report
API_SOCKET = "api.sock"  # where the api process answers the supervisor, without keys and TLS
MIN_MODEL_LEN = 3  # the self-test: a prompt of two tokens, and the one that it makes


class ModelSection(msgspec.Struct, frozen=True, kw_only=True):
    """Which model. `path` is local: a GGUF file or a Hugging Face folder."""

    path: str
    served_names: tuple[str, ...]
    dtype: str = "auto"  # "auto": the fastest layouts for the device; "float32": the oracle, rounds nothing
    chat_template: str | None = None  # path of a Jinja file that replaces the model's own
    trust_remote_code: bool = False  # run the folder's own code where its tokenizer cannot be read without


# What makes a step large, with the names of the settings.
STEP_SIZES = {"max_batched_tokens": "max-batched-tokens", "max_num_seqs": "max-num-seqs"}
GIVES_WAY = (*STEP_SIZES, "memory_fraction", "drafter")


class EngineSection(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the engine. 0 means: resolved at start from the memory budget and the model."""

    device: str = "cpu"  # "cpu" or "cuda"
    tensor_parallel: int = 1
    expert_parallel: bool = False  # each rank holds whole experts instead of a share of all
    threads: int = 0  # operator threads of each rank; 0: the cores divided by the ranks
    cpu_kernels: str = "auto"  # "native": our own; "stock": PyTorch's; "auto": our own where they load
    max_num_seqs: int = 256  # sequences in one step
    max_batched_tokens: int = 512  # token budget of one step: a longer prompt is prefilled in chunks
    # Of GIVES_WAY, what nobody asked for: it gives way where memory is short.
    shrinks: tuple[str, ...] = ()
    page_size_tokens: int = 16
    max_model_len: int = 0
    kv_memory_bytes: int = 0
    kv_dtype: str = "auto"  # "float16", "bfloat16", "int8", or what the backend takes by itself
    memory_fraction: float = 0.85  # of the memory available at start that we may plan for
    prefix_cache: bool = True
    max_queue: int = 1024  # waiting requests; one more is answered 429
    collective_deadline_s: float = 60.0
    collectives: str = "auto"  # "shared-memory", "gloo"; "auto": shared memory where it can be had
    # "ngram", "none", or the path of a drafter or a draft model; None: the one that comes with the model
    drafter: str | None = None
    draft_tokens: int = 3  # drafts of a sequence that a step verifies one behind the other, at most
    draft_top_k: int = 1  # guesses for a place; with several, drafts are a tree
    draft_nodes: int = 0  # drafts of a tree altogether, at most; 0: draft_tokens * draft_top_k
    draft_adapt: bool = True  # as many as pay; otherwise always as many as allowed
    draft_verification: str = "keyed"  # or "rejection"
    draft_acceptance: str | None = None  # "0.8,0.6": accept by this profile, whatever the model says

    @property
    def drafts(self) -> bool:
        """Whether a drafter was asked for."""
        return self.drafter not in (None, "none")


class ServerSection(msgspec.Struct, frozen=True, kw_only=True):
    """The public side and its limits."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 8 * 1024 * 1024
    max_connections: int = 4096
    header_timeout_s: float = 30.0  # for a TLS handshake, and for a whole request line with its headers
    body_timeout_s: float = (
        30.0  # for a body, and longer at a fair rate; for reading what waits for the client
    )
    max_choices: int = 16  # `n`
    max_batch_prompts: int = 64
    max_stop: int = 16
    max_stop_chars: int = 256
    max_top_logprobs: int = 20
    request_timeout_s: float = 600.0
    drain_s: float = 10.0  # how long a graceful stop waits for running requests
    tool_call_parser: str = "auto"  # "none", or a family of serve.parsing; "auto": that of the model
    reasoning_parser: str = "auto"
    log_format: str = "text"  # "text" or "json"


class LaunchSection(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor starts, and what it does about an engine that is lost or stands still."""

    backend: str = "native"  # "native", "vllm" or "sglang"
    backend_python: str | None = None  # the interpreter that has a foreign engine; None: it is looked for
    backend_args: tuple[str, ...] = ()  # handed to a foreign engine as they are
    on_stall: str = "report"  # "report", "restart" or "exit"
    stall_look_s: float = 5.0  # without useful progress: the first look
    stall_verdict_s: float = 8.0  # without useful progress: the verdict, if two looks agree


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All sections of one run, and the private directory of its sockets and logs."""

    run_dir: str
    model: ModelSection
    engine: EngineSection
    server: ServerSection
    launch: LaunchSection = LaunchSection()
    debug: bool = False  # tracebacks beside the messages


def write_config(config: RunConfig) -> Path:
    path = Path(config.run_dir) / CONFIG_FILE
    path.write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2))
    return path


def read_config(run_dir: str | Path) -> RunConfig:
    return msgspec.json.decode((Path(run_dir) / CONFIG_FILE).read_bytes(), type=RunConfig)
