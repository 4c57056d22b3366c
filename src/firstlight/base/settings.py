"""Every option of a run, once: its name, the section and field it fills, its limits and its help text.

The cli makes flags from this table and `base.resolve_config` accepts the same names in a TOML file, so that
the two can never differ. Invariant: each field of the config sections has exactly one setting, or is named in
`NOT_SETTINGS`; the default is the field's own.
"""

from __future__ import annotations

import functools
from typing import Any, get_type_hints

import msgspec

from firstlight.base.config import EngineSection, LaunchSection, ModelSection, ServerSection
from firstlight.base.draft_tree import MOST_NODES

SECTIONS: dict[str, type[msgspec.Struct]] = {
    "model": ModelSection,
    "engine": EngineSection,
    "server": ServerSection,
    "launch": LaunchSection,
}
# The path comes from locating the model that was asked for, the arguments stand behind a "--".
NOT_SETTINGS = {("model", "path"), ("launch", "backend_args"), ("engine", "shrinks")}


class Setting(msgspec.Struct, frozen=True):
    """One option. `name` is the flag without its dashes and the key in a TOML file."""

    name: str
    section: str
    field: str
    help: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    is_size: bool = False  # bytes, written as a number or as "512M", "2G"

    @property
    def type(self) -> Any:
        """The type of the config field."""
        return _types(self.section)[self.field]

    @property
    def default(self) -> Any:
        """The config field's own default; None where it has none."""
        field = next(f for f in msgspec.structs.fields(SECTIONS[self.section]) if f.name == self.field)
        return None if field.default is msgspec.NODEFAULT else field.default

    @property
    def repeats(self) -> bool:
        """Whether the flag may be given several times."""
        return bool(self.type == tuple[str, ...])


@functools.cache
def _types(section: str) -> dict[str, Any]:
    return get_type_hints(SECTIONS[section])


def _model(name: str, field: str, help: str, **limits: Any) -> Setting:  # noqa: A002
    return Setting(name, "model", field, help, **limits)


def _engine(name: str, field: str, help: str, **limits: Any) -> Setting:  # noqa: A002
    return Setting(name, "engine", field, help, **limits)


def _server(name: str, field: str, help: str, **limits: Any) -> Setting:  # noqa: A002
    return Setting(name, "server", field, help, **limits)


def _launch(name: str, field: str, help: str, **limits: Any) -> Setting:  # noqa: A002
    return Setting(name, "launch", field, help, **limits)


MODEL_SETTINGS = (
    _model("served-name", "served_names", "Name of the model in the API; repeat it for aliases."),
    _model(
        "dtype",
        "dtype",
        "auto: the fastest layouts of this device, named at start with what they round. "
        "float32: the oracle, rounds nothing.",
        choices=("auto", "float32"),
    ),
    _model("chat-template", "chat_template", "Jinja file that replaces the model's own chat template."),
    _model(
        "trust-remote-code",
        "trust_remote_code",
        "Run the Python code that came with the model, where its tokenizer cannot be read without. It can do "
        "whatever you can.",
    ),
)

ENGINE_SETTINGS = (
    _engine("device", "device", "Where the model runs.", choices=("cpu", "cuda")),
    _engine("tensor-parallel", "tensor_parallel", "Ranks that share every layer.", minimum=1, maximum=64),
    _engine(
        "expert-parallel",
        "expert_parallel",
        "Each rank holds whole experts, instead of a share of every expert's width.",
    ),
    _engine(
        "threads",
        "threads",
        "Threads of each rank. 0: the cores divided by the ranks.",
        minimum=0,
        maximum=256,
    ),
    _engine(
        "cpu-kernels",
        "cpu_kernels",
        "Operators on a CPU. native: our own, or an error. stock: PyTorch's. "
        "auto: our own where they load, else stock.",
        choices=("auto", "native", "stock"),
    ),
    _engine("max-num-seqs", "max_num_seqs", "Sequences in one step.", minimum=1),
    _engine(
        "max-batched-tokens",
        "max_batched_tokens",
        "Tokens in one step: a longer prompt is prefilled in chunks between the others' tokens.",
        minimum=1,
    ),
    _engine("page-size", "page_size_tokens", "Tokens in a page of the KV cache.", minimum=1, maximum=1024),
    _engine("max-model-len", "max_model_len", "Prompt plus answer, in tokens. 0: what fits.", minimum=0),
    _engine(
        "kv-memory",
        "kv_memory_bytes",
        "Size of the KV cache, as 512M or 2G. 0: 288M or one longest prompt, if the budget leaves it.",
        minimum=0,
        is_size=True,
    ),
    _engine(
        "kv-dtype",
        "kv_dtype",
        "How keys and values are kept. int8: in half the memory, with a scale for each token and head. "
        "auto: float16 in our own CPU kernels, else as the operators compute.",
        choices=("auto", "float16", "bfloat16", "int8"),
    ),
    _engine(
        "memory-fraction",
        "memory_fraction",
        "Share of the memory available at start that may be planned for.",
        minimum=0.05,
        maximum=0.98,
    ),
    _engine("prefix-cache", "prefix_cache", "Reuse the KV pages of prompts that begin alike."),
    _engine("max-queue", "max_queue", "Waiting requests; one more is answered 429.", minimum=1),
    _engine(
        "collective-deadline",
        "collective_deadline_s",
        "Seconds a rank waits for the others before it gives up.",
        minimum=1,
    ),
    _engine(
        "collectives",
        "collectives",
        "How CPU ranks sum. shared-memory: through memory of this machine, or an error. gloo: over sockets. "
        "auto: shared memory where it can be had, else gloo. GPUs use NCCL.",
        choices=("auto", "shared-memory", "gloo"),
    ),
    _engine(
        "drafter",
        "drafter",
        "Guesses next tokens, so that one step verifies several; the answers stay the same. ngram: from the "
        "text so far; a folder: an EAGLE-3 drafter; a model: a small one of the same family; none: no "
        "drafts. The embedded model uses the drafter that comes with it, if there is one.",
    ),
    _engine(
        "draft-tokens",
        "draft_tokens",
        "Drafts of a sequence that one step verifies one behind the other, at most. For none: drafter none.",
        minimum=1,
        maximum=16,
    ),
    _engine(
        "draft-top-k",
        "draft_top_k",
        "Guesses for each place (EAGLE-3). With several, drafts are a tree, of which the likeliest go on.",
        minimum=1,
        maximum=16,
    ),
    _engine(
        "draft-nodes",
        "draft_nodes",
        "Nodes of a tree that one step verifies, at most. 0: draft-tokens times draft-top-k.",
        minimum=0,
        maximum=MOST_NODES,
    ),
    _engine("draft-adapt", "draft_adapt", "Draft as much as pays, down to nothing; otherwise always all."),
    _engine(
        "draft-verification",
        "draft_verification",
        "keyed: a draft counts if the model chooses it, so drafts change no token. rejection: classic "
        "rejection sampling, which keeps the distribution alone.",
        choices=("keyed", "rejection"),
    ),
    _engine(
        "draft-acceptance",
        "draft_acceptance",
        "For measuring: accept drafts by these shares (0.8,0.6), whatever the model says. Answers are not "
        "its own then.",
    ),
)

