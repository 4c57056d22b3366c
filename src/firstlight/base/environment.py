"""The only place that reads environment variables: five names, those of systemd, what libraries need of the
system's own, and the copy for children.

Invariant: an unset or empty variable is None; a value that cannot be used is a `UsageError` that names the
variable. A shape test keeps `os.environ` out of every other file.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from firstlight.base.errors import ResourceError, UsageError

CACHE = "FIRSTLIGHT_CACHE"  # folder of fetched models
API_KEY = "FIRSTLIGHT_API_KEY"  # keys the server asks for, or the one a client sends; separated by commas
XDG_CACHE = "XDG_CACHE_HOME"
XDG_RUNTIME = "XDG_RUNTIME_DIR"
HUB_OFFLINE = "HF_HUB_OFFLINE"
# systemd's words to the process that it has started, and to no child of it: no settings of ours.
SERVICE_MANAGER = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
# Not ours, but what is missing of them breaks libraries.
_HOMES = ("HOME",)
_USER_NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")
_TEMPORARY = ("TMPDIR", "TEMP", "TMP")
_PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy"})
_SHARED_MEMORY = Path("/dev/shm")


class ServiceManager(NamedTuple):
    """Whom to tell how the service is; `watchdog_s`: we are ended after so long without a word."""

    address: str
    watchdog_s: float | None


def cache_directory() -> Path:
    """Where fetched models are kept; it need not exist yet. Raises `ResourceError` where no place is."""
    own = _value(CACHE)
    if own is not None:
        return _absolute(CACHE, own)
    parent = _value(XDG_CACHE)
    if parent:
        return Path(parent) / "firstlight"
    home = os.path.expanduser("~")
    if not os.path.isabs(home):  # no HOME, and no entry for our user: a container with a uid of its own
        private = private_directory()
        if private is None:
            raise ResourceError(
                "there is no home directory, and no temporary one that can be written to.",
                f"Name a folder in {CACHE}, or set HOME.",
            )
        home = str(private)
    return Path(home) / ".cache" / "firstlight"


def cache_place(*parts: str) -> Path:
    """Where a file of the cache lies, or would be put: in the cache, or in a temporary folder of our user
    alone where the cache cannot be written to and was not named by FIRSTLIGHT_CACHE."""
    place = cache_directory().joinpath(*parts)
    if place.exists() or _value(CACHE) is not None or _can_be_made(place.parent):
        return place
    private = private_directory()
    return place if private is None else private.joinpath(".cache", "firstlight", *parts)


def private_directory() -> Path | None:
    """A folder of our user alone within a temporary one; None where that cannot be had.

    Others may write beside it, so one that is not ours, or that they may write into, is not taken.
    """
    for parent in temporary_directories():
        folder = parent / f".firstlight-{os.geteuid()}"
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
                return folder
    return None


def temporary_directories() -> tuple[Path, ...]:
    """Folders for what need not last, the usual one first: without it a container still has its memory."""
    import tempfile  # slow, and not needed on the way to the first answer

    found: list[Path] = []
    with contextlib.suppress(FileNotFoundError):
        found.append(Path(tempfile.gettempdir()))
    if _can_be_made(_SHARED_MEMORY):
        found.append(_SHARED_MEMORY)
    return tuple(found)


def complete() -> None:
    """Fill in what a container may leave out, for us, for libraries and for children.

    A home and a name for a user without an entry, a temporary folder where the usual ones cannot be written
    to, and the right to enter the folders that we make ourselves.
    """
    mask = os.umask(0)
    os.umask(mask & ~0o700)
    is_known = True
    if not any(_value(name) for name in _USER_NAMES) or _value(_HOMES[0]) is None:
        import pwd

        try:
            pwd.getpwuid(os.getuid())
        except KeyError:
            is_known = False
    if not is_known and not any(_value(name) for name in _USER_NAMES):
        os.environ[_USER_NAMES[0]] = str(os.getuid())
    if not is_known and _value(_HOMES[0]) is None and (private := private_directory()) is not None:
        os.environ[_HOMES[0]] = str(private)
    if not any(_can_be_made(Path(place)) for place in _temporary_places()) and _can_be_made(_SHARED_MEMORY):
        os.environ[_TEMPORARY[0]] = str(_SHARED_MEMORY)


def proxies() -> dict[str, str]:
    """The variables that name a proxy for HTTP, with the scheme of each: its address may hold a password."""
    found = {name: value for name, value in os.environ.items() if name.lower() in _PROXIES and value}
    return {name: value.partition("://")[0] if "://" in value else "http" for name, value in found.items()}


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


def _temporary_places() -> list[str]:
    """Where `tempfile` looks."""
    named = [place for name in _TEMPORARY if (place := _value(name)) is not None]
    return [*named, "/tmp", "/var/tmp", "/usr/tmp"]


def _can_be_made(folder: Path) -> bool:
    """Whether we may write into a folder, or make it first."""
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _absolute(name: str, value: str) -> Path:
    path = Path(os.path.expanduser(value))
    if not path.is_absolute():
        raise UsageError(f"{name} is {value!r}, which is not an absolute path.", "Give the full path.")
    return path
