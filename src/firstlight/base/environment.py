"""The only place that reads environment variables: five names, those of systemd, and the copy for children.

Called by the cli, the launcher and `facts.sources`. Invariant: an unset or empty variable is None; a value
that cannot be used is a `UsageError` that names the variable. A shape test keeps `os.environ` out of every
other file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from firstlight.base.errors import UsageError

CACHE = "FIRSTLIGHT_CACHE"  # folder of fetched models
API_KEY = "FIRSTLIGHT_API_KEY"  # keys the server asks for, or the one a client sends; separated by commas
XDG_CACHE = "XDG_CACHE_HOME"
XDG_RUNTIME = "XDG_RUNTIME_DIR"
HUB_OFFLINE = "HF_HUB_OFFLINE"
# systemd's words to the process that it has started, and to no child of it: no settings of ours.
SERVICE_MANAGER = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class ServiceManager(NamedTuple):
    """Whom to tell how the service is; `watchdog_s`: we are ended after so long without a word."""

    address: str
    watchdog_s: float | None


def cache_directory() -> Path:
    """Where fetched models are kept; it need not exist yet."""
    own = _value(CACHE)
    if own is not None:
        return _absolute(CACHE, own)
    parent = _value(XDG_CACHE)
    return (Path(parent) if parent else Path.home() / ".cache") / "firstlight"


def api_keys() -> tuple[str, ...]:
    """The keys in FIRSTLIGHT_API_KEY; empty when it is unset."""
    value = _value(API_KEY)
    keys = tuple(key.strip() for key in (value or "").split(",") if key.strip())
    if value is not None and not keys:
        raise UsageError(f"{API_KEY} is set but holds no key.", "Set it to keys with commas, or unset it.")
    return keys


def runtime_directory() -> Path | None:
    """The user's private runtime folder, if the session has one that we can write to."""
    value = _value(XDG_RUNTIME)
    if value is None or not os.path.isdir(value) or not os.access(value, os.W_OK | os.X_OK):
        return None
    return Path(value)


def hub_is_offline() -> bool:
    """Whether the Hugging Face hub must not be asked."""
    value = (_value(HUB_OFFLINE) or "0").lower()
    if value in {"1", "true", "yes", "on"}:
        return True
    if value in {"0", "false", "no", "off"}:
        return False
    raise UsageError(f"{HUB_OFFLINE} is {value!r}, which is neither true nor false.", "Set it to 1 or 0.")


def service_manager() -> ServiceManager | None:
    """The service manager that has started this very process, if it wants to hear from it."""
    address, period, pid = (_value(name) for name in SERVICE_MANAGER)
    if pid is not None and pid != str(os.getpid()):
        period = None  # it watches another process
    if period is not None and not (period.isascii() and period.isdigit() and int(period) > 0):
        raise UsageError(f"WATCHDOG_USEC is {period!r}, which is no number of microseconds.", "Unset it.")
    if address is None or address[0] not in "/@":  # also what has no socket on this machine
        return None
    return ServiceManager(address.replace("@", "\0", 1) if address[0] == "@" else address, _seconds(period))


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `extra` on top, for a child. The caller owns the copy."""
    ours = {name: value for name, value in os.environ.items() if name not in SERVICE_MANAGER}
    return {**ours, **extra}


def set_for_libraries(variables: Mapping[str, str]) -> None:
    """What libraries that will be loaded later read of the environment; what is set already stays."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def _seconds(microseconds: str | None) -> float | None:
    return None if microseconds is None else int(microseconds) / 1e6


def _value(name: str) -> str | None:
    return os.environ.get(name) or None


def _absolute(name: str, value: str) -> Path:
    path = Path(value).expanduser()
    if not path.is_absolute():
        raise UsageError(f"{name} is {value!r}, which is not an absolute path.", "Give the full path.")
    return path
