"""From the command line of `serve` to a socket that answers 503, before there is anything else.

Invariant: whatever is not plainly understood here (an unknown flag, --help, a bad value, a port that is
taken) opens nothing, and the ordinary path speaks; and `serve` keeps what was opened only if it would have
opened the same.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import Any

from firstlight.base.disposable_child import require_answer
from firstlight.base.errors import FirstlightError
from firstlight.base.proc_stat import launched_s
from firstlight.cli.keys import gather_keys, listed_keys
from firstlight.launch.public.early_socket import Address, Early, open_early

# The flags of `serve`; a test compares them with the table of settings, which costs too much to import here.
VALUE_FLAGS = frozenset(
    {
        "api-key",
        "api-key-file",
        "backend",
        "backend-python",
        "body-timeout",
        "chat-template",
        "collective-deadline",
        "collectives",
        "config",
        "cpu-kernels",
        "cors-origin",
        "device",
        "draft-acceptance",
        "draft-nodes",
        "draft-tokens",
        "draft-top-k",
        "draft-verification",
        "drafter",
        "drain",
        "dtype",
        "header-timeout",
        "host",
        "kv-dtype",
        "kv-memory",
        "log-format",
        "max-batch-prompts",
        "max-batched-tokens",
        "max-body",
        "max-choices",
        "max-connections",
        "max-model-len",
        "max-num-seqs",
        "max-queue",
        "max-stop",
        "max-stop-chars",
        "max-top-logprobs",
        "memory-fraction",
        "on-stall",
        "page-size",
        "port",
        "reasoning-parser",
        "request-timeout",
        "served-name",
        "stall-look",
        "stall-verdict",
        "tensor-parallel",
        "threads",
        "tls-cert",
        "tls-key",
        "tool-call-parser",
        "uds",
    }
)
SWITCHES = frozenset(
    {"debug"}
    | {
        f"{no}{name}"
        for name in ("draft-adapt", "expert-parallel", "prefix-cache", "trust-remote-code")
        for no in ("", "no-")
    }
)
_TEXTS = ("host", "uds", "tls-cert", "tls-key")
_early: Early | None = None


class Doubt(ValueError):
    """Not plainly understood."""


def open_for(arguments: Sequence[str]) -> Early | None:
    """The socket that `serve` with these arguments asks for; None in any doubt. The caller closes it."""
    global _early
    try:
        address, keys = understand(arguments)
        _early = open_early(address, keys)
        _early.front.begin(launched_s())
    except (Doubt, FirstlightError, OSError, ssl.SSLError):
        return None
    return _early


def early() -> Early | None:
    """What `open_for` has opened in this process."""
    return _early


def understand(arguments: Sequence[str]) -> tuple[Address, tuple[str, ...]]:
    """The address and the keys that the arguments ask for. Raises `Doubt`, or what `serve` would."""
    flags = _read_flags(arguments)
    last = {name: values[-1] for name, values in flags.items()}
    file = _read_file(last["config"]) if "config" in last else {}
    found = {name: last.get(name, file.get(name)) for name in (*_TEXTS, "port")}
    if (found["tls-cert"] is None) != (found["tls-key"] is None):
        raise Doubt
    if found["uds"] is not None and (found["host"] is not None or found["port"] is not None):
        raise Doubt
    host, uds, tls_cert, tls_key = (_text(found[name]) for name in _TEXTS)
    plain = Address()
    port = plain.port if found["port"] is None else _port(found["port"])
    address = Address(host or plain.host, port, uds, tls_cert, tls_key)
    texts = flags.get("api-key") or listed_keys(file.get("api-key", []), "the file")
    return address, gather_keys(texts, last.get("api-key-file", file.get("api-key-file")))


def _read_flags(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Every flag's values. At most one argument is none: the model."""
    values: dict[str, list[str]] = {}
    end = arguments.index("--") if "--" in arguments else len(arguments)
    num_models, rest = 0, iter(arguments[:end])  # what follows is for a foreign engine
    for argument in rest:
        name, has_value, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("-"):
            num_models += 1
        elif argument.startswith("--") and name in VALUE_FLAGS:
            values.setdefault(name, []).append(value if has_value else next(rest, ""))
        elif argument not in {f"--{switch}" for switch in SWITCHES}:
            raise Doubt(argument)
    is_native = values.get("backend", ["native"])[-1] == "native"
    if num_models > 1 or (end < len(arguments) and is_native and "config" not in values):
        raise Doubt
    if not all(value for texts in values.values() for value in texts):
        raise Doubt
    return values


def _read_file(path: str) -> dict[str, Any]:
    """The keys of a TOML file, those in tables too."""
    import tomllib

    require_answer(path)
    try:
        with open(path, "rb") as file:
            content = tomllib.load(file)
    except ValueError as error:  # not TOML, or not UTF-8
        raise Doubt from error
    tables = [value for value in content.values() if isinstance(value, dict)]
    flat = {key: value for key, value in content.items() if not isinstance(value, dict)}
    return {**flat, **{key: value for table in tables for key, value in table.items()}}


def _text(value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise Doubt
    return value


def _port(value: Any) -> int:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number and not (isinstance(value, str) and value.isascii() and value.isdigit()):
        raise Doubt
    if not 0 <= int(value) <= 65535:
        raise Doubt
    return int(value)
