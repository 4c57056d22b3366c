"""From which acceptance on drafts pay, and what they bring: arithmetic over the times of steps.

L, the acceptance length, is the tokens of a step with drafts, the model's own one included; c is what such a
step takes, in steps without drafts. Drafts pay where L > c.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from firstlight.facts.planning.decode_time import REDUCTIONS_A_LAYER, DecodeTimes

_HALVINGS = 60


class BreakEven(msgspec.Struct, frozen=True, kw_only=True):
    """Of `num_drafts` for each sequence.

    `acceptance` is accepted over drafted, `chance` the chance of each draft after those before it; both are
    None where no acceptance would do. `gain` is tokens a second at an assumed chance, over those without.
    """

    num_drafts: int
    round_cost: float  # c, and the least L
    acceptance: float | None
    chance: float | None
    gain: float


@dataclass(frozen=True)
class DraftCost:
    """An EAGLE-3 drafter of one layer, by the bytes of weights that a draft reads."""

    read_bytes: int

    @classmethod
    def eagle3(cls, times: DecodeTimes, vocabulary: int) -> DraftCost:
        """Of the target's width and dense inner width, in 16 bits; its head knows `vocabulary` tokens."""
        d = times.description
        hidden = d.hidden_size
        queries = d.num_heads * (d.latent.value_size if d.latent else d.head_size)
        keys = 0 if d.latent else 2 * d.num_kv_heads * d.head_size
        attention = 2 * hidden * (queries + keys) + queries * hidden
        feed_forward = 3 * hidden * d.intermediate_size
        return cls(2 * (attention + feed_forward + vocabulary * hidden))

    def seconds(self, times: DecodeTimes, num_sequences: int) -> float:
        """Of one draft for each sequence, shared out over the ranks as the target is."""
        num_ranks = times.weights.ranks.num
        reduced = REDUCTIONS_A_LAYER if num_ranks > 1 else 0
        return (
            self.read_bytes / num_ranks / times.rates.memory_bytes_per_s
            + reduced * times.all_reduce.of(times.message_bytes(num_sequences))
            + times.rates.layer_s
        )


def break_even(
    times: DecodeTimes, draft: DraftCost, num_drafts: int, scene: tuple[int, int], chance: float
) -> BreakEven:
    """Of so many drafts; `scene`: the number of sequences, and their length. `chance` is that of `gain`."""
    num_sequences, context = scene
    plain = times.step(num_sequences, num_sequences, context).total_s
    verify = times.step(num_sequences * (num_drafts + 1), num_sequences, context).total_s
    cost = (verify + num_drafts * draft.seconds(times, num_sequences)) / plain
    return _at_cost(num_drafts, cost, chance)


def observed_break_even(num_drafts: int, acceptance: float, gain: float, chance: float) -> BreakEven:
    """The break-even that a measured acceptance (accepted over drafted) and gain imply."""
    return _at_cost(num_drafts, (1.0 + num_drafts * acceptance) / gain, chance)


def acceptance_length(chance: float, num_drafts: int) -> float:
    """L, if each draft is accepted with the same chance after those before it."""
    return sum(chance**place for place in range(num_drafts + 1))


def _at_cost(num_drafts: int, cost: float, chance: float) -> BreakEven:
    needed = (cost - 1.0) / num_drafts
    return BreakEven(
        num_drafts=num_drafts,
        round_cost=cost,
        acceptance=needed if needed <= 1.0 else None,
        chance=_chance_of(cost, num_drafts) if needed <= 1.0 else None,
        gain=acceptance_length(chance, num_drafts) / cost,
    )


def _chance_of(length: float, num_drafts: int) -> float:
    """The chance at which the acceptance length is `length`."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        if acceptance_length(middle, num_drafts) < length:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0
