"""Collectors about devices: network adapters, PCIe, the kernel's log, build ids of loaded libraries."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from firstlight.doctor.case.target import HOST
from firstlight.doctor.case.values_device import KernelLog, NicCounters, PciPaths
from firstlight.doctor.case.values_host import Gpus
from firstlight.doctor.case.values_process import Libraries
from firstlight.doctor.collect.environment import LIBRARIES, build_id
from firstlight.doctor.collect.kernel_log import KERNEL_LOG
from firstlight.doctor.collect.nics import NICS
from firstlight.doctor.collect.pci import PCI, acs_control
from firstlight.doctor.collect.run import examine
from firstlight.doctor.collect.scene import Scene
from firstlight.doctor.servers.procfs import ProcFs
from support.doctor_scenes import living, look, target, the, tree

ACS_ON, ACS_OFF = 0x001D, 0x0000


def config(acs: int | None) -> bytes:
    """A bridge's configuration: one extended capability before that of ACS."""
    data = bytearray(4096)
    struct.pack_into("<I", data, 0x100, 0x0001 | 1 << 16 | 0x148 << 20)
    if acs is not None:
        struct.pack_into("<IHH", data, 0x148, 0x000D | 1 << 16, 0x00FF, acs)
    return bytes(data)


def pci_tree(root: Path, *, acs: int | None, is_root: bool = True) -> Path:
    """Two GPUs, each behind a bridge of its own, and a sound device that is none."""
    devices = root / "bus/pci/devices"
    devices.mkdir(parents=True)
    for bridge, gpu, group in (
        ("0000:00:01.0", "0000:01:00.0", "14"),
        ("0000:00:02.0", "0000:02:00.0", "15"),
    ):
        place = f"devices/pci0000:00/{bridge}"
        tree(root, {f"{place}/{gpu}/vendor": "0x10de\n", f"{place}/{gpu}/class": "0x030200\n"})
        tree(root, {f"kernel/iommu_groups/{group}/type": "DMA-FQ\n"})
        (root / place / "config").write_bytes(config(acs) if is_root else config(acs)[:64])
        (root / place / gpu / "iommu_group").symlink_to(root / "kernel/iommu_groups" / group)
        (devices / bridge).symlink_to(root / place)
        (devices / gpu).symlink_to(root / place / gpu)
    sound = "devices/pci0000:00/0000:00:1f.3"
    tree(root, {f"{sound}/vendor": "0x10de\n", f"{sound}/class": "0x040300\n"})
    (devices / "0000:00:1f.3").symlink_to(root / sound)
    return root


def paths(tmp_path: Path, **kinds: object) -> PciPaths:
    sysfs = pci_tree(tmp_path / "sys", **kinds)  # type: ignore[arg-type]
    procfs = ProcFs(tree(tmp_path / "proc", {"cmdline": "root=/dev/sda1 intel_iommu=on iommu=pt quiet\n"}))
    return the(examine(Scene(target(), procfs, sysfs=sysfs), [PCI]), PciPaths, HOST)


def test_gpus_behind_bridges_that_redirect(tmp_path: Path) -> None:
    found = paths(tmp_path, acs=ACS_ON)
    assert [(gpu.address, gpu.iommu, gpu.is_translated, gpu.upstream) for gpu in found.gpus] == [
        ("0000:01:00.0", "DMA-FQ", True, ("0000:00:01.0",)),
        ("0000:02:00.0", "DMA-FQ", True, ("0000:00:02.0",)),
    ]
    assert (found.redirecting, found.num_unread) == (("0000:00:01.0", "0000:00:02.0"), 0)
    assert (found.kernel_options, found.num_iommu_groups) == (("intel_iommu=on", "iommu=pt"), 2)


def test_bridges_that_only_root_may_read_are_counted(tmp_path: Path) -> None:
    found = paths(tmp_path, acs=ACS_ON, is_root=False)
    assert (found.redirecting, found.num_unread) == ((), 2)


def test_the_control_word_of_acs() -> None:
    assert acs_control(config(ACS_ON)) == ACS_ON
    assert acs_control(config(ACS_OFF)) == ACS_OFF
    assert acs_control(config(None)) == 0
    assert acs_control(b"\0" * 64) is None
    loop = bytearray(config(None))
    struct.pack_into("<I", loop, 0x148, 0x0002 | 0x100 << 20)  # a broken list that leads back
    assert acs_control(bytes(loop)) == 0


