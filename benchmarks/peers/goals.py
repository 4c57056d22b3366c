"""Which peer is to be beaten in what, by how much, and whether it is. Pure.

Used by `page` and `picture`. Invariant: a setting that answered wrongly is no peer, and what was not
measured is neither reached nor missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from peers.measures import BY_NAME, KV_TOKENS, LAUNCH, MEASURES, MEMORY, Measure
from peers.results import LIMITS, Results
from peers.schedule import RIVALS
from peers.settings import LLAMA, OPENVINO, OURS, PEERS, VLLM

READ_SHARE, MULTIPLY_SHARE = 0.70, 0.60
LAUNCH_TIMES, LAUNCH_MORE_S = 20.0, 2.0
KL_GOAL, PERPLEXITY_GOAL = 2e-3, 0.005


@dataclass(frozen=True)
class Best:
    """A peer's best setting in a measure: its median, the least and the most, and how many there are."""

    setting: str
    value: float
    least: float
    most: float
    count: int


@dataclass(frozen=True)
class Goal:
    """`rival` and `reached` are None where something was not measured."""

    label: str
    wanted: str
    rival: str | None
    found: str
    reached: bool | None


# How many times better than the best of `RIVALS` ours has to be.
_TIMES = {"decode_1": 1.3, "crowd_8": 1.3, "crowd_32": 1.3, "prefill_512": 1.1, "first_64": 1.1}


def best(results: Results, peers: Sequence[str], measure: Measure, prefix: str = "") -> Best | None:
    """Of the peers' valid settings; those that were measured in fewer rounds than others fell behind."""
    found = []
    names = dict.fromkeys(sample.setting for sample in results.samples)
    for peer in peers:
        of_peer = [n for n in names if peer_of(n) == peer and n.startswith(prefix) and results.is_valid(n)]
        values = {name: results.values(name, measure.name) for name in of_peer}
        most = max(map(len, values.values()), default=0)
        found += [_best(results, n, v, measure) for n, v in values.items() if v and len(v) == most]
    return max(found, key=lambda one: one.value if measure.is_more_better else -one.value, default=None)


def goals(results: Results) -> list[Goal]:
    """All of them, in the order of the page."""
    rows = [_against(results, BY_NAME[name], RIVALS[name], times) for name, times in _TIMES.items()]
    rows += [_launch_times(results), _launch_more(results), _memory(results)]
    return rows + list(_shares(results)) + list(_quality(results))


def limits(results: Results) -> dict[str, float]:
    """What the machine lets anybody reach, by measure, from the rates that were measured in the same run.

    A step reads every weight once, or multiplies for all its rows, whichever takes longer; a crowd's prompts
    are half as many tokens as its answers.
    """
    read, multiply = results.median(LIMITS, "read_bytes_per_s"), best_multiply(results)
    facts = results.facts
    if read is None or multiply is None or not facts:
        return {}
    weights_s, token_s = facts["weight_bytes"] / read, facts["decode_operations"] / multiply
    first_s = max(weights_s, facts["prefill_64_operations"] / multiply)
    found = {
        "first_64": first_s * 1e3,
        "prefill_512": 512 / max(weights_s, facts["prefill_512_operations"] / multiply),
        "decode_1": 1 / max(weights_s, token_s),
    }
    for name in ("crowd_8", "crowd_32"):
        rows, share = BY_NAME[name].concurrency, BY_NAME[name].prompt_tokens / BY_NAME[name].new_tokens
        prompt_s = facts["prefill_512_operations"] / 512 / multiply
        found[name] = 1 / (max(weights_s, rows * token_s) / rows + share * prompt_s)
    return found


def best_multiply(results: Results) -> float | None:
    """Operations a second of the fastest type."""
    names = {
        s.measure for s in results.samples if s.setting == LIMITS and s.measure.endswith("operations_per_s")
    }
    return max((value for name in names if (value := results.median(LIMITS, name)) is not None), default=None)


def peer_of(setting: str) -> str:
    """Whose setting it is: the first word of its name."""
    return setting.split()[0]


def _best(results: Results, name: str, values: list[float], measure: Measure) -> Best:
    median = results.median(name, measure.name)
    assert median is not None
    return Best(name, median, min(values), max(values), len(values))


