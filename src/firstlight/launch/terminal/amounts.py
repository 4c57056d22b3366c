"""Numbers with their units, for people."""

from __future__ import annotations

_PREFIXES = ("", "K", "M", "G", "T")


def amount(value: float, unit: str, *, short: bool = False) -> str:
    """A value with its unit: "98.6 MB", "12 layers"; `short` leaves out the unit of a plain count."""
    if unit != "bytes":
        number = f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"
        return number if short else f"{number} {unit}".rstrip()
    for prefix in _PREFIXES[:-1]:
        if value < 1000:
            return f"{value:.0f} {prefix}B" if not prefix else f"{value:.1f} {prefix}B"
        value /= 1000
    return f"{value:.1f} {_PREFIXES[-1]}B"
