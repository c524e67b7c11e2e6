"""One look at the machine's hardware: processor, accelerators, and what could not be found out.

No context is created on any device, nothing survives the call that a fork could break, and torch is not imported:
management library and sysfs only. A device that is seen on one path and cannot be used is listed with the reason,
because a silent absence would become a silent CPU run (BUG-77, BUG-89).
"""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from m31.sdk.machine import Machine, Note


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """The processor as this process may use it."""

    vendor: str | None
    model: str | None
    arch: str  # x86_64, aarch64, ...
    flags: tuple[str, ...]  # of FLAGS, sorted
    affinity: int  # cores that the scheduler lets this process use
    quota: float | None  # cores' worth of time that the control group grants; None: unlimited
    cores: int  # threads worth starting: affinity and quota together, at least 1


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator. `usable` False: present, with `problem` saying why it cannot be used."""

    vendor: str
    name: str
    arch: str | None  # as manifests write it (the driver's own name for the instruction set); None when unknown
    memory_bytes: int | None
    driver: str | None
    toolkit: str | None  # newest toolkit version that driver and runtime serve
    uuid: str | None
    usable: bool
    problem: str | None

    def __str__(self) -> str:
        size = f", {self.memory_bytes / 2**30:.0f} GiB" if self.memory_bytes else ""
        text = f"{self.vendor} {self.name}" + (f" ({self.arch}{size})" if self.arch else "")
        return text if self.usable else f"{text}: present but unusable: {self.problem}"


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The machine. Every field has a JSON form (`to_dict`)."""

    cpu: Cpu
    devices: tuple[Device, ...]
    notes: tuple[Note, ...]

    @property
    def usable_devices(self) -> tuple[Device, ...]:
        """The accelerators that a backend may open."""
        return tuple(d for d in self.devices if d.usable)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        return asdict(self)


# What kernels select code by. Spelt as on x86; the ARM names of /proc/cpuinfo are translated.
# fmt: off
FLAGS = frozenset({
    "f16c", "fma", "avx", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni",
    "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "neon", "dotprod", "i8mm", "bf16", "sve", "sve2",
})
# fmt: on
_TRANSLATED = {"asimd": "neon", "asimddp": "dotprod"}


def inventory(machine: Machine | None = None) -> Inventory:
    """Take the inventory of this machine, or of the one behind `machine`. Never raises for hardware that is absent."""
    from m31.sdk.accelerators import list_devices

    machine = Machine() if machine is None else machine
    cpu = _cpu(machine)
    devices = list_devices(machine, _vendors())
    return Inventory(cpu=cpu, devices=devices, notes=tuple(machine.notes))


def _vendors() -> list[dict[str, Any]]:
    table = tomllib.loads((Path(__file__).parent / "vendors.toml").read_text(encoding="utf-8"))
    vendors: list[dict[str, Any]] = table["vendor"]
    return vendors


def _cpu(machine: Machine) -> Cpu:
    info = _cpuinfo(machine)
    words = set((info.get("flags") or info.get("features") or "").split())
    flags = {_TRANSLATED.get(word, word) for word in words} & FLAGS
    if machine.arch in ("aarch64", "arm64"):
        flags.add("neon")  # part of the base architecture, wherever the flags are not published as a file
    affinity = machine.affinity()
    quota = _quota(machine)
    # Rounded down: a thread more than the quota pays for is stopped in every period, and all others wait for it.
    cores = affinity if quota is None else max(1, min(affinity, int(quota)))
    return Cpu(
        vendor=info.get("vendor_id") or info.get("cpu implementer"),
        model=info.get("model name"),
        arch=machine.arch,
        flags=tuple(sorted(flags)),
        affinity=affinity,
        quota=quota,
        cores=cores,
    )


def _cpuinfo(machine: Machine) -> dict[str, str]:
    """The first processor's block of /proc/cpuinfo, keys in lower case."""
    text = machine.read("proc/cpuinfo")
    block: dict[str, str] = {}
    for line in (text or "").splitlines():
        key, colon, value = line.partition(":")
        if not colon:
            if block:
                break
            continue
        block[key.strip().lower()] = value.strip()
    return block


def _quota(machine: Machine) -> float | None:
    """The tightest CPU limit of this process's control groups, in cores; None when there is none."""
    limits: list[float] = []
    for line in (machine.read("proc/self/cgroup", quiet=True) or "").splitlines():
        _, first, rest = line.partition(":")
        controllers, second, path = rest.partition(":")
        if not first or not second:
            machine.note("/proc/self/cgroup", f"a line of unknown form: {line!r}")
        elif not controllers:
            limits += _limits_v2(machine, path)
        elif "cpu" in controllers.split(","):
            limits += _limits_v1(machine, controllers, path)
    return min(limits, default=None)


def _ancestors(path: str) -> list[str]:
    """`/a/b` -> a/b, a and the root: a limit on any of them binds."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return ["/".join(parts[:n]) for n in range(len(parts), -1, -1)]


def _limits_v2(machine: Machine, path: str) -> list[float]:
    limits = []
    for group in _ancestors(path):
        words = (machine.read(f"sys/fs/cgroup/{group}/cpu.max", quiet=True) or "").split()
        if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]) > 0:
            limits.append(int(words[0]) / int(words[1]))
    return limits


def _limits_v1(machine: Machine, controllers: str, path: str) -> list[float]:
    limits = []
    for mount in {controllers, "cpu", "cpu,cpuacct"}:
        for group in _ancestors(path):
            base = f"sys/fs/cgroup/{mount}/{group}"
            quota = (machine.read(f"{base}/cpu.cfs_quota_us", quiet=True) or "").strip()
            period = (machine.read(f"{base}/cpu.cfs_period_us", quiet=True) or "").strip()
            if quota.isdecimal() and period.isdecimal() and int(period) > 0:  # -1: unlimited
                limits.append(int(quota) / int(period))
    return limits
