"""The seam behind which drafters stand: what the engine asks of one, whatever it is.

Implemented by the files beside this one, called by `Speculation`. Invariant: a drafter may propose anything;
it is never trusted, only verified.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Protocol

from firstlight.engine.request import Sequence


class Drafter(Protocol):
    """Guesses the next tokens of sequences. It lives on rank 0 alone.

    What it keeps of a sequence goes into `sequence.draft_memory.own`, and so ends with the sequence.
    """

    name: str  # in /metrics, in /server_info and in the log

    def propose(self, sequences: Rows[Sequence], num: int) -> list[list[int]]:
        """At most `num` drafts for each sequence, whose next step makes a token; none where it knows none.

        A draft is the guess of the token after `sequence.tokens` and the drafts before it.
        """
        ...
