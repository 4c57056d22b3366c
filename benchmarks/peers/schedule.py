"""What is still to be measured in which round, and about how long that takes. Pure.

Used by `rounds`. Invariant: it follows from the results alone, so that a run that was broken off goes on with
what it would have done next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peers.measures import BY_NAME, LAUNCH, MEMORY, Measure
from peers.results import Results
from peers.settings import LLAMA, OPENVINO, VLLM, Setting

# Whose best is compared with ours in a measure. After the first round these peers go on with it, and of their
# settings those that are at most so far behind the best one: all else is shown, and would only take time.
RIVALS: dict[str, tuple[str, ...]] = {
    "decode_1": (LLAMA,),
    "crowd_8": (OPENVINO, VLLM),
    "crowd_32": (OPENVINO, VLLM),
    "prefill_512": (OPENVINO,),
    "first_64": (OPENVINO,),
    LAUNCH: (LLAMA, VLLM),
    MEMORY: (OPENVINO,),
}
BEHIND = 1.25
_UNKNOWN_S = 10.0
_FULLEST = "crowd_32"  # memory is looked at after it, when all of the KV cache that is used has been touched


@dataclass(frozen=True)
class Schedule:
    """All settings and measures that were asked for."""

    settings: Sequence[Setting]
    measures: Sequence[Measure]

    def needs(self, results: Results, setting: Setting, round_number: int) -> list[Measure]:
        """What a visit has to measure, in order; empty: there is no visit."""
        if results.is_wrong(setting.name) or (round_number - 1) % setting.every:
            return []
        names = self._goes_on(results, setting) if round_number > 1 else {m.name for m in self.measures}
        return [
            measure
            for measure in self.measures
            if measure.name in names
            and results.value(round_number, setting.name, measure.name) is None
            and not (measure.name == LAUNCH and setting.stays and results.values(setting.name, LAUNCH))
        ]

    def remaining_s(self, results: Results, round_number: int, setting: Setting | None = None) -> float:
        """An estimate, from the visit of `setting` on, of that round to the end."""
        names = [one.name for one in self.settings]
        first = names.index(setting.name) if setting else 0
        total_s = 0.0
        for number in range(round_number, results.rounds + 1):
            for one in self.settings[first if number == round_number else 0 :]:
                total_s += sum(_took_s(results, one, m) for m in self.needs(results, one, number))
        return total_s

    def _goes_on(self, results: Results, setting: Setting) -> set[str]:
        names = {m.name for m in self.measures if self._keeps_up(results, setting, m)}
        if MEMORY in names and BY_NAME[_FULLEST] in self.measures:
            names.add(_FULLEST)
        return names

    def _keeps_up(self, results: Results, setting: Setting, measure: Measure) -> bool:
        ours = results.value(1, setting.name, measure.name)
        peers = RIVALS.get(measure.name, ()) if setting.peer in (LLAMA, OPENVINO, VLLM) else (setting.peer,)
        if setting.peer not in peers:
            return False
        if measure.name == LAUNCH:
            peers = (setting.peer,)  # each is compared by itself
        rivals = [s.name for s in self.settings if s.peer in peers and not results.is_wrong(s.name)]
        if ours is None:
            return not any(results.value(1, name, measure.name) for name in rivals)
        values = [value for name in rivals if (value := results.value(1, name, measure.name)) is not None]
        best = max(values) if measure.is_more_better else min(values)
        return measure.times_better(best, ours) <= BEHIND


def _took_s(results: Results, setting: Setting, measure: Measure) -> float:
    known = [s for s in results.samples if s.measure == measure.name and s.value is not None]
    own = [s for s in known if s.setting == setting.name]
    return (own or known)[-1].took_s if known else _UNKNOWN_S