def _against(results: Results, measure: Measure, peers: tuple[str, ...], times: float) -> Goal:
    def judge(ours: float, theirs: float) -> tuple[str, bool]:
        ratio = measure.times_better(ours, theirs)
        return f"{ratio:.2f}x", ratio >= times

    return _compared(results, measure, peers, f"{times:g}x the best of {', '.join(peers)}", judge)


def _launch_times(results: Results) -> Goal:
    def judge(ours: float, theirs: float) -> tuple[str, bool]:
        times = theirs / ours
        return f"1/{times:.1f}", times >= LAUNCH_TIMES

    return _compared(results, BY_NAME[LAUNCH], (VLLM,), f"at most 1/{LAUNCH_TIMES:g} of {VLLM}", judge)


def _launch_more(results: Results) -> Goal:
    def judge(ours: float, theirs: float) -> tuple[str, bool]:
        more_s = ours - theirs
        return f"{more_s:+.2f} s", more_s <= LAUNCH_MORE_S

    return _compared(results, BY_NAME[LAUNCH], (LLAMA,), f"within {LAUNCH_MORE_S:g} s of {LLAMA}", judge)


def _compared(
    results: Results,
    measure: Measure,
    peers: tuple[str, ...],
    wanted: str,
    judge: Callable[[float, float], tuple[str, bool]],
) -> Goal:
    """Our best figure against that of `peers`; `judge` says what was found, and whether it suffices."""
    ours, rival = best(results, [OURS], measure), best(results, peers, measure)
    if ours is None or rival is None:
        return Goal(measure.label, wanted, None, "not measured", None)
    return Goal(measure.label, wanted, rival.setting, *judge(ours.value, rival.value))


def _memory(results: Results) -> Goal:
    measure = BY_NAME[MEMORY]
    ours, rival = best(results, [OURS], measure), best(results, [OPENVINO], measure, f"{OPENVINO} int4")
    label, wanted = f"{measure.label}, {KV_TOKENS:,} tokens of KV", f"below {OPENVINO} int4"
    if ours is None or rival is None:
        return Goal(label, wanted, None, "not measured", None)
    share = ours.value / rival.value
    return Goal(label, wanted, rival.setting, f"{share:.2f} of it", share < 1)


def _shares(results: Results) -> Iterator[Goal]:
    for name, label, least in (
        ("decode_1", "share of the read bandwidth, batch 1", READ_SHARE),
        ("prefill_512", "share of the multiply rate, prefill of 512", MULTIPLY_SHARE),
    ):
        share = _share(results, name)
        found = "not measured" if share is None else f"{share:.0%}"
        yield Goal(label, f"at least {least:.0%}", None, found, None if share is None else share >= least)


def _share(results: Results, name: str) -> float | None:
    ours, facts = results.median(OURS, name), results.facts
    if ours is None or not facts:
        return None
    read, multiply = results.median(LIMITS, "read_bytes_per_s"), best_multiply(results)
    if name == "decode_1":
        return ours * facts["weight_bytes"] / read if read else None
    return ours * facts["prefill_512_operations"] / 512 / multiply if multiply else None


def _quality(results: Results) -> Iterator[Goal]:
    if results.quality is None:
        return
    kl = max(gap["kl_mean"] for gap in results.quality["gaps"])
    yield Goal("KL a token against float32", f"at most {KL_GOAL:g}", None, f"{kl:.1e}", kl <= KL_GOAL)
    long = results.quality["long_text"]
    change = long["perplexity"] / long["reference_perplexity"] - 1
    label = f"perplexity on {long['num_bytes'] / 1000:.0f} kB of text against float32"
    yield Goal(label, f"within {PERPLEXITY_GOAL:.1%}", None, f"{change:+.2%}", abs(change) <= PERPLEXITY_GOAL)


def peers_measured(results: Results) -> list[str]:
    """Those with at least one figure, ours first."""
    measured = {peer_of(s.setting) for s in results.samples if s.value is not None}
    return [peer for peer in PEERS if peer in measured]


def measures_taken(results: Results) -> list[Measure]:
    """Those of which there is a figure."""
    taken = {s.measure for s in results.samples if s.value is not None}
    return [measure for measure in MEASURES if measure.name in taken]
