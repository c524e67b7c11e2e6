"""docs/sdk.md says what the code says: ops and their signatures, manifest keys, members of the session, rules."""

from __future__ import annotations

import re
from pathlib import Path

from m31 import graph, ops, sdk
from m31.conformance import RULES
from m31.ops.fused import FUSED
from m31.sdk.manifest import DeclaredLimits, DeviceMatch, Formats, Manifest

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "sdk.md").read_text(encoding="utf-8")


def test_every_op_is_listed_with_its_signature() -> None:
    for spec in (*ops.ALL.values(), *FUSED.values()):
        inputs, outputs = (
            ", ".join(f"{arg.name}: {arg.layout or arg.kind}" for arg in args) for args in (spec.inputs, spec.outputs)
        )
        line = f"{spec.name}({inputs}) -> {outputs}" + (f"; {', '.join(spec.attrs)}" if spec.attrs else "")
        assert f"\n{line}\n" in TEXT, line
    listed = re.findall(r"^(\w+)\(.*\) -> ", TEXT, flags=re.M)
    assert listed == [*ops.ALL, *FUSED]


def test_every_key_of_the_manifest_is_explained() -> None:
    for model in (Manifest, DeviceMatch, Formats, DeclaredLimits):
        for key in model.model_fields:
            assert re.search(rf"[`\[]{key}\b", TEXT), f"{model.__name__}.{key}"


def test_every_member_of_the_session_is_explained() -> None:
    for cls in (sdk.Backend, sdk.Session, sdk.KVCache, sdk.KVLayout, graph.WeightHandle, graph.Kernel):
        members = {*vars(cls), *getattr(cls, "__annotations__", {})}
        for name in members:
            if not name.startswith("_") and name not in ("manifest", "layout", "pages"):
                assert re.search(rf"`[^`]*\b{name}\b", TEXT), f"{cls.__name__}.{name}"


def test_every_rule_is_listed() -> None:
    for name, rule in RULES.items():
        assert f"`{name}`: {rule}" in TEXT, name
