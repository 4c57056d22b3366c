"""The profile that the engine makes for a client, if it makes one: at most one at a time.

Invariant: the engine is told to end a profile at its deadline, and at once when the client has gone, so that
it never records for nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from firstlight.base.errors import RequestError, as_sentence
from firstlight.engine.messages import Profile, StartProfile, StopProfile, ToEngine

HAND_IN_S = 30.0  # a step of a long prompt may lie before the order to end


class ProfileOrder:
    """`send` takes messages to the engine."""

    def __init__(self, send: Callable[[ToEngine], None]) -> None:
        self._send = send
        self._answer: asyncio.Future[Profile] | None = None
        self._num_unwanted = 0  # that the engine still hands in, as it does one for every start

    async def make(self, num_steps: int, timeout_s: float) -> Profile:
        """So many recorded decode steps, or what there is of them at the deadline.

        Raises `RequestError` where a profile is being made already, or the engine does not hand it in.
        """
        if self._answer is not None:
            raise RequestError(
                "A profile is being made already; ask again when it is finished.",
                code="profile_running",
                status=409,
            )
        answer: asyncio.Future[Profile] = asyncio.get_running_loop().create_future()
        self._answer = answer
        try:
            self._send(StartProfile(num_steps))
            await asyncio.wait((answer,), timeout=timeout_s)
            if not answer.done():
                self._send(StopProfile())
                await asyncio.wait((answer,), timeout=HAND_IN_S)
            if not answer.done():
                raise _failed(f"the engine handed in no profile within {HAND_IN_S:.0f} s of its end")
            return answer.result()
        finally:
            if not answer.done():
                self._send(StopProfile())
                self._num_unwanted += 1
                answer.cancel()
            self._answer = None

    def deliver(self, profile: Profile) -> None:
        """The engine's answer, to the oldest order."""
        if self._num_unwanted:
            self._num_unwanted -= 1
        elif self._answer is not None and not self._answer.done():
            self._answer.set_result(profile)

    def fail(self, reason: str) -> None:
        """There will be no answer."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(_failed(reason))


def _failed(reason: str) -> RequestError:
    return RequestError(
        f"There is no profile: {as_sentence(reason)} /health says how the engine is.",
        code="engine_failed",
        status=503,
        kind="server_error",
        retry_after_s=5.0,
    )
