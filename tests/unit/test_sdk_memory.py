"""The memory budget on made-up machines."""

from __future__ import annotations

from pathlib import Path

from m31.sdk.memory import host_memory_free

GB = 10**9


def machine(root: Path, available: int, groups: dict[str, dict[str, str]], own: str = "/") -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {available // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(f"0::{own}\n")
    for name, files in groups.items():
        folder = root / "sys/fs/cgroup" / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text)
    return root


def test_without_a_limit_it_is_the_machine(tmp_path: Path) -> None:
    files = {"memory.max": "max\n", "memory.current": str(5 * GB)}
    assert host_memory_free(machine(tmp_path, 1024 * 1000, {"": files})) == 1024 * 1000


def test_page_cache_of_a_checkpoint_just_read_is_available(tmp_path: Path) -> None:
    """A container of 32 GB whose counter says full, 30 GB of it cache."""
    files = {
        "memory.max": str(32 * GB),
        "memory.current": str(32 * GB - 1000),
        "memory.stat": f"anon {2 * GB}\nactive_file {10 * GB}\ninactive_file {20 * GB}\n",
    }
    assert host_memory_free(machine(tmp_path, 100 * GB, {"": files})) == 30 * GB + 1000


def test_the_tightest_group_counts_and_nothing_is_negative(tmp_path: Path) -> None:
    groups = {
        "a": {"memory.max": str(8 * GB), "memory.current": str(2 * GB)},
        "a/b": {"memory.max": str(3 * GB), "memory.current": str(1 * GB)},
    }
    assert host_memory_free(machine(tmp_path / "x", 100 * GB, groups, own="/a/b")) == 2 * GB
    groups["a"]["memory.current"] = str(9 * GB)
    assert host_memory_free(machine(tmp_path / "y", 100 * GB, groups, own="/a/b")) == 0


def test_this_machine_has_some() -> None:
    assert host_memory_free() > 0
