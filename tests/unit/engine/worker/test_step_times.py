"""T(m), measured at the start: every size is run, nothing stays, and a small engine measures what it can."""

from __future__ import annotations

import pytest
import torch

from firstlight.base.config import EngineSection
from firstlight.engine.core import EngineCore
from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.scheduler.scheduler import Scheduler
from firstlight.engine.worker.step_times import ROWS, measure_step_times


class Model:
    """Says token 3 always, and remembers the sizes of its steps."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, plan: StepPlan) -> torch.Tensor:
        self.sizes.append(len(plan.slots))
        logits = torch.zeros(len(plan.samples), 8)
        logits[:, 3] = 1.0
        return logits


@pytest.mark.parametrize(
    ("section", "pages", "sizes"),
    [
        ({"max_num_seqs": 32}, 100, ROWS),
        ({"max_num_seqs": 5}, 100, (1, 2, 4)),
        ({"max_num_seqs": 32}, 25, (1, 2, 4)),  # a sequence of 22 tokens takes 6 pages
        ({"max_num_seqs": 32, "max_model_len": 2}, 100, (1,)),  # it ends with its first token
    ],
)
def test_every_size_that_fits_is_run(
    section: dict[str, int], pages: int, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firstlight.engine.worker.step_times.BUDGET_S", 60.0)  # however busy the machine is
    values = {"max_batched_tokens": 32, "max_model_len": 32, "page_size_tokens": 4} | section
    scheduler = Scheduler(EngineSection(**values), pages + 1, [3])  # type: ignore[arg-type]
    model = Model()
    core = EngineCore(scheduler, model)
    times = measure_step_times(core, vocab_size=8)
    assert set(model.sizes) >= set(sizes)
    assert tuple(times) == sizes
    assert all(seconds > 0 for seconds in times.values())
    stats = scheduler.stats()
    assert (stats.num_running, stats.pages_used, stats.pages_cached) == (0, 0, 0)
    assert (stats.cache_query_tokens, stats.num_preemptions) == (0, 0)
    assert core.step() is None


@pytest.mark.parametrize(
    ("seconds", "num_steps"),
    [
        ({1: 0.001, 2: 0.008}, {1: 4, 2: 3}),  # short ones until 20 milliseconds are over, at most four times
        ({1: 0.01, 2: 0.015}, {1: 2, 2: 2}),  # and at least twice
        ({1: 0.03, 2: 0.05, 4: 0.08}, {1: 2, 2: 1, 4: 1}),  # long ones once, but the first
        ({1: 0.03, 2: 0.09, 4: 0.1}, {1: 2, 2: 2, 4: 1}),  # unless they are longer than they can be
        ({1: 0.048, 2: 0.008, 4: 0.071}, {1: 2, 2: 3, 4: 2}),
    ],
)
def test_long_steps_are_run_once_where_they_are_in_line(
    seconds: dict[int, float], num_steps: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firstlight.engine.worker.step_times.BUDGET_S", 60.0)
    looks: list[int] = []

    def step_of(core: EngineCore, size: int) -> float | None:
        core.step()
        looks.append(size)
        return seconds[size]

    monkeypatch.setattr("firstlight.engine.worker.step_times._step_of", step_of)
    section = EngineSection(
        max_num_seqs=max(seconds), max_batched_tokens=32, max_model_len=32, page_size_tokens=4
    )
    core = EngineCore(Scheduler(section, 101, [3]), Model())
    times = measure_step_times(core, vocab_size=8)
    assert {size: looks.count(size) for size in seconds} == num_steps
    assert times == {size: min(s for of, s in seconds.items() if of >= size) for size in seconds}
    assert core.step() is None


def test_when_the_time_is_up_the_smaller_sizes_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firstlight.engine.worker.step_times.BUDGET_S", 0.0)
    section = EngineSection(max_num_seqs=32, max_batched_tokens=32, max_model_len=32, page_size_tokens=4)
    core = EngineCore(Scheduler(section, 101, [3]), Model())
    assert list(measure_step_times(core, vocab_size=8)) == [1]
    assert core.step() is None
