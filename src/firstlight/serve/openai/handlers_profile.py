"""POST /v1/profile: where the time of decode steps goes, recorded on every rank.

Invariant: without API keys only clients on this machine may ask, for it is the operator's question and costs
a little of everybody's time.
"""

from __future__ import annotations

from fastapi import Request

from firstlight.base.errors import RequestError
from firstlight.base.loopback import is_here
from firstlight.serve.engine_link.profile_order import HAND_IN_S
from firstlight.serve.http.streaming_response import Reply
from firstlight.serve.openai import replies
from firstlight.serve.openai.requests import ProfileRequest
from firstlight.serve.server import Server


class ProfileAnswer:
    """The answer to one order. Cancelling `run`, as where the client has gone, ends the recording."""

    def __init__(self, server: Server, request: ProfileRequest) -> None:
        self._client, self._request = server.client, request
        self.most_s = request.timeout_s + 2 * HAND_IN_S  # `run` ends before

    async def run(self, reply: Reply) -> None:
        """Waits for so many recorded decode steps, or until the time is up."""
        if not self._client.is_serving:
            raise self._client.unavailable()
        made = await self._client.profile.make(self._request.steps, self._request.timeout_s)
        await reply.json(replies.encode(made))


def require_near(request: Request) -> None:
    """Refuses clients of other machines. Those of a Unix socket, who have no host, are on this one."""
    host = request.client.host if request.client is not None else ""
    if host and not is_here(host):
        raise RequestError(
            "Without an API key a profile can be asked for from the server's own machine only; "
            "start the server with --api-key, or ask there.",
            code="forbidden",
            status=403,
            kind="permission_error",
        )
