"""What the handlers share: the configuration, the text side, the engine's client, the figures.

Invariant: it holds no state of a request.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from firstlight.base.config import RunConfig
from firstlight.base.errors import RequestError
from firstlight.engine.messages import Ready
from firstlight.serve.engine_link.engine_client import EngineClient
from firstlight.serve.http.metrics import Metrics
from firstlight.serve.parsing.registry import Parsers
from firstlight.text.model import TextModel


@dataclass(frozen=True)
class Server:
    """One api process.

    `generation_defaults` are the model's own sampling values, `startup` is how the start went.
    """

    config: RunConfig
    text: TextModel
    client: EngineClient
    metrics: Metrics
    end_token_ids: frozenset[int] = frozenset()
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    parsers: Parsers = Parsers()
    startup: dict[str, Any] = field(default_factory=lambda: {"status": "ready"})
    started_unix_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def ready(self) -> Ready:
        """What the engine said at its start; handlers run only after it."""
        assert self.client.ready is not None, "a handler ran before the engine was ready"
        return self.client.ready

    @cached_property
    def marker_ids(self) -> frozenset[int]:
        """The tokens that the parsers have to see."""
        ids = map(self.text.token_id, self.parsers.markers)
        return frozenset(token_id for token_id in ids if token_id is not None)

    @property
    def model_name(self) -> str:
        """The name in answers."""
        return self.config.model.served_names[0]

    def check_model(self, name: str | None) -> str:
        """The name for the answer; a 404 for a model that is not served. None means the served one."""
        if name is None:
            return self.model_name
        if name not in self.config.model.served_names:
            raise RequestError(
                f"The model {name[:200]!r} is not served here; this server has "
                f"{', '.join(map(repr, self.config.model.served_names))}.",
                param="model",
                code="model_not_found",
                status=404,
            )
        return name