def test_the_real_bus_is_read_without_harm() -> None:
    found = look(target(), [PCI, NICS])
    assert not found.failures()


def test_counters_of_an_adapter(tmp_path: Path) -> None:
    port = "class/infiniband/mlx5_0/ports/1"
    files = {"state": "4: ACTIVE\n", "link_layer": "Ethernet\n", "counters/port_rcv_data": "12\n"}
    files |= {"hw_counters/packet_seq_err": "7\n", "hw_counters/lifespan": "unknown\n"}
    tree(tmp_path, {f"{port}/{name}": text for name, text in files.items()})
    found = the(examine(Scene(target(), sysfs=tmp_path), [NICS], num_looks=1), NicCounters, HOST)
    (one,) = found.ports
    assert (one.device, one.port, one.state, one.link) == ("mlx5_0", 1, "ACTIVE", "Ethernet")
    assert one.counters == {"packet_seq_err": 7, "port_rcv_data": 12}


def test_lines_of_the_kernel_that_matter(tmp_path: Path) -> None:
    records = (
        "6,1,100,-;usb 1-1: new device\n"
        "3,2,200,-;NVRM: Xid (PCI:0000:01:00): 79, pid=77, GPU has fallen off the bus.\n"
        "6,3,300,-;oom-kill:constraint=CONSTRAINT_MEMCG,task=python\n"
    )
    tree(tmp_path, {"kmsg": records})
    found = the(examine(Scene(target(), devices=tmp_path), [KERNEL_LOG]), KernelLog, HOST)
    assert [line.split(":")[0] for line in found.lines] == ["[0.000] NVRM", "[0.000] oom-kill"]


def test_the_real_kernel_log_ends_or_is_refused() -> None:
    found = look(target(), [KERNEL_LOG])
    refused = found.failures("kernel-log")
    assert found.of(KernelLog, HOST) is not None or refused[0].value.is_refused or refused[0].value.is_gone


def test_the_build_of_a_library_is_the_linkers_own_word() -> None:
    libc = next(
        Path(line.split()[-1])
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libc.so.6" in line or "/libc-" in line
    )
    found = build_id(libc)
    assert len(found) == 40
    if tool := shutil.which("file"):
        told = subprocess.run([tool, "-L", str(libc)], capture_output=True, text=True, check=True).stdout
        assert f"={found}" in told


def test_what_is_no_library_has_no_build(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(
        "no ELF at all, and longer than a header of sixty-four bytes would ever be"
    )
    assert build_id(tmp_path / "text") == ""
    with pytest.raises(OSError, match="gone"):
        build_id(tmp_path / "gone")


def test_builds_of_loaded_libraries(tmp_path: Path) -> None:
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(Path(sys.executable).resolve().read_bytes()[:1_000_000])
    maps = f"7f00-7f01 r-xp 00000000 00:00 0   {library}\n"
    pid = os.getpid()
    root = tree(tmp_path / "proc", {f"{pid}/maps": maps, f"{pid}/stat": Path("/proc/self/stat").read_text()})
    (root / f"{pid}/root").symlink_to("/")
    found = examine(Scene(target(living(pid, "rank-0")), ProcFs(root)), [LIBRARIES])
    (one,) = the(found, Libraries, "rank-0").libraries
    assert (one.name, one.build_id) == ("libnccl.so.2", build_id(library))


def test_an_answer_of_the_driver_with_everything() -> None:
    answer = {
        "gpus": [
            {
                "index": 0,
                "name": "NVIDIA B200",
                "compute_capability": [10, 0],
                "bar1_total_bytes": 1 << 38,
                "fabric": "completed",
                "num_nvlinks": 18,
                "p2p": {"1": "ok"},
                "process_bytes": {"77": None},
            }
        ],
        "driver": "580.1",
        "driver_cuda": "13.0",
        "note": "",
    }
    value = msgspec.convert({"type": "gpus", **answer}, Gpus, strict=False)
    assert value.gpus is not None
    assert (value.gpus[0].compute_capability, value.gpus[0].p2p) == ((10, 0), {1: "ok"})
