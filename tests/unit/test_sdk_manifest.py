"""backend.toml: strict, complete, and every mistake named by file and key."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
from sdk_fakes import GPU_BACKENDS, ROOT, manifest, manifest_text, shipped_manifest

from m31.errors import ManifestError
from m31.sdk.manifest import normalise, parse_manifest, read_manifest
from m31.sdk.version import API_VERSION


def refuse(text: str) -> str:
    with pytest.raises(ManifestError) as caught:
        parse_manifest(text, "some/backend.toml")
    assert str(caught.value).startswith("some/backend.toml: ")
    assert caught.value.exit_code == 3
    return str(caught.value)


LIMITS: dict[str, Any] = tomllib.loads(manifest_text("x"))["limits"]
FORMATS: dict[str, Any] = tomllib.loads(manifest_text("x"))["formats"]
GPU = {"kind": "gpu", "vendor": "acme", "architectures": ["a1"], "min_count": 2}


def test_a_valid_manifest_keeps_every_value() -> None:
    m = manifest("x", device=GPU, score=7, ops=["linear.bf16", "rope"], fallback=["router"], packages={"torch": "2.11"})
    assert (m.name, m.score, m.ops, m.fallback) == ("x", 7, ("linear.bf16", "rope"), ("router",))
    assert (m.device.vendor, m.device.architectures, m.device.min_count) == ("acme", ("a1",), 2)
    assert m.packages == {"torch": "2.11"}
    assert m.limits.context_tokens == 4096


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"scor": 3}, "unknown key 'scor' (did you mean 'score'?)"),
        ({"zzz": 3}, "unknown key 'zzz'"),
        (
            {"limits": {**LIMITS, "context_token": 5}},
            "unknown key 'limits.context_token' (did you mean 'context_tokens'?)",
        ),
        ({"score": None}, "key 'score' is missing"),
        ({"limits": {k: v for k, v in LIMITS.items() if k != "draft_tokens"}}, "key 'limits.draft_tokens' is missing"),
        ({"score": "10"}, "key 'score': input should be a valid integer (got '10')"),
        ({"score": 10.0}, "key 'score': input should be a valid integer (got 10.0)"),
        ({"score": True}, "key 'score': input should be a valid integer (got True)"),
        ({"score": -1}, "key 'score': input should be greater than or equal to 0 (got -1)"),
        ({"limits": {**LIMITS, "context_tokens": 0}}, "key 'limits.context_tokens': input should be greater than"),
        ({"limits": {**LIMITS, "kv_page_tokens": 64}}, "key 'limits.kv_page_tokens': input should be 128 (got 64)"),
        ({"limits": {**LIMITS, "video": 1}}, "key 'limits.video': input should be a valid boolean (got 1)"),
        ({"formats": {**FORMATS, "kv": []}}, "key 'formats.kv'"),
        ({"formats": {**FORMATS, "kv": ["fp9"]}}, "key 'formats.kv.0': input should be"),
        ({"name": "Not A Name"}, "key 'name': string should match pattern"),
        ({"requires": "one"}, "key 'requires': 'one' is not a version range"),
        ({"requires": ""}, "key 'requires': an empty range accepts every future API"),
        ({"packages": {"torch": "new"}}, "key 'packages': torch: 'new' is not a version number"),
        ({"ops": "some"}, "key 'ops'"),
        ({"probe": "no target"}, "key 'probe': string should match pattern"),
        ({"device": {"kind": "gpu", "vendor": "acme"}}, "key 'device': kind = \"gpu\" needs architectures, min_count"),
        ({"device": {**GPU, "kind": "cpu"}}, 'kind = "cpu" does not take vendor, min_count, architectures'),
        (
            {"device": {**GPU, "min_driver": "x.y"}},
            "key 'device.min_driver': 'x.y' is not a version number (got 'x.y')",
        ),
        ({"device": {"kind": "probe"}}, 'device.kind = "probe" needs the key probe = "module:function"'),
        (
            {"device": GPU, "limits": {**LIMITS, "tensor_parallel": 4}},
            "limits.tensor_parallel = 4 needs more devices than device.min_count = 2",
        ),
        ({"ops": "all", "fallback": ["rope"]}, "fallback lists ops of a backend that claims to serve all: rope"),
    ],
)
def test_bug_87_every_mistake_is_refused_by_name(changes: dict[str, Any], expected: str) -> None:
    message = refuse(manifest_text("x", **changes))
    assert expected in message
    assert not re.search(r"%[sdr]|\{\w*\}|union|literal\[", message)  # no raw template, no parser's jargon


def test_all_mistakes_are_listed_at_once() -> None:
    message = refuse(manifest_text("x", scor=1, score=None, requires="?"))
    assert "unknown key 'scor'" in message
    assert "key 'score' is missing" in message
    assert "key 'requires'" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name = ", "not valid TOML"),
        ("", "key 'name' is missing"),
        (manifest_text("x") + "since = 2026-01-01\n", "a value is of a kind that no key takes"),
    ],
)
def test_what_is_not_a_manifest_is_refused(text: str, expected: str) -> None:
    assert expected in refuse(text)


def test_absent_and_unreadable_files(tmp_path: Any) -> None:
    with pytest.raises(ManifestError, match=r"the manifest is missing; expected a backend\.toml beside"):
        read_manifest(tmp_path / "backend.toml")
    (tmp_path / "backend.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ManifestError, match="cannot be read"):
        read_manifest(tmp_path / "backend.toml")


def test_names_are_normalised() -> None:
    assert normalise(" My_Back.End--x ") == "my-back-end-x"


# --- m31's own manifests: MODEL.md §8 ----------------------------------------------------------------------

TABLE = {
    # name: vendor, architectures, devices, arithmetic, preferred KV, context, draft, video, TP
    "hopper": ("nvidia", ("sm_90",), 8, "w4a16", "fp8", 262_144, 0, False, 8),
    "blackwell": ("nvidia", ("sm_100", "sm_103"), 4, "w4a4-q8kv4", "nvfp4", 1_048_576, 7, True, 4),
    "rubin": ("nvidia", ("sm_107",), 4, "w4a4-q8kv4", "nvfp4", 1_048_576, 7, True, 4),
    "mi355x": ("amd", ("gfx950",), 4, "w8a8-mxfp8", "nvfp4", 1_048_576, 3, True, 4),
}


@pytest.mark.parametrize("name", GPU_BACKENDS)
def test_gpu_manifests_state_the_limits_of_the_specification(name: str) -> None:
    m = shipped_manifest(name)
    d, f, n = m.device, m.formats, m.limits
    stated = (
        d.vendor,
        d.architectures,
        d.min_count,
        m.arithmetic[0],
        f.kv[0],
        n.context_tokens,
        n.draft_tokens,
        n.video,
    )
    assert (*stated, n.tensor_parallel) == TABLE[name]
    assert m.limits.kv_page_tokens == 128
    assert m.ops == ()  # no kernel in this release, and none claimed
    assert m.conformance == "none"


def test_reference_manifest() -> None:
    m = shipped_manifest("reference")
    assert (m.device.kind, m.score, m.ops) == ("cpu", 10, "all")
    assert {"bfloat16", "float32"} <= set(m.formats.weights)
    assert {"bfloat16", "float32"} <= set(m.formats.kv)


def test_the_table_of_entry_points_and_manifests_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name in project["entry-points"]["m31.backends"]:
        if name in (*GPU_BACKENDS, "reference"):
            assert shipped_manifest(name).name == name
            assert shipped_manifest(name).requires == ">=1.0,<2"
    assert API_VERSION == "1.1"
