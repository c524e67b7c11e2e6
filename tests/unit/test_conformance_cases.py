"""Cases of the suite: what they say of themselves is so, they are listed quickly, and nothing claimed is left out."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from tests.support.numpy_example import MANIFEST

from m31.conformance import cases, intervals
from m31.conformance.levels import coverage
from m31.conformance.levels import ops as level
from m31.formats import mxfp8, nvfp4
from m31.ops.cases import salted
from m31.sdk.manifest import Manifest, read_manifest
from m31_reference import __file__ as reference

ALL = read_manifest(Path(reference).parent / "backend.toml")
PLANS = [(spec, plan) for spec in cases.specs().values() for plan in cases.planned(spec) if not plan.own]


def test_every_op_has_cases_beyond_its_own() -> None:
    without = {name for name in cases.specs() if not any(spec.name == name for spec, _ in PLANS)}
    assert without == {"concat", "markov_bias", "confidence"}


@pytest.mark.parametrize("name", cases.specs())
def test_a_case_is_what_its_plan_says(name: str) -> None:
    for spec, plan in PLANS:
        if spec.name != name:
            continue
        case = plan.build()
        assert case.id == plan.id
        made = cases.attributes_of(spec, case)
        declared = {k: v for k, v in plan.attributes.items() if k in made}
        assert declared == {k: made[k] for k in declared}, plan.id
        assert set(plan.attributes) - set(made) <= {"values", "hit", "rotary_dim"}, plan.id
        matrices, vector = cases.last_axes(case, spec)
        assert (set(matrices or ()), matrices is None) == (set(plan.matrices or ()), plan.matrices is None), plan.id
        assert vector == plan.vector, plan.id


def test_sizes_of_a_real_kernel_exist_for_every_op() -> None:
    """Else a backend could refuse every case of an op, and claim it."""
    products = ("linear", "experts", "router", "lora_experts", "lora_logits")
    for name in (*products, "sparse_attention", "dense_attention", "block_scores", "kv_write"):
        real = [plan for spec, plan in PLANS if spec.name == name and plan.real]
        assert real, name
        widths = {plan.vector or plan.attributes["width"] for plan in real}
        assert any(width % 128 == 0 for width in widths), name


def test_values_follow_the_salt_and_nothing_else() -> None:
    plan = next(plan for _, plan in PLANS if plan.id == "linear/hidden-128")
    with salted("other"):
        other = plan.build()
    assert np.array_equal(plan.build().inputs["x"], plan.build().inputs["x"])
    assert not np.array_equal(plan.build().inputs["x"], other.inputs["x"])


@pytest.mark.parametrize("manifest", [ALL, MANIFEST])
def test_items_are_listed_quickly_and_once(manifest: Manifest) -> None:
    start = time.process_time()
    found = list(level.items(manifest))
    assert time.process_time() - start < 5  # about half a second where nothing else runs
    ids = [item.id for item in found]
    assert len(set(ids)) == len(ids) > 500
    assert all(item.id.startswith(f"L1/{item.subject}/") for item in found)


def test_every_claim_of_formats_has_items() -> None:
    claims = {claim for item in level.items(ALL) for claim in item.claims}
    formats = ALL.formats
    wanted = {f"{kind}:{form}" for kind in ("weights", "kv", "index", "compute") for form in getattr(formats, kind)}
    assert wanted <= claims
    assert {f"arithmetic:{name}" for name in level.NAMED} <= claims
    assert {f"op:{name}" for name in cases.specs()} <= claims


def test_nothing_that_is_not_claimed_is_asked_for() -> None:
    found = list(level.items(MANIFEST))
    assert {c.partition(":")[2] for item in found for c in item.claims if c.startswith("kv:")} == {
        "float32",
        "bfloat16",
    }
    assert {c for item in found for c in item.claims if c.startswith("arithmetic:")} == {"arithmetic:exact"}
    assert not any(item.subject == "draft_attention" for item in found)


# --- coverage ---------------------------------------------------------------------------------------------------------


def _result(item: object, outcome: str = "passed") -> object:
    class Line:
        level, subject, attributes = item.level, item.subject, item.attributes  # type: ignore[attr-defined]

    Line.outcome = outcome  # type: ignore[attr-defined]
    return Line


def test_the_whole_of_level_one_leaves_nothing_out() -> None:
    covered = coverage.coverage([_result(item) for item in level.items(ALL)], ALL)  # type: ignore[misc]
    never = {(op, name): c.never for op, found in covered.items() for name, c in found.items() if c.never}
    assert never == {}
    assert set(covered) == set(coverage.SPACE) == set(cases.specs())


def test_what_was_left_out_is_named() -> None:
    some = [item for item in level.items(ALL) if item.subject == "linear" and item.attributes.get("stored") != "mxfp8"]
    found = coverage.coverage([_result(item) for item in some if item.attributes["tokens"] != 2048], ALL)["linear"]  # type: ignore[misc]
    assert found["stored"].never == ("mxfp8",)
    assert found["tokens"].never == (2048,)
    assert found["stored"].exercised["float32"] > 10
    assert coverage.coverage([_result(item, "refused") for item in some], ALL) == {}  # type: ignore[misc]


# --- intervals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["float32", "bfloat16", "fp8", "nvfp4", "int8"])
def test_an_exact_value_goes_to_what_pages_hold(form: str) -> None:
    x = np.random.default_rng(1).standard_normal((7, 3, 32))
    x = x.astype(np.float32).astype(np.float64) if form == "float32" else intervals.bfloat16(x, 0 * x)[0]
    centre, width = intervals.through_pages(form, x, np.zeros_like(x))
    assert np.array_equal(centre, intervals.stored(form, x))
    assert not width.any()


@pytest.mark.parametrize("form", ["bfloat16", "fp8", "nvfp4", "int8"])
def test_whatever_lies_in_an_interval_is_stored_within_the_width(form: str) -> None:
    rng = np.random.default_rng(2)
    x = intervals.bfloat16(rng.standard_normal((40, 64)), np.zeros((40, 64)))[0]
    error = np.abs(x) * rng.choice([0, 2.0**-9, 2.0**-5], x.shape)
    centre, width = intervals.through_pages(form, x, error)
    for _ in range(20):
        other = intervals.bfloat16(x + error * rng.uniform(-1, 1, x.shape), 0 * x)[0]
        other = (
            np.clip(other, x - error, x + error) if form == "int8" else np.where(np.abs(other - x) <= error, other, x)
        )
        got = intervals.stored(form, other)
        assert (np.abs(got - centre) <= width * (1 + 1e-9) + 1e-12).all()
    assert (width[error == 0] == 0).mean() > 0.3 or form in ("nvfp4", "int8")


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4-static"])
def test_the_same_of_activations(kind: str) -> None:
    import torch

    rng = np.random.default_rng(3)
    x = rng.standard_normal((40, 64))
    error = np.abs(x) * rng.choice([0, 1e-3], x.shape)

    def quantised(v: np.ndarray) -> np.ndarray:
        t = torch.from_numpy(v).float()
        made = mxfp8.quantise(t) if kind == "mxfp8" else nvfp4.quantise_static(t, torch.tensor([48.0]))
        return np.asarray(made.double().numpy())

    through = intervals.through_mxfp8 if kind == "mxfp8" else lambda a, b: intervals.through_nvfp4_static(a, b, 48.0)
    exact, nothing = through(x, np.zeros_like(x))
    assert np.allclose(exact, quantised(x), rtol=1e-6, atol=0)
    assert not nothing.any()
    centre, width = through(x, error)
    assert 0.01 < (width > 1e-3 * np.abs(centre)).mean() < 0.9  # some may flip, most do not
    for _ in range(20):
        got = quantised(x + error * rng.uniform(-1, 1, x.shape))
        assert (np.abs(got - centre) <= width + 1e-6 * np.abs(centre)).all()
