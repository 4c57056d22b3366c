"""The log says how many drafts are made, and why, but not at every change of mind."""

from __future__ import annotations

import pytest

from firstlight.engine.speculation.metrics import DraftCounts
from firstlight.serve.engine_link.engine_client import LEAST_S, DraftLog


def test_a_choice_is_logged_when_it_changed_and_seldom(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    log = DraftLog(lambda: now_s[0])
    with caplog.at_level("INFO"):
        log.saw(None)
        log.saw(DraftCounts("eagle3", 3, reason="no step yet"))
        for seconds, chosen in ((1.0, 3), (2.0, 3), (3.0, 0), (3.0 + LEAST_S, 0), (4.0 + LEAST_S, 2)):
            now_s[0] = seconds
            log.saw(DraftCounts("eagle3", 3, now=chosen, reason=f"because of {chosen}", num_plain=1))
    assert caplog.messages == [
        "drafts of eagle3: 3 of 3; because of 3",
        "drafts of eagle3: 0 of 3; because of 0",
    ]
