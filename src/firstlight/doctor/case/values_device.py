"""Values of evidence about devices and the kernel's word on them: network adapters, PCIe paths, its log.

See `values` for the union. Invariant: None and empty mean "not told", never zero.
"""

from __future__ import annotations

import msgspec


class NicPort(msgspec.Struct, frozen=True, kw_only=True):
    """One port of an RDMA adapter with its counters, standard and vendor's, as they stand."""

    device: str
    port: int
    state: str = ""  # "ACTIVE", "DOWN", ...
    link: str = ""  # "InfiniBand" or "Ethernet"
    counters: dict[str, int] = {}


class NicCounters(msgspec.Struct, frozen=True, kw_only=True, tag="nic-counters"):
    """All ports of this machine."""

    ports: tuple[NicPort, ...]


class PciGpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU on the bus. `iommu` is its group's type: "DMA", "DMA-FQ", "identity"; empty: not told."""

    address: str
    iommu: str = ""
    upstream: tuple[str, ...] = ()  # bridges between it and the root, the nearest first

    @property
    def is_translated(self) -> bool | None:
        """Whether its writes to other devices go through a table of the IOMMU."""
        return self.iommu.startswith("DMA") if self.iommu else None


class PciPaths(msgspec.Struct, frozen=True, kw_only=True, tag="pci-paths"):
    """What stands between the GPUs. `redirecting`: bridges whose ACS sends peer traffic up to the root.

    `num_unread`: bridges of which only root may read that.
    """

    kernel_options: tuple[str, ...]  # of the kernel's command line, those about IOMMU and ACS
    num_iommu_groups: int
    gpus: tuple[PciGpu, ...]
    redirecting: tuple[str, ...] = ()
    num_unread: int = 0


class KernelLog(msgspec.Struct, frozen=True, kw_only=True, tag="kernel-log"):
    """Lines of the kernel's log that explain an end or a sick device, since it booted."""

    lines: tuple[str, ...]
