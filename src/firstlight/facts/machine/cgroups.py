"""The limits that control groups (version 1 and 2) put on this process: memory and processor time.

Linux only; elsewhere, and where the files are hidden, there is no limit. Invariant: the limits of all
ancestors count, and the tightest one is returned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Of the page cache, at most half: without it every call would be read from the disk anew. The kernel's own
# MemAvailable leaves out a part in the same way.
RUNNING_CODE_BYTES = 16 * 2**20
UNLIMITED_BYTES = 1 << 60  # version 1 writes a number near 2^63 for "no limit"


@dataclass(frozen=True)
class MemoryLimit:
    """`available_bytes` of `limit_bytes` can still be taken: page cache that can be dropped counts as free,
    but for what is needed of programs and libraries that are running."""

    limit_bytes: int
    available_bytes: int


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """The control group limit that leaves the least memory, or None."""
    limits = [limit for folder, version in _folders(root, "memory") if (limit := _memory(folder, version))]
    return min(limits, key=lambda limit: limit.available_bytes, default=None)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Processor time we may use, in cores (1.5: one and a half), or None for no limit."""
    quotas = [quota for folder, version in _folders(root, "cpu") if (quota := _quota(folder, version))]
    return min(quotas, default=None)


def _folders(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """The folders of our control group and its ancestors, with the version of their files."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        version = 1 if controllers else 2
        # A combined hierarchy is mounted as "cpu,cpuacct", with a link for each name on most systems.
        names = dict.fromkeys((controller, controllers)) if controllers else ("", "unified")
        parts = [part for part in group.split("/") if part and part != ".."]
        for name in names:
            base = root / "sys/fs/cgroup" / name
            for depth in range(len(parts), -1, -1):
                yield base.joinpath(*parts[:depth]), version


def _memory(folder: Path, version: int) -> MemoryLimit | None:
    limit_name, usage_name, cache_names = (
        ("memory.max", "memory.current", ("inactive_file", "active_file"))
        if version == 2
        else (
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            ("total_inactive_file", "total_active_file"),
        )
    )
    limit, usage = _number(_text(folder / limit_name)), _number(_text(folder / usage_name))
    if limit is None or usage is None or limit >= UNLIMITED_BYTES:
        return None
    cache_bytes = 0
    for line in _text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in cache_names:
            cache_bytes += _number(value) or 0
    cache_bytes -= min(cache_bytes // 2, RUNNING_CODE_BYTES)
    return MemoryLimit(limit, max(0, limit - max(0, usage - cache_bytes)))


def _quota(folder: Path, version: int) -> float | None:
    if version == 2:
        words = _text(folder / "cpu.max").split()
    else:
        words = [_text(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    if len(words) != 2:
        return None
    quota_us, period_us = _number(words[0]), _number(words[1])
    return quota_us / period_us if quota_us and period_us else None


def _number(text: str) -> int | None:
    """A number that is not negative; None for "max", -1 and anything else."""
    text = text.strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
