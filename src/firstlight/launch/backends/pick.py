"""The backend that was asked for. Called by `launch.serve`."""

from __future__ import annotations

from collections.abc import Sequence

from firstlight.base.resolve import Resolved
from firstlight.launch.backends.native import NativeBackend
from firstlight.launch.backends.protocol import Backend


def pick_backend(resolved: Resolved, cores: Sequence[int]) -> Backend:
    """By the setting `backend`; `cores`: those we may use."""
    name = resolved.launch.backend
    if name == "native":
        return NativeBackend(resolved, cores)
    from firstlight.launch.backends.foreign import ForeignBackend  # brings an HTTP client and YAML
    from firstlight.launch.backends.kinds import KINDS

    return ForeignBackend(KINDS[name], resolved)