SERVER_SETTINGS = (
    _server("host", "host", "Address to listen on. 0.0.0.0 opens the server to the network."),
    _server("port", "port", "Port to listen on. 0: a free one.", minimum=0, maximum=65535),
    _server("uds", "uds", "Listen on this Unix socket instead of a port."),
    _server("tls-cert", "tls_cert", "Certificate chain (PEM); with --tls-key the server speaks HTTPS."),
    _server("tls-key", "tls_key", "Private key (PEM) of --tls-cert."),
    _server("cors-origin", "cors_origins", "Web origin that browsers may call from; repeatable. Off."),
    _server("max-body", "max_body_bytes", "Largest request body.", minimum=1024, is_size=True),
    _server(
        "max-connections",
        "max_connections",
        "Connections at once, as far as open files allow; for one more the longest idle or half-sent goes.",
        minimum=1,
    ),
    _server(
        "header-timeout",
        "header_timeout_s",
        "Seconds for a TLS handshake, and for a whole request line with its headers.",
        minimum=0.1,
        maximum=3600,
    ),
    _server(
        "body-timeout",
        "body_timeout_s",
        "Seconds for a body that comes slower than 16 KiB/s, and for a client to read what waits for it.",
        minimum=0.1,
        maximum=86400,
    ),
    _server("max-choices", "max_choices", "Largest n of a request.", minimum=1),
    _server("max-batch-prompts", "max_batch_prompts", "Prompts in one completion request.", minimum=1),
    _server("max-stop", "max_stop", "Stop strings of a request.", minimum=0),
    _server("max-stop-chars", "max_stop_chars", "Characters of one stop string.", minimum=1),
    _server("max-top-logprobs", "max_top_logprobs", "Largest top_logprobs of a request.", minimum=0),
    _server("request-timeout", "request_timeout_s", "Seconds a request may take in all.", minimum=1),
    _server("drain", "drain_s", "Seconds a graceful stop waits for running requests.", minimum=0),
    _server(
        "tool-call-parser",
        "tool_call_parser",
        "How the model writes calls of tools. auto: as its family does; none: they stay text.",
        choices=("auto", "none", "kimi_k2"),
    ),
    _server(
        "reasoning-parser",
        "reasoning_parser",
        "How the model marks what it thinks. auto: as its family does; none: it stays text.",
        choices=("auto", "none", "kimi_k2"),
    ),
    _server("log-format", "log_format", "How the log is written.", choices=("text", "json")),
)

LAUNCH_SETTINGS = (
    _launch(
        "backend",
        "backend",
        "The engine that runs the model. vllm and sglang are started as they are installed, watched, and "
        "served through; what stands behind a -- is handed to them.",
        choices=("native", "vllm", "sglang"),
    ),
    _launch(
        "backend-python",
        "backend_python",
        "Python interpreter that has vLLM or SGLang. Without it: the first on PATH that has it.",
    ),
    _launch(
        "on-stall",
        "on_stall",
        "What to do when nothing moves. report: keep the port open and answer 503 with the verdict until it "
        "moves again (a start ends with it). restart: start the engine again. exit: end. When a process dies "
        "there is nothing to wait for: restart starts the engine again, the others end with the verdict.",
        choices=("report", "restart", "exit"),
    ),
    _launch("stall-look", "stall_look_s", "Seconds without useful progress until the first look.", minimum=1),
    _launch(
        "stall-verdict", "stall_verdict_s", "Seconds without useful progress until the verdict.", minimum=2
    ),
)

ALL_SETTINGS = MODEL_SETTINGS + ENGINE_SETTINGS + SERVER_SETTINGS + LAUNCH_SETTINGS
