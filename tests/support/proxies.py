"""Proxies of the environment, which a test starts without."""

from __future__ import annotations

import pytest

NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


def forget_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable names one, in small letters or in capitals."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
