"""The hardware inventory on machines that are not here: fake sysfs trees and fake driver libraries."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m31.sdk.accelerators import gfx_name
from m31.sdk.inventory import Inventory, inventory
from m31.sdk.machine import Machine

GIB = 2**30


class FakeNvml:
    """The management library as seen through ctypes: functions that fill what `byref` points at."""

    def __init__(self, capability: tuple[int, int], count: int, *, init: int = 0, lost: int | None = None) -> None:
        self.capability, self.count, self.init, self.lost = capability, count, init, lost
        self.open = 0

    def nvmlInit_v2(self) -> int:
        self.open += self.init == 0
        return self.init

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlSystemGetDriverVersion(self, buffer: Any, size: Any) -> int:
        buffer.value = b"580.65.06"
        return 0

    def nvmlSystemGetCudaDriverVersion_v2(self, out: Any) -> int:
        out._obj.value = 13040
        return 0

    def nvmlDeviceGetCount_v2(self, out: Any) -> int:
        out._obj.value = self.count
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, out: Any) -> int:
        out._obj.value = index.value + 1
        return 15 if index.value == self.lost else 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self.capability
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, out: Any) -> int:
        out._obj.total = 141 * GIB
        return 0

    def nvmlDeviceGetName(self, handle: Any, buffer: Any, size: Any) -> int:
        buffer.value = b"Test Board"
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, buffer: Any, size: Any) -> int:
        buffer.value = f"GPU-{handle.value:04d}-abcd".encode()
        return 0


def look(
    root: Path, libraries: dict[str, Any] | None = None, environ: dict[str, str] | None = None, **fields: Any
) -> Inventory:
    def dlopen(name: str) -> Any:
        if libraries and name in libraries:
            return libraries[name]
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    fields = {"affinity": lambda: 8, "arch": "x86_64", **fields}
    return inventory(Machine(root=root, dlopen=dlopen, environ=environ or {}, **fields))


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def pci(root: Path, slot: str, vendor: str, kind: str) -> None:
    write(root, f"sys/bus/pci/devices/{slot}/vendor", f"{vendor}\n")
    write(root, f"sys/bus/pci/devices/{slot}/class", f"{kind}\n")


def kfd(root: Path, count: int, target: int = 90500) -> None:
    nodes = "sys/class/kfd/kfd/topology/nodes"
    write(root, f"{nodes}/0/properties", "cpu_cores_count 96\ngfx_target_version 0\n")
    for n in range(1, count + 1):
        write(root, f"{nodes}/{n}/properties", f"gfx_target_version {target}\nunique_id {n}\n")
        write(root, f"{nodes}/{n}/name", "board\n")
        write(root, f"{nodes}/{n}/mem_banks/0/properties", f"heap_type 1\nsize_in_bytes {288 * GIB}\n")
    write(root, "dev/kfd", "")
    write(root, "sys/module/amdgpu/version", "6.14.5\n")
    write(root, "opt/rocm/.info/version", "7.2.0-43\n")


# --- management library ----------------------------------------------------------------------


def test_working_devices_are_described(tmp_path: Path) -> None:
    library = FakeNvml((9, 0), 8)
    seen = look(tmp_path, {"libnvidia-ml.so.1": library, "libcuda.so.1": object()})
    assert len(seen.usable_devices) == 8
    first = seen.devices[0]
    assert (first.vendor, first.name, first.arch) == ("nvidia", "Test Board", "sm_90")
    assert (first.memory_bytes, first.driver, first.toolkit) == (141 * GIB, "580.65.06", "13.4")
    assert str(first) == "nvidia Test Board (sm_90, 141 GiB)"
    assert library.open == 0  # nothing is left initialised, so a fork inherits nothing
    json.dumps(seen.to_dict())


@pytest.mark.parametrize(("capability", "arch"), [((10, 0), "sm_100"), ((10, 3), "sm_103"), ((10, 7), "sm_107")])
def test_architecture_names(tmp_path: Path, capability: tuple[int, int], arch: str) -> None:
    seen = look(tmp_path, {"libnvidia-ml.so.1": FakeNvml(capability, 1), "libcuda.so.1": object()})
    assert seen.devices[0].arch == arch


def test_devices_without_the_compute_library_are_present_but_unusable(tmp_path: Path) -> None:
    """A container with the management library alone: everything is visible and nothing can compute (BUG-89)."""
    seen = look(tmp_path, {"libnvidia-ml.so.1": FakeNvml((9, 0), 2)})
    assert seen.usable_devices == ()
    assert [str(d) for d in seen.devices] == [
        "nvidia Test Board (sm_90, 141 GiB): present but unusable: "
        "libcuda.so.1: cannot open shared object file: No such file or directory"
    ] * 2


def test_a_device_without_any_driver_is_present_but_unusable(tmp_path: Path) -> None:
    pci(tmp_path, "0000:01:00.0", "0x10de", "0x030200")
    pci(tmp_path, "0000:01:00.1", "0x10de", "0x040300")  # its audio function
    pci(tmp_path, "0000:00:1f.0", "0x8086", "0x030000")  # another maker's display
    seen = look(tmp_path)
    assert [(d.name, d.usable) for d in seen.devices] == [("PCI 0000:01:00.0", False)]
    assert "libnvidia-ml.so.1: cannot open shared object file" in str(seen.devices[0].problem)


def test_a_virtual_function_is_not_a_second_device(tmp_path: Path) -> None:
    pci(tmp_path, "0000:01:00.0", "0x1002", "0x120000")
    pci(tmp_path, "0000:01:00.4", "0x1002", "0x120000")
    write(tmp_path, "sys/bus/pci/devices/0000:01:00.4/physfn/vendor", "0x1002\n")
    assert len(look(tmp_path).devices) == 1


def test_the_kernel_drivers_own_list_counts_where_the_pci_tree_is_hidden(tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    assert [d.name for d in look(tmp_path).devices] == ["/proc/driver/nvidia/gpus/0000:01:00.0"]


@pytest.mark.parametrize(
    ("code", "words"),
    [(9, "the kernel driver is not loaded"), (18, "driver and library versions differ"), (77, "unknown error")],
)
def test_an_initialisation_failure_is_kept_in_words(tmp_path: Path, code: int, words: str) -> None:
    pci(tmp_path, "0000:01:00.0", "0x10de", "0x030200")
    seen = look(tmp_path, {"libnvidia-ml.so.1": FakeNvml((9, 0), 1, init=code)})
    assert f"nvmlInit_v2 failed: {words}" in str(seen.devices[0].problem)
    assert f"(code {code})" in str(seen.notes)


def test_an_old_library_without_a_function_is_a_note(tmp_path: Path) -> None:
    seen = look(tmp_path, {"libnvidia-ml.so.1": object()})
    assert "libnvidia-ml.so.1: the library has no function nvmlInit_v2" in [str(n) for n in seen.notes]


def test_one_lost_device_does_not_hide_the_others(tmp_path: Path) -> None:
    library = FakeNvml((10, 0), 4, lost=2)
    seen = look(tmp_path, {"libnvidia-ml.so.1": library, "libcuda.so.1": object()})
    assert [d.usable for d in seen.devices] == [True, True, False, True]
    assert "fallen off the bus" in str(seen.devices[2].problem)
    assert library.open == 0


def test_a_device_that_the_driver_does_not_list_is_reported(tmp_path: Path) -> None:
    for n in range(3):
        pci(tmp_path, f"0000:0{n}:00.0", "0x10de", "0x030200")
    seen = look(tmp_path, {"libnvidia-ml.so.1": FakeNvml((9, 0), 2), "libcuda.so.1": object()})
    assert [d.usable for d in seen.devices] == [True, True, False]
    assert seen.devices[2].problem == "the driver lists 2 of 3 devices"


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("0,2", [1, 3]),
        ("3", [4]),
        ("GPU-0002", [2]),
        ("", []),
        ("-1", []),
        ("1,9,2", [2]),  # the runtimes stop at the first name that they do not know
        ("0,0", [1]),
        ("GPU-", []),  # ambiguous
    ],
)
def test_devices_hidden_by_the_user(tmp_path: Path, value: str, kept: list[int]) -> None:
    libraries = {"libnvidia-ml.so.1": FakeNvml((9, 0), 4), "libcuda.so.1": object()}
    seen = look(tmp_path, libraries, {"CUDA_VISIBLE_DEVICES": value})
    assert [d.uuid for d in seen.devices] == [f"GPU-{n:04d}-abcd" for n in kept]
    assert f"CUDA_VISIBLE_DEVICES={value!r} hides {4 - len(kept)} of 4 devices" in str(seen.notes)


# --- sysfs topology ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "name"), [(90500, "gfx950"), (90402, "gfx942"), (90010, "gfx90a"), (110001, "gfx1101")]
)
def test_target_versions(target: int, name: str) -> None:
    assert gfx_name(target) == name


def test_topology_devices_are_described(tmp_path: Path) -> None:
    kfd(tmp_path, 12)
    seen = look(tmp_path)
    assert len(seen.usable_devices) == 12
    first = seen.devices[0]
    assert (first.vendor, first.name, first.arch, first.memory_bytes) == ("amd", "board", "gfx950", 288 * GIB)
    assert (first.driver, first.toolkit) == ("6.14.5", "7.2.0-43")
    assert [d.uuid for d in seen.devices] == [f"GPU-{n:016x}" for n in range(1, 13)]  # numeric order: 2 before 10


def test_hidden_topology_devices(tmp_path: Path) -> None:
    kfd(tmp_path, 4)
    environ = {"ROCR_VISIBLE_DEVICES": "1,2,3", "HIP_VISIBLE_DEVICES": "0,2"}
    seen = look(tmp_path, environ=environ)
    assert [d.uuid for d in seen.devices] == [f"GPU-{n:016x}" for n in (2, 4)]  # one list applied after the other


def test_a_missing_device_node_makes_devices_unusable(tmp_path: Path) -> None:
    kfd(tmp_path, 1)
    (tmp_path / "dev/kfd").unlink()
    seen = look(tmp_path)
    assert "/dev/kfd does not exist" in str(seen.devices[0].problem)


def test_a_forbidden_device_node_makes_devices_unusable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kfd(tmp_path, 1)
    monkeypatch.setattr(
        os, "access", lambda path, mode: False
    )  # the superuser, who may run this test, is never refused
    assert "may not be opened by this user" in str(look(tmp_path).devices[0].problem)


def test_a_board_without_kernel_module_is_present_but_unusable(tmp_path: Path) -> None:
    pci(tmp_path, "0000:c1:00.0", "0x1002", "0x120000")
    seen = look(tmp_path)
    assert "topology/nodes: No such file or directory" in str(seen.devices[0].problem)


# --- processor ----------------------------------------------------------------------


def test_no_device_leaves_the_reasons_as_notes(tmp_path: Path) -> None:
    seen = look(tmp_path)
    assert seen.devices == ()
    assert {n.probe for n in seen.notes} == {
        "/proc/cpuinfo",
        "libnvidia-ml.so.1",
        "/sys/class/kfd/kfd/topology/nodes",
    }


def test_flags_of_both_families(tmp_path: Path) -> None:
    write(
        tmp_path,
        "proc/cpuinfo",
        "processor: 0\nvendor_id : Test\nflags : fpu avx2 avx512_bf16 sse\n\nflags : avx512f\n",
    )
    assert look(tmp_path).cpu.flags == ("avx2", "avx512_bf16")  # the first processor's block, known words only
    write(tmp_path, "proc/cpuinfo", "processor: 0\nFeatures : fp asimd asimddp i8mm\nCPU implementer : 0x41\n")
    cpu = look(tmp_path, arch="aarch64").cpu
    assert (cpu.flags, cpu.vendor) == (("dotprod", "i8mm", "neon"), "0x41")


def test_vector_unit_of_the_base_architecture_is_known_without_a_file(tmp_path: Path) -> None:
    assert look(tmp_path, arch="arm64").cpu.flags == ("neon",)


@pytest.mark.parametrize(
    ("files", "quota", "cores"),
    [
        ({}, None, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2.5, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "9900000 100000\n"}, 99.0, 8),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
                "sys/fs/cgroup/a/cpu.max": "300000 100000\n",
            },
            3.0,
            3,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/x\n2:memory:/y\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
            },
            4.0,
            4,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
            8,
        ),
    ],
)
def test_usable_cores(tmp_path: Path, files: dict[str, str], quota: float | None, cores: int) -> None:
    for path, text in files.items():
        write(tmp_path, path, text)
    cpu = look(tmp_path).cpu
    assert (cpu.affinity, cpu.quota, cpu.cores) == (8, quota, cores)


@given(st.text(max_size=80), st.text(max_size=80), st.text(max_size=80))
def test_garbage_in_system_files_never_raises(tmp_path_factory: Any, a: str, b: str, c: str) -> None:
    root = tmp_path_factory.mktemp("machine")
    for path, text in (("proc/cpuinfo", a), ("sys/fs/cgroup/cpu.max", b), ("proc/self/cgroup", f"0::/\n{c}")):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8", errors="replace")
    write(root, "sys/class/kfd/kfd/topology/nodes/1/properties", "gfx_target_version x\n")
    json.dumps(look(root).to_dict())


def test_this_machine() -> None:
    seen = inventory()
    assert 1 <= seen.cpu.cores <= seen.cpu.affinity
    json.dumps(seen.to_dict())
