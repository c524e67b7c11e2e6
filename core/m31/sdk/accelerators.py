"""The accelerator half of the inventory: PCI tree, management library, sysfs.

Success paths that need real hardware are exercised with fake libraries and fake sysfs trees in the tests.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from typing import Any

from m31.sdk.inventory import Device
from m31.sdk.machine import Machine

Vendor = dict[str, Any]
_DISPLAY, _ACCELERATOR = "0x03", "0x12"  # PCI base classes


def list_devices(machine: Machine, vendors: list[Vendor]) -> tuple[Device, ...]:
    """Every accelerator of the known makers, usable or not, less those that an environment variable hides."""
    devices: list[Device] = []
    for vendor in vendors:
        before = len(machine.notes)
        listed = _DRIVERS[vendor["driver"]](machine, vendor)
        present = _present(machine, vendor)
        if len(present) > len(listed):
            listed += _unlisted(machine, vendor, present, len(listed), before)
        devices += _visible(machine, vendor, listed)
    return tuple(devices)


def _present(machine: Machine, vendor: Vendor) -> list[str]:
    """Where the machine itself (not a driver library) shows this maker's devices."""
    seen = []
    for folder in machine.glob("sys/bus/pci/devices/*"):
        path = folder.relative_to(machine.root).as_posix()
        maker = (machine.read(f"{path}/vendor", quiet=True) or "").strip()
        kind = (machine.read(f"{path}/class", quiet=True) or "").strip()
        virtual = (folder / "physfn").exists()  # a virtual function on its host is its physical function again
        if maker == vendor["pci_vendor"] and kind.startswith((_DISPLAY, _ACCELERATOR)) and not virtual:
            seen.append(f"PCI {folder.name}")
    if "presence" in vendor:
        paths = [f"/{p.relative_to(machine.root).as_posix()}" for p in machine.glob(vendor["presence"])]
        seen = max(seen, paths, key=len)
    return seen


def _unlisted(machine: Machine, vendor: Vendor, present: list[str], working: int, first_note: int) -> list[Device]:
    """Devices that the machine has and the driver does not list."""
    notes = "; ".join(str(note) for note in machine.notes[first_note:])
    problem = notes or f"the driver lists {working} of {len(present)} devices"
    # The driver does not say which one it lost; naming any place would accuse the wrong board unless all are lost.
    places = present if working == 0 else [f"one of {len(present)} devices"] * (len(present) - working)
    return [_broken(vendor, place, problem) for place in places]


def _broken(vendor: Vendor, name: str, problem: str) -> Device:
    return Device(
        vendor=vendor["name"],
        name=name,
        arch=None,
        memory_bytes=None,
        driver=None,
        toolkit=None,
        uuid=None,
        usable=False,
        problem=problem,
    )


def _visible(machine: Machine, vendor: Vendor, devices: list[Device]) -> list[Device]:
    """Apply the variables by which a user hides devices, as the maker's runtime would."""
    for variable in vendor["visible"]:
        value = machine.environ.get(variable)
        if value is None:
            continue
        kept = _named(value, devices)
        if len(kept) < len(devices):
            machine.note(variable, f"{variable}={value!r} hides {len(devices) - len(kept)} of {len(devices)} devices")
        devices = kept
    return devices


def _named(value: str, devices: list[Device]) -> list[Device]:
    """Devices that a list such as `0,2` or `GPU-1f2e,...` names; like the runtimes, stop at the first unknown name."""
    kept: list[Device] = []
    for word in (part.strip() for part in value.split(",")):
        if word.isdecimal() and int(word) < len(devices):
            found = devices[int(word)]
        else:
            matches = [d for d in devices if word and d.uuid is not None and d.uuid.startswith(word)]
            if len(matches) != 1:
                break
            found = matches[0]
        if found not in kept:
            kept.append(found)
    return kept


# --- management library ----------------------------------------------------------------------

_NVML_CODES = {
    3: "not supported",
    4: "no permission",
    9: "the kernel driver is not loaded",
    12: "a library of the driver is missing",
    15: "the device has fallen off the bus",
    18: "driver and library versions differ; reboot or reload the driver",
}


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _CallError(Exception):
    """A library call answered with an error code, or the library lacks the function."""


def _call(library: Any, function: str, *arguments: Any) -> None:
    try:
        code = getattr(library, function)(*arguments)
    except AttributeError:
        raise _CallError(f"the library has no function {function}") from None
    if code != 0:
        raise _CallError(f"{function} failed: {_NVML_CODES.get(code, 'unknown error')} (code {code})")


def _text(library: Any, function: str, *arguments: Any) -> str:
    buffer = ctypes.create_string_buffer(128)
    _call(library, function, *arguments, buffer, ctypes.c_uint(len(buffer)))
    return buffer.value.decode("utf-8", "replace")


