"""What a step costs beside the model: which steps count, whose samples they are, and the verdict."""

from __future__ import annotations

import pytest

from firstlight.base.blackbox.reader import EventRecord
from firstlight.base.errors import EngineError
from firstlight.bench.serving.path import PathReport, Step, full_steps, tables
from firstlight.bench.serving.stack_samples import Sampled, tally

STACKS = """\
<module> (/x/site-packages/firstlight/serve/api.py:1);run (/usr/lib/python3.11/asyncio/runners.py:2) 5
send (/x/src/firstlight/serve/http/streaming_response.py:9);send (/x/site-packages/uvicorn/http.py:8) 3
send (/x/src/firstlight/serve/http/streaming_response.py:9);thing (<string>:1) 2
something (<string>:1) 1
not a line of samples
"""


def event(number: int, end_s: float, sequences: int, tokens: int, seconds: float) -> EventRecord:
    return EventRecord("steps", number, end_s, "step", (number, sequences, tokens, round(seconds * 1e6)))


def test_only_full_decode_steps_that_follow_one_another_count() -> None:
    events = [
        event(1, 1.00, 32, 96, 0.5),  # with prompts
        event(2, 1.06, 32, 32, 0.05),
        event(3, 1.12, 32, 32, 0.05),
        event(4, 1.20, 8, 8, 0.05),  # few
        event(9, 2.00, 32, 32, 0.05),  # what was before it is not known
    ]
    steps = full_steps(events, 29)
    assert [step.num_tokens for step in steps] == [32, 32]
    assert [step.before_s for step in steps] == pytest.approx([0.01, 0.01])
    assert steps[0] == Step(0.05, 32, pytest.approx(0.01))
    with pytest.raises(EngineError, match="no step ran 33"):
        full_steps(events, 33)


def test_a_sample_belongs_to_its_innermost_known_frame() -> None:
    assert tally(STACKS) == {
        "asyncio": 5,
        "uvicorn": 3,
        "firstlight.serve.http.streaming_response": 2,
        "other": 1,
    }


@pytest.mark.parametrize(("api_s", "is_met"), [(0.003, True), (0.007, False)])
def test_the_verdict_is_on_all_that_is_beside_the_model(api_s: float, is_met: bool) -> None:
    report = PathReport(
        model="m",
        concurrency=32,
        tokens_per_s=500.0,
        step_s=0.06,
        api_s=api_s,
        between_s=0.001,
        scheduling_s=0.0001,
        num_steps=9,
        profile=(Sampled("uvicorn", 0.5),),
    )
    assert report.meets_goal is is_met
    shown = tables(report)
    assert len(shown) == 2
