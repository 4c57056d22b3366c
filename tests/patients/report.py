"""The confusion matrix and the figures that are asked for, from the results of all patients.

Used by `run`. Pure but for printing. Invariant: what was not run is listed with its reason, and what could
not be made counts as wrong.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from patients.one import Result
from patients.patient import Kind

MIN_RIGHT = 0.95
MAX_MEDIAN_S = 10.0


def report(results: Sequence[Result], kinds: Mapping[str, Kind]) -> int:
    """Prints everything; 0 when all three figures were reached."""
    ran = [result for result in results if not result.missing]
    print(matrix(ran))
    _list_right(ran, kinds)
    _list_missing(results)
    first = [result for result in ran if not result.error]
    right = sum(result.is_right for result in ran) / max(1, len(ran))
    alarms = [result for result in ran if result.is_false_alarm]
    times = [result.seconds for result in first if not result.is_healthy]
    median_s = statistics.median(times) if times else 0.0
    num_kinds = len({result.kind for result in ran})
    num_healthy = len({result.kind for result in ran if result.is_healthy})
    print(f"kinds                         {num_kinds}, {num_healthy} of them well or only slow")
    print(f"right first verdicts          {right:.1%} of {len(ran)} (asked: {MIN_RIGHT:.0%})")
    print(f"false alarms on healthy ones  {len(alarms)} of {sum(r.is_healthy for r in ran)} looks (asked: 0)")
    print(f"median from fault to verdict  {median_s:.1f} s (asked: {MAX_MEDIAN_S:.0f} s)")
    for result in alarms:
        print(
            f"  false alarm: {result.kind} {result.seed}: {result.condition}/{result.cause} {result.summary}"
        )
    return 0 if right >= MIN_RIGHT and not alarms and median_s <= MAX_MEDIAN_S else 1


def report_kinds(kinds: Iterable[Kind]) -> int:
    """Each kind, what it is, and the verdict that is right; 0."""
    for kind in kinds:
        print(f"{kind.name:28s} {'/'.join(sorted(kind.conditions))}: {'/'.join(sorted(kind.causes))}")
        print(f"{'':28s}   {kind.what}{f' ({kind.why})' if kind.why else ''}")
    return 0


def report_own(results: Sequence[Result]) -> int:
    """What the supervisor said by itself, and how long it took; 0 when it always named the right process."""
    for result in results:
        said = result.error.splitlines()[-1] if result.error else result.summary
        print(f"{result.kind:24s} {result.seed} {result.seconds:5.1f} s  {said[:180]}")
    times = [result.seconds for result in results if not result.error]
    right = sum(result.is_right for result in results)
    print(f"\nnamed the right process       {right} of {len(results)}")
    print(f"median from fault to verdict  {statistics.median(times) if times else 0:.1f} s")
    return 0 if right == len(results) else 1


def matrix(results: Iterable[Result]) -> str:
    """Expected causes as rows, given ones as columns by number; only those that occur."""
    counted: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        given = f"{result.condition}/{result.cause}" if not result.error else "not made"
        counted["|".join(result.causes) or result.kind][given] += 1
    columns = sorted({given for row in counted.values() for given in row})
    numbers = {given: number for number, given in enumerate(columns, 1)}
    width = max((len(row) for row in counted), default=8)
    lines = ["expected cause".ljust(width) + "".join(f"{numbers[given]:5d}" for given in columns)]
    for expected in sorted(counted):
        cells = (str(counted[expected][given] or ".") for given in columns)
        lines.append(expected.ljust(width) + "".join(cell.rjust(5) for cell in cells))
    lines += ["", "given:", *(f"{number:5d}  {given}" for given, number in numbers.items()), ""]
    return "\n".join(lines)


def _list_right(results: Sequence[Result], kinds: Mapping[str, Kind]) -> None:
    """Each kind with its share of right verdicts, and what else was said."""
    by_kind: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_kind[result.kind].append(result)
    for name, found in by_kind.items():
        right = sum(result.is_right for result in found)
        median_s = statistics.median(result.seconds for result in found)
        others = Counter(_said(result) for result in found if not result.is_right)
        said = "; ".join(f"{count} x {text}" for text, count in others.items())
        print(f"{name:28s} {right:3d}/{len(found):<3d} {median_s:5.1f} s  {said or kinds[name].what}")
    print()


def _said(result: Result) -> str:
    if result.error:
        return f"not made: {result.error.splitlines()[-1][:120]}"
    return f"{result.condition}/{result.cause}/{result.subject} ({result.wrong} wrong)"


def _list_missing(results: Sequence[Result]) -> None:
    reasons = {result.kind: result.missing for result in results if result.missing}
    for kind, reason in reasons.items():
        print(f"not run here: {kind}: {reason}")
    if reasons:
        print()