def _nvml_devices(machine: Machine, vendor: Vendor) -> list[Device]:
    name = vendor["library"]
    library = machine.library(name)
    if library is None:
        return []
    try:
        _call(library, "nvmlInit_v2")
    except _CallError as error:
        machine.note(name, str(error))
        return []
    try:
        return _nvml_list(machine, vendor, library)
    except _CallError as error:
        machine.note(name, str(error))
        return []
    finally:
        # Init and shutdown in one call leave no state behind that a fork would inherit.
        library.nvmlShutdown()


def _nvml_list(machine: Machine, vendor: Vendor, library: Any) -> list[Device]:
    driver = _text(library, "nvmlSystemGetDriverVersion")
    number = ctypes.c_int()
    _call(library, "nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(number))
    toolkit = f"{number.value // 1000}.{number.value % 1000 // 10}"
    count = ctypes.c_uint()
    _call(library, "nvmlDeviceGetCount_v2", ctypes.byref(count))
    devices = []
    for index in range(count.value):
        try:
            device = _nvml_device(vendor, library, index)
        except _CallError as error:
            devices.append(_broken(vendor, f"device {index}", str(error)))
            continue
        devices.append(replace(device, driver=driver, toolkit=toolkit))
    # A container may carry the management library alone; then every device is visible and none can compute.
    if devices and machine.library(vendor["runtime"]) is None:
        problem = str(machine.notes[-1])
        devices = [replace(d, usable=False, problem=d.problem or problem) for d in devices]
    return devices


def _nvml_device(vendor: Vendor, library: Any, index: int) -> Device:
    handle = ctypes.c_void_p()
    _call(library, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
    major, minor, memory = ctypes.c_int(), ctypes.c_int(), _Memory()
    _call(library, "nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
    _call(library, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    return Device(
        vendor=vendor["name"],
        name=_text(library, "nvmlDeviceGetName", handle),
        arch=f"sm_{major.value}{minor.value}",
        memory_bytes=memory.total,
        driver=None,
        toolkit=None,
        uuid=_text(library, "nvmlDeviceGetUUID", handle),
        usable=True,
        problem=None,
    )


# --- sysfs topology ----------------------------------------------------------------------

_NODES = "sys/class/kfd/kfd/topology/nodes"


def _kfd_devices(machine: Machine, vendor: Vendor) -> list[Device]:
    driver = (machine.read(vendor["driver_version"], quiet=True) or "").strip() or None
    toolkit = (machine.read(vendor["toolkit_version"], quiet=True) or "").strip() or None
    problem = _kfd_access(machine)
    devices = []
    for node in sorted(machine.glob(f"{_NODES}/*"), key=lambda n: int(n.name)):  # 2 before 10: the runtime's order
        path = node.relative_to(machine.root).as_posix()
        properties = _properties(machine, f"{path}/properties")
        target = properties.get("gfx_target_version", 0)
        if target == 0:  # a processor's node, or a device that this control group may not read
            continue
        name = (machine.read(f"{path}/name", quiet=True) or "").strip()
        devices.append(
            Device(
                vendor=vendor["name"],
                name=name or f"device {node.name}",
                arch=gfx_name(target),
                memory_bytes=_local_memory(machine, path),
                driver=driver,
                toolkit=toolkit,
                uuid=f"GPU-{properties['unique_id']:016x}" if properties.get("unique_id") else None,
                usable=problem is None,
                problem=problem,
            )
        )
    if not devices:
        machine.note(
            f"/{_NODES}", "lists no accelerator" if machine.glob(f"{_NODES}/*") else "No such file or directory"
        )
    return devices


def gfx_name(target: int) -> str:
    """`gfx_target_version` (major * 10000 + minor * 100 + step) as the compiler writes it: 90500 -> gfx950."""
    return f"gfx{target // 10000}{target // 100 % 100:x}{target % 100:x}"


def _kfd_access(machine: Machine) -> str | None:
    node = machine.root / "dev/kfd"
    if not node.exists():
        return "/dev/kfd does not exist (in a container, pass the device in)"
    if not os.access(node, os.R_OK | os.W_OK):
        return "/dev/kfd may not be opened by this user (join the group that owns it)"
    return None


def _properties(machine: Machine, path: str) -> dict[str, int]:
    """`key number` lines; others are not ours to read."""
    found = {}
    for line in (machine.read(path, quiet=True) or "").splitlines():
        words = line.split()
        if len(words) == 2 and words[1].isdecimal():
            found[words[0]] = int(words[1])
    return found


def _local_memory(machine: Machine, node: str) -> int | None:
    """Bytes of the node's own memory banks (heap types 1 and 2: frame buffer); None when none is listed."""
    total = 0
    for bank in machine.glob(f"{node}/mem_banks/*/properties"):
        properties = _properties(machine, bank.relative_to(machine.root).as_posix())
        if properties.get("heap_type") in (1, 2):
            total += properties.get("size_in_bytes", 0)
    return total or None


_DRIVERS = {"nvml": _nvml_devices, "kfd": _kfd_devices}
