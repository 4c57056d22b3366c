"""Control group limits of both versions, read from made-up trees."""

from __future__ import annotations

from pathlib import Path

from firstlight.facts.machine.cgroups import MemoryLimit, cpu_quota, memory_limit


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_no_files_no_limits(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None
    assert cpu_quota(tmp_path) is None


def test_version_2_with_the_tightest_ancestor(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/memory.max": "1000\n",
            "sys/fs/cgroup/outer/memory.current": "700\n",
            "sys/fs/cgroup/outer/memory.stat": "anon 100\ninactive_file 200\n",
            "sys/fs/cgroup/outer/inner/memory.max": "800\n",
            "sys/fs/cgroup/outer/inner/memory.current": "100\n",
            "sys/fs/cgroup/outer/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/outer/inner/cpu.max": "max 100000\n",
        },
    )
    assert memory_limit(root) == MemoryLimit(1000, 400)
    assert cpu_quota(root) == 1.5


def test_version_1(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/job\n4:cpu,cpuacct:/job\n1:name=systemd:/\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "4096\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "5000\n",
            "sys/fs/cgroup/memory/job/memory.stat": "total_inactive_file 1000\ntotal_active_file 3000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "5000\n",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )
    assert memory_limit(root) == MemoryLimit(4096, 1096)
    assert cpu_quota(root) == 4.0


def test_a_container_that_sees_only_its_own_root(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/docker/abc\n0::/../x\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "500\n",
        },
    )
    assert memory_limit(root) == MemoryLimit(2000, 1500)


def test_usage_above_the_limit_leaves_nothing(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "1000\n",
            "sys/fs/cgroup/memory.current": "1500\n",
        },
    )
    assert memory_limit(root) == MemoryLimit(1000, 0)


def test_nonsense_is_no_limit(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "garbage\n0::/\n",
            "sys/fs/cgroup/memory.max": "lots\n",
            "sys/fs/cgroup/memory.current": "1\n",
            "sys/fs/cgroup/cpu.max": "0 0\n",
        },
    )
    assert memory_limit(root) is None
    assert cpu_quota(root) is None
