"""How much host memory may still be allocated."""

from __future__ import annotations

import os
from pathlib import Path


def host_memory_free(root: Path = Path("/")) -> int:
    """Bytes that can be allocated without swapping, within the process's control group; never negative.

    Page cache counts as available, in the machine and in the group alike: a checkpoint that was just read or fetched
    fills it, and the system gives it back on demand.

    Args:
        root: where /proc and /sys are; another folder in tests.
    """
    machine = _machine(root)
    for folder in _groups(root):
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is not None and used is not None:
            machine = min(machine, limit - used + _reclaimable(folder))
    return max(0, machine)


def _machine(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _groups(root: Path) -> list[Path]:
    """The process's own control group and all above it; each may set a limit."""
    top = root / "sys/fs/cgroup"
    try:
        line = next(x for x in (root / "proc/self/cgroup").read_text().splitlines() if x.startswith("0::"))
    except (OSError, StopIteration):  # no unified hierarchy
        return []
    own = top / line.removeprefix("0::").lstrip("/")
    return [own, *(p for p in own.parents if p == top or top in p.parents)]


def _reclaimable(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(values.get("inactive_file", 0)) + int(values.get("active_file", 0))


def _number(path: Path) -> int | None:
    """A limit or a count; None where there is none ("max", or no such file)."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
