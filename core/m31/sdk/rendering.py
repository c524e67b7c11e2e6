"""What `m31 backends` prints: every installed backend with its one-line verdict, then the machine."""

from __future__ import annotations

from typing import Any

from m31.sdk.inventory import Inventory
from m31.sdk.selection import Decision
from m31.sdk.version import API_VERSION


def render_backends(decision: Decision, machine: Inventory) -> str:
    """A table for people, without a final newline."""
    rows = [("backend", "distribution", "score", "verdict")]
    for v in decision.verdicts:
        rows.append((v.name, v.origin, "-" if v.score is None else str(v.score), _one_line(str(v))))
    widths = [max(len(row[k]) for row in rows) for k in range(3)]
    lines = [
        f"{name:<{widths[0]}}  {origin:<{widths[1]}}  {score:>{widths[2]}}  {verdict}"
        for name, origin, score, verdict in rows
    ]
    if decision.refusal is not None:
        # The verdicts stand in the table already; the error's own list of them would repeat it.
        lines += ["", f"no backend is chosen: {decision.reason.splitlines()[0]}"]
    else:
        lines += ["", f"chosen: {decision}"]
    return "\n".join([*lines, "", *_machine_lines(machine)])


def backends_dict(decision: Decision, machine: Inventory) -> dict[str, Any]:
    """The same for programs: JSON values only."""
    return {"api": API_VERSION, **decision.to_dict(), "machine": machine.to_dict()}


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _machine_lines(machine: Inventory) -> list[str]:
    cpu = machine.cpu
    quota = "" if cpu.quota is None else f", quota {cpu.quota:g}"
    lines = [
        f"processor: {cpu.model or cpu.vendor or 'unknown'} ({cpu.arch}), {cpu.cores} usable cores{quota}",
        f"           {' '.join(cpu.flags) or 'no vector extension is known'}",
    ]
    lines += [f"device {n}: {_one_line(str(device))}" for n, device in enumerate(machine.devices)]
    if not machine.devices:
        lines.append("devices: none")
    return lines + [f"note: {_one_line(str(note))}" for note in machine.notes]
