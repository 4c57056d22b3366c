"""How long an all-reduce takes, by its size: an alpha-beta model, or times that were measured.

Latencies of a ring are those of NCCL's own tuning model (its LL protocol, for small messages). Invariant: a
larger message never takes less time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from firstlight.base.errors import UsageError

ALGORITHMS = ("ring", "one-shot", "two-shot")


@dataclass(frozen=True)
class Link:
    """What connects the ranks. `base_s` is paid once, `hop_s` for each step of a ring.

    `direct_s`: the latency of a kernel that reads the other ranks' memory by itself.
    """

    name: str
    base_s: float
    hop_s: float
    direct_s: float
    bytes_per_s: float


LINKS = {
    link.name: link
    for link in (
        Link("pcie", 6.6e-6, 1.0e-6, 8e-6, 25e9),  # PCIe 4.0 x16; 5.0 has twice the rate
        Link("nvlink", 6.6e-6, 0.6e-6, 5e-6, 450e9),
    )
}


class AllReduceTimes(Protocol):
    """Seconds of one all-reduce."""

    def of(self, nbytes: int) -> float:
        """Of a message of so many bytes on each rank."""
        ...

    def explain(self) -> str:
        """Where the times come from."""
        ...


@dataclass(frozen=True)
class AlphaBeta:
    """alpha + beta * bytes. `alpha_s` is the whole latency; `volume` the share of a message that passes a
    link."""

    num_ranks: int
    alpha_s: float
    volume: float
    bytes_per_s: float
    words: str

    def of(self, nbytes: int) -> float:
        """See `AllReduceTimes`."""
        return 0.0 if self.num_ranks == 1 else self.alpha_s + self.volume * nbytes / self.bytes_per_s

    def explain(self) -> str:
        """See `AllReduceTimes`."""
        return (
            f"{self.words}: {self.alpha_s * 1e6:.1f} us and {self.volume:.2f} times the message at "
            f"{self.bytes_per_s / 1e9:g} GB/s"
        )


@dataclass(frozen=True)
class Measured:
    """Times of two sizes or more; between two on the line through both, below the first as the first, above
    the last on the line through the last two."""

    points: tuple[tuple[int, float], ...]

    def of(self, nbytes: int) -> float:
        """See `AllReduceTimes`."""
        points = self.points
        if nbytes <= points[0][0]:
            return points[0][1]
        for (low, low_s), (high, high_s) in zip(points, points[1:], strict=False):
            if nbytes <= high:
                return low_s + (high_s - low_s) * (nbytes - low) / (high - low)
        (low, low_s), (high, high_s) = points[-2:]
        return high_s + max(0.0, high_s - low_s) * (nbytes - high) / (high - low)

    def explain(self) -> str:
        """See `AllReduceTimes`."""
        return "measured: " + ", ".join(f"{1e6 * s:g} us at {size} bytes" for size, s in self.points)


def modelled(algorithm: str, link: Link, num_ranks: int) -> AlphaBeta:
    """The alpha-beta model of an algorithm of `ALGORITHMS` over a link."""
    steps = num_ranks - 1
    shares = 2 * steps / num_ranks
    latency_s, volume = {
        "ring": (link.base_s + 2 * steps * link.hop_s, shares),
        "one-shot": (link.direct_s, float(steps)),
        "two-shot": (2 * link.direct_s, shares),
    }[algorithm]
    return AlphaBeta(num_ranks, latency_s, volume, link.bytes_per_s, f"{algorithm} over {link.name}")


def measured(points: Sequence[tuple[int, float]], model: AlphaBeta) -> AllReduceTimes:
    """Times of sizes, in any order. One alone sets the latency of `model`.

    Raises `UsageError` for times that fall with the size, and for one that the model's rate alone exceeds.
    """
    ordered = sorted(points)
    times = [seconds for _, seconds in ordered]
    if times != sorted(times) or len({size for size, _ in ordered}) != len(ordered):
        raise UsageError(
            "The times of all-reduces must not fall with the size, and a size has one time.",
            "Measure again, with more repetitions for small sizes.",
        )
    if len(ordered) > 1:
        return Measured(tuple(ordered))
    size, seconds = ordered[0]
    alpha_s = seconds - model.volume * size / model.bytes_per_s
    if alpha_s < 0.0:
        raise UsageError(
            f"{seconds * 1e6:g} us are less than {size} bytes take at {model.bytes_per_s / 1e9:g} GB/s.",
            "Give the rate of the link with --link-rate, or times of several sizes.",
        )
    return replace(model, alpha_s=alpha_s, words=f"as measured at {size} bytes, {model.words}")
