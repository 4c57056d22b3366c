"""What must not be concluded from this evidence, though it looks like it.

Pure. Each caution is a trap that somebody has stepped into; it is told only when the case holds what would
mislead.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from firstlight.doctor.case.target import RUN
from firstlight.doctor.case.values_host import Gpus, HostMemory
from firstlight.doctor.case.values_process import Listed
from firstlight.doctor.case.view import View

BAR = re.compile(r"(\d{1,3})% Completed \| *(\d+)/(\d+)")


def cautions_of(view: View) -> tuple[str, ...]:
    """All that apply."""
    return (*_of_the_list(view), *_of_the_bar(view), *_of_memory(view), *_of_gpus(view))


def _of_the_list(view: View) -> Iterator[str]:
    target = view.case.target
    expected = target.expected_ranks
    if not target.is_complete:
        seen = len(target.ranks)
        of = f" of {expected}" if expected else ""
        yield (
            f"The list of processes was cut or typed by somebody ({seen}{of} ranks are on it): nothing says "
            "that the others are missing."
        )
    if view.case.all(Listed):
        yield (
            "%CPU of `ps` is the mean of a process's whole life: 0.0 may be one that has just begun to spin, "
            "and it says nothing about now."
        )


def _of_the_bar(view: View) -> Iterator[str]:
    bars = [match.group(0) for line in view.lines if (match := BAR.search(line.text))]
    ended = [bar for bar in bars if bar.startswith("100%")]
    if ended:
        yield (
            "The bar at 100 % counts shards that were opened, not bytes that have arrived: with mapped files "
            "all of the reading may still be to come."
        )
    if any(count > 1 for count in Counter(ended).values()):
        yield "The same bar printed twice is one bar on two streams or two loads, not two ranks."


def _of_memory(view: View) -> Iterator[str]:
    if any(seen.value.virtual_bytes for seen in view.case.all(Listed)):
        yield "VIRT is reserved address space (CUDA and mapped files reserve it at once), not memory in use."
    host = view.case.all(HostMemory)
    if host and host[-1].value.page_cache_bytes > host[-1].value.total_bytes // 2 and view.is_starting:
        yield (
            "Page cache is what was read from files at some time, perhaps before this start: only its growth "
            "says that something is being read."
        )


def _of_gpus(view: View) -> Iterator[str]:
    looks = {seen.evidence.look for seen in view.case.all(Gpus, subject=RUN) if seen.value.gpus}
    looks |= {seen.evidence.look for seen in view.case.all(Gpus) if seen.value.gpus}
    if len(looks) == 1:
        yield "One look at the GPUs is a sample of at most a second; energy between two looks tells more."
