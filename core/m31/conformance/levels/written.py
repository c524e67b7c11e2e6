"""L2: what a step writes into pages does not depend on the kind of step, nor on how the tokens were split.

Logits do not show it at once: a key that a decode step leaves out is read when its block is no longer the query's own,
an index key when there are more blocks than are selected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from m31.conformance.bounds import CONSTANT, roundoff
from m31.conformance.item import Evidence, Item, Verdict
from m31.conformance.levels.forms import checkpoints, prompt
from m31.conformance.rig import Forms, Part, Rig
from m31.conformance.synthetic import VOCAB_SIZE
from m31.errors import ContractViolation

if TYPE_CHECKING:
    from m31.conformance.bench import Bench
    from m31.sdk.manifest import Manifest

_COUNT = 133
_WAYS: Mapping[str, tuple[tuple[int, ...], bool]] = {
    "decode": ((130, 1, 1, 1), False),
    "verify": ((130, 3), True),
    "split": ((60, 73), False),
}
"""Name -> tokens of each step, and whether the last is one that verifies."""
_ELEMENTS = {"nvfp4": "e2m1", "fp8": "e4m3", "int8": "bfloat16"}


def items(manifest: Manifest) -> Iterator[Item]:
    """One for each way, on the first checkpoint."""
    for name in checkpoints(manifest)[:1]:
        for way in _WAYS:
            yield Item(
                id=f"L2/written/{way}",
                level="L2",
                subject="written",
                format="",
                criterion="bound",
                claims=("op:kv_write", "op:index_write"),
                attributes={"checkpoint": name, "way": way},
                execute=partial(_execute, name, way),
                judge=partial(_judge, f"L2/written/{way}"),
                seconds=0.5,
            )


def _execute(name: str, way: str, bench: Bench) -> Evidence:
    counts, verifies = _WAYS[way]
    made = Rig(bench, bench.checkpoint(name), Forms(), pages=4)
    ids = prompt("L2/written", _COUNT, VOCAB_SIZE)
    whole, parts = made.run(ids), made.run(ids)
    made.step(Part(whole, _COUNT))
    for count in counts:
        made.step(Part(parts, count), verify=verifies and count == counts[-1])
    arrays = {}
    for what, run in (("want", whole), ("got", parts)):
        for layer in range(len(made.opened.spec.indexed)):
            for at, page in enumerate(run.pages):
                for kind, values in made.cache.read(layer, page).items():
                    arrays[f"{what}/layer {layer}, page {at}, {kind}"] = values.float().cpu().numpy()
    return Evidence(arrays=arrays, facts=made.facts())


def _judge(where: str, evidence: Evidence) -> Verdict:
    """Raises: ContractViolation, naming layer, page and kind."""
    facts, worst = evidence.facts, Verdict(margin=0.0)
    for name, want in evidence.arrays.items():
        what, _, place = name.partition("/")
        if what == "want":
            found = _compared(evidence.arrays[f"got/{place}"], want, _allowed(facts, place, want), f"{where}, {place}")
            worst = max(worst, found, key=lambda verdict: verdict.margin or 0.0)
    return worst


def _allowed(facts: Mapping[str, Any], place: str, want: Any) -> float:
    """What order may change, and one step of the stored format where that turns a rounding."""
    form = facts["index" if place.endswith("index") else "kv"]
    largest = float(np.nanmax(np.abs(want), initial=0.0))
    return float((facts["slack"] + CONSTANT * roundoff(_ELEMENTS.get(form, form))) * largest)


def _compared(got: Any, want: Any, allowed: float, where: str) -> Verdict:
    lost = int((np.isnan(got) & ~np.isnan(want)).sum())
    off = float(np.nanmax(np.abs(got - want), initial=0.0))
    if lost or (~np.isnan(got) & np.isnan(want)).any() or not off <= allowed:
        raise ContractViolation(
            "order",
            f"leaves {lost} numbers unwritten, and is off by {off:.3g}",
            where=where,
            expected=f"what one step writes, within {allowed:.3g}, and nothing else",
        )
    return Verdict(margin=off / allowed if allowed else 0.0, max_error=off, allowed=allowed, where=where)
