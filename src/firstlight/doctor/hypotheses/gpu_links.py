"""Clues about the links between GPUs: PCIe paths, channels that NCCL names, mappings.

Invariant: a clue cites the look it comes from; what only root may read is not guessed.
"""

from __future__ import annotations

from collections.abc import Iterator

from firstlight.doctor.case.values_device import PciPaths
from firstlight.doctor.case.values_host import Gpu
from firstlight.doctor.case.view import View
from firstlight.doctor.hypotheses.gpu_case import gpus_of
from firstlight.doctor.hypothesis import Clue, Weight

_P2P = r"via P2P/(?:IPC|CUMEM|direct|indirect)"


def paths(view: View) -> Iterator[Clue]:
    """The IOMMU translates what GPUs write, or bridges send it up to the root."""
    seen = next(iter(view.case.all(PciPaths)), None)
    if seen is None or len(seen.value.gpus) < 2:
        return
    if seen.value.redirecting:
        bridges = ", ".join(seen.value.redirecting[:4])
        text = f"bridges above the GPUs redirect peer traffic (ACS): {bridges}"
        yield Clue(text=text, evidence=(seen.id,), weight=Weight.SOME, group="path")
    translated = [gpu for gpu in seen.value.gpus if gpu.is_translated]
    if len(translated) > 1:
        text = (
            f"the IOMMU translates what {len(translated)} GPUs write (groups of type {translated[0].iommu})"
        )
        yield Clue(text=text, evidence=(seen.id,), weight=Weight.SOME, group="path")


def transport(view: View) -> Iterator[Clue]:
    """NCCL says that its channels are P2P."""
    line = view.find_line(_P2P)
    if line is not None:
        text = f"NCCL's channels go over P2P: {line.text.strip()[:140]}"
        yield Clue(text=text, evidence=(line.evidence,), weight=Weight.WEAK, group="transport")


def bar1(view: View) -> tuple[bool | None, Clue] | None:
    """(True, clue) when memory is not all mapped though peers are offered, (None, clue) when all is well."""
    found = gpus_of(view)
    if found is None:
        return None
    gpus = [gpu for gpu in found[1].gpus or () if gpu.bar1_total_bytes and gpu.memory_total_bytes]
    if len(gpus) < 2:
        return None
    small = [gpu for gpu in gpus if (gpu.bar1_total_bytes or 0) < (gpu.memory_total_bytes or 0)]
    if not small:
        return None, Clue(text="BAR1 maps all of the memory of every GPU", evidence=(found[0],))
    told = [state for gpu in small for state in gpu.p2p.values()]
    if told and all(state != "ok" for state in told):
        text = f"the driver offers no peer access ({told[0]}), so that nobody uses it"
        return None, Clue(text=text, evidence=(found[0],))
    is_offered = any(state == "ok" for state in told)
    text = f"{_sizes(small[0])}{', and the driver says that peer access is fine' if is_offered else ''}"
    weight = Weight.SOME if is_offered else Weight.WEAK
    return True, Clue(text=text, evidence=(found[0],), weight=weight, group="bar1")


def _sizes(gpu: Gpu) -> str:
    mapped, all_of_it = (gpu.bar1_total_bytes or 0) / 2**30, (gpu.memory_total_bytes or 0) / 2**30
    return f"BAR1 of GPU {gpu.index} ({gpu.name}) maps {mapped:.2f} of {all_of_it:.0f} GiB"
