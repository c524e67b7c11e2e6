"""What the suite calls the same, near, or apart; and how it says where two backends part."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import tiny

from m31.conformance import agreement
from m31.conformance.bisect import Bisection, Local, residuals
from m31.conformance.layers import layers_of
from m31.conformance.levels import forms
from m31.conformance.same import require_same
from m31.errors import ContractViolation, ManifestError
from m31.sdk.manifest import Manifest, parse_manifest

ROWS = np.random.default_rng(0).standard_normal((20, 50)).astype(np.float32)
LARGEST = float(np.abs(ROWS).max())


def same(got: Any, slack: float, *, bitwise: bool = False) -> Any:
    return require_same(got, ROWS, {"slack": slack}, bitwise=bitwise, where="here")


def off_by(part: float, *rows: int) -> Any:
    got = ROWS.copy()
    for row in rows:
        got[row, 3] += part * LARGEST
    return got


# --- the same -------------------------------------------------------------------------------------------------------


def test_what_is_within_the_slack_passes_with_its_margin() -> None:
    verdict = same(off_by(5e-6, 4), 1e-5)
    assert verdict.margin == pytest.approx(0.5, rel=0.05)
    assert verdict.where == "row 4 of 20"
    assert same(ROWS, 1e-5).margin == 0


def test_one_row_outside_is_one_too_many_where_nothing_can_flip() -> None:
    with pytest.raises(ContractViolation, match="in row 7 of 20") as found:
        same(off_by(2e-5, 7), 1e-5)
    assert found.value.rule == "order"


def test_a_tenth_of_the_rows_may_flip_where_things_are_quantised() -> None:
    assert "2 rows" in same(off_by(0.5, 1, 2), 0.01).note
    with pytest.raises(ContractViolation, match="in 3 rows"):
        same(off_by(0.5, 1, 2, 3), 0.01)


def test_equal_bits_are_equal_bits() -> None:
    assert same(ROWS.copy(), 1e-5, bitwise=True).margin == 0
    with pytest.raises(ContractViolation, match="declares equal bits, and 1 of 20") as found:
        same(np.nextafter(ROWS, off_by(1, 3)).astype(np.float32), 1e-5, bitwise=True)
    assert found.value.rule == "determinism"


@pytest.mark.parametrize("bitwise", [False, True])
def test_poison_that_was_read(bitwise: bool) -> None:
    got = ROWS.copy()
    got[2] = np.nan
    with pytest.raises(ContractViolation, match="poisoned memory reads as NaN"):
        same(got, 0.2, bitwise=bitwise)
    with pytest.raises(ContractViolation):
        same(ROWS[:-1], 0.2, bitwise=bitwise)


def test_a_slack_that_anything_would_pass() -> None:
    with pytest.raises(ContractViolation, match="different tokens"):
        same(ROWS, 3.0)


# --- agreement ------------------------------------------------------------------------------------------------------


def test_divergence_is_that_of_the_textbook() -> None:
    other = ROWS + np.random.default_rng(1).standard_normal(ROWS.shape) * 0.3
    p, q = (torch.log_softmax(torch.from_numpy(x.astype(float)), -1) for x in (ROWS, other))
    want = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1).numpy()
    np.testing.assert_allclose(agreement.kl(ROWS.astype(float), other), want, rtol=1e-9)
    assert float(agreement.kl(ROWS.astype(float), ROWS.astype(float) + 7.0).max()) < 1e-12  # a constant says nothing


def test_choices_that_differ_are_counted() -> None:
    got = ROWS.copy()
    got[3, (ROWS[3].argmax() + 1) % 50] = 99
    assert agreement.missing(ROWS, got) == pytest.approx(1 / 20)


# --- bisect ---------------------------------------------------------------------------------------------------------


def found(fault: str | None) -> Bisection:
    ops = (Local(0, "linear", "linear", 1e-7, None), Local(1, "experts", "experts", 0.3, fault))
    return Bisection(("a<b", "reference"), (*ops, Local(-1, "lm_head", "lm_head", 1e-6, None)), (1e-7, 0.2), 0.1)


def test_a_bisection_names_the_first_op_outside() -> None:
    text = found("too far").table()
    assert "first outside its bound: layer 1, experts (experts)\n  too far" in text
    assert "\n      1   2.00e-01   3.00e-01  experts\n" in text
    assert "no op is outside" in found(None).table()


def test_its_plot_is_well_formed() -> None:
    root = ElementTree.fromstring(found("too far").svg())
    circles = [node for node in root.iter() if node.tag.endswith("circle")]
    assert [node.get("fill") for node in circles] == ["#999", "#c00"]
    (line,) = (node for node in root.iter() if node.tag.endswith("polyline"))
    (x0, y0), (x1, y1) = (map(float, pair.split(",")) for pair in str(line.get("points")).split())
    assert x0 < x1
    assert y0 > y1  # larger errors are higher


def test_every_call_has_its_layer() -> None:
    graph = tiny.trace(tiny.text())
    place = layers_of(graph)
    assert sorted(place) == [-1, *range(tiny.text().num_layers)]
    assert sum(map(len, place.values())) == len(graph.calls)
    assert {call.op.spec.name for call in place[-1]} >= {"embedding", "gather_rows", "lm_head"}
    for layer in range(tiny.text().num_layers):
        names = [call.op.spec.name for call in place[layer]]
        assert names.count("kv_write") == 1
        assert names[-1] == "add"
        assert {call.op.attrs["layer"] for call in place[layer] if "layer" in call.op.attrs} == {layer}
    assert len(residuals(graph)) == tiny.text().num_layers


# --- manifests ------------------------------------------------------------------------------------------------------


def manifest(**changes: Any) -> Manifest:
    from m31.conformance import oracle

    plain = oracle.bench().manifest
    return plain.model_copy(update={"formats": plain.formats.model_copy(update=changes.pop("formats", {})), **changes})


def test_pages_that_the_first_arithmetic_cannot_read_get_another() -> None:
    two = manifest(arithmetic=("w4a4-q8kv4", "w16a16"), formats={"kv": ("nvfp4", "bfloat16"), "index": ("nvfp4",)})
    assert {claim: asked.arithmetic for claim, asked in forms.pages(two)} == {
        "kv:nvfp4": None,
        "kv:bfloat16": "w16a16",
        "index:nvfp4": None,
    }


def test_checkpoints_are_those_whose_weights_are_taken() -> None:
    assert forms.checkpoints(manifest(formats={"weights": ("mxfp8",)})) == ["random-m3-mxfp8"]
    assert forms.checkpoints(manifest(formats={"weights": ("float32",)})) == []
    assert forms.checkpoints(manifest())[0] == "random-m31"


def test_determinism_is_declared_whole_or_not_at_all() -> None:
    from tests.support.numpy_example import EXAMPLE

    text = (EXAMPLE / "m31_numpy" / "backend.toml").read_text()
    declared = parse_manifest(text, "here").determinism
    assert declared is not None
    assert declared.run_to_run
    without = text[: text.index("[determinism]")]
    assert parse_manifest(without, "here").determinism is None
    with pytest.raises(ManifestError, match=r"'determinism.batch_invariant' is missing"):
        parse_manifest(f"{without}[determinism]\nrun_to_run = true\nchunk_invariant = false\n", "here")
