"""Runs and results that nobody ran."""

from __future__ import annotations

from typing import Any

from m31.conformance import claims, provenance
from m31.conformance.item import Result, Verdict
from m31.conformance.running.journal import Run
from m31.conformance.running.setup import Setup, manifest_of


def result(item_id: str, **changes: Any) -> Result:
    """A passed result with a margin of a half."""
    level, subject, *_ = item_id.split("/")
    values: dict[str, Any] = {
        "level": level,
        "subject": subject,
        "format": "",
        "criterion": "bound",
        "outcome": "passed",
        "claims": (),
        "attributes": {},
        "seed": 7,
        "seconds": 0.25,
        "verdict": Verdict(margin=0.5, max_error=1e-3, allowed=2e-3, where="y[0, 1]"),
    }
    if changes.get("outcome", "passed") != "passed":
        values["verdict"] = Verdict()
    return Result(id=item_id, **{**values, **changes})


def run(results: list[Result], **changes: Any) -> Run:
    """A complete run of levels L0 and L1 whose claims are those of its results."""
    manifest = manifest_of("reference")
    setup = Setup(backend="reference", level="L1")
    header: dict[str, Any] = {
        "setup": setup.to_dict(),
        "manifest": manifest.model_dump(mode="json"),
        "ids": [entry.id for entry in results],
        "catalog": "0" * 64,
        "claims": {claim: r.level for r in results for claim in sorted(claims.exercised_by(r.claims))},
        "expect": "",
        "provenance": provenance.gather("reference", manifest, command=["m31", "conform"], device=None, salt=""),
        "recorded": False,
    }
    asked = changes.pop("header", {})
    values: dict[str, Any] = {"results": tuple(results), "complete": True, "seconds": 1.5, "evidence": {}}
    return Run(header={**header, **asked}, **{**values, **changes})
