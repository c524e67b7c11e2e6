"""Which items there are, how some of them are selected, and what a manifest claims."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.fake_suite import HERE, item
from tests.support.numpy_example import MANIFEST as NUMPY  # which puts the example where Python finds it

from m31.conformance import catalog, claims
from m31.conformance.expression import parse, select
from m31.conformance.running import runner
from m31.conformance.running.setup import Setup, backend_of, manifest_of
from m31.errors import BackendLoadFailed, NothingSelected, RequestError, SuiteError
from m31.sdk.manifest import Determinism, parse_manifest

MANIFEST = manifest_of("reference")
FAKE = f"{HERE}:healthy"

IDS = ["L1/linear/odd/mxfp8", "L1/linear/odd", "L1/rope/edge", "L2/Pages/resume"]


@pytest.mark.parametrize(
    ("text", "picked"),
    [
        ("linear", [0, 1]),
        ("linear and mxfp8", [0]),
        ("linear and not mxfp8", [1]),
        ("rope or pages", [2, 3]),
        ("not (rope or pages)", [0, 1]),
        ("rope or linear and mxfp8", [0, 2]),
        ("not not rope", [2]),
        ("L1/linear/odd", [1]),  # an id as it is selects that item only
        ("PAGES", [3]),
        ("(((rope)))", [2]),
    ],
)
def test_expressions(text: str, picked: list[int]) -> None:
    assert select(IDS, text) == [IDS[place] for place in picked]


@pytest.mark.parametrize("text", ["", "and", "a and", "a b", "not", "(a", "a)", "()", "or a", "a or or b"])
def test_malformed_expressions_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="-k"):
        parse(text)


WORDS = st.sampled_from(["a", "b", "ab", "c"])
TREES = st.recursive(
    WORDS, lambda inner: st.tuples(st.sampled_from(["and", "or"]), inner, inner) | st.tuples(st.just("not"), inner)
)


def written(tree: object) -> str:
    if isinstance(tree, str):
        return tree
    assert isinstance(tree, tuple)
    return f"not ({written(tree[1])})" if tree[0] == "not" else f"({written(tree[1])} {tree[0]} {written(tree[2])})"


def holds(tree: object, name: str) -> bool:
    if isinstance(tree, str):
        return tree in name
    assert isinstance(tree, tuple)
    inner = [holds(part, name) for part in tree[1:]]
    return {"and": all, "or": any, "not": lambda parts: not parts[0]}[tree[0]](inner)


@given(TREES)
def test_expressions_mean_what_their_tree_means(tree: object) -> None:
    said = parse(written(tree))
    for name in ("", "a", "b", "ab", "bc", "abc"):
        assert said(name) == holds(tree, name)


def test_items_come_in_the_order_of_levels_and_are_unique() -> None:
    items = catalog.collect(MANIFEST, source=FAKE)
    assert [i.level for i in items] == sorted(i.level for i in items)
    assert len({i.id for i in items}) == len(items)
    assert [i.id for i in catalog.collect(MANIFEST, expression="resume", source=FAKE)] == ["L2/pages/resume"]
    with pytest.raises(SuiteError, match="two items have the id 'L0/a/b'"):
        catalog.collect(MANIFEST, source=f"{HERE}:twice")


def test_the_smoke_selection_has_every_subject_and_format_and_takes_minutes() -> None:
    items = catalog.collect(MANIFEST)
    few = catalog.chosen(items, "smoke")
    assert {(i.level, i.subject, i.format, i.criterion) for i in few} == {
        (i.level, i.subject, i.format, i.criterion) for i in items
    }
    assert len(few) < 200
    assert sum(i.seconds for i in few) < 45  # of one core that is not busy; the goal is three minutes of two
    assert not any(catalog.SMOKE in i.id for i in items)
    assert [i.id for i in few if i.attributes.get("tokens", 1) == 0] == []
    linear = catalog.chosen(items, "smoke and L1/linear")
    assert {i.format for i in linear} == {"float32", "bfloat16", "mxfp8"}
    assert [i.id for i in catalog.chosen(items, "L1/add/one")] == ["L1/add/one"]
    planned = runner.plan(Setup(backend="reference", level="L1", expression="smoke"))
    assert {i.level for i in planned.chosen} == {"L0", "L1"}
    assert planned.setup.expression == "smoke"  # a selection like any other: it reaches no level


def test_an_item_is_of_the_level_that_its_id_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "function_of", lambda source: lambda *asked: iter([item("L1/a/b")]))
    with pytest.raises(SuiteError, match="is listed under L0"):
        catalog.collect(MANIFEST, ("L0",))


@pytest.mark.parametrize("source", ["no.such.module:f", f"{HERE}:nothing", "nothing"])
def test_a_catalog_that_does_not_exist_is_refused(source: str) -> None:
    with pytest.raises((SuiteError, ValueError)):
        catalog.collect(MANIFEST, source=source)


def test_a_level_includes_those_below_it() -> None:
    assert catalog.upto("L2") == ("L0", "L1", "L2")
    planned = runner.plan(Setup(backend="reference", level="L1", source=FAKE))
    assert {i.level for i in planned.chosen} == {"L0", "L1"}
    with pytest.raises(RequestError, match="no level 'L7'"):
        catalog.upto("L7")


def test_a_selection_of_nothing_is_no_success() -> None:
    with pytest.raises(NothingSelected) as caught:
        runner.plan(Setup(backend="reference", expression="no-such-thing", source=FAKE))
    assert caught.value.exit_code == 2


def test_a_real_checkpoint_is_needed_for_the_level_of_real_checkpoints() -> None:
    with pytest.raises(NothingSelected, match="--checkpoint"):
        runner.plan(Setup(backend="reference", level="L4", source=FAKE))
    assert list(catalog.built_in(MANIFEST, "L4", None)) == []


def test_claims_of_a_manifest() -> None:
    found = claims.of_manifest(MANIFEST)
    assert len(set(found)) == len(found)
    assert {"op:linear", "op:linear/mxfp8", "op:experts/nvfp4", "kv:fp8", "index:int8", "compute:float64"} <= set(found)
    assert {"weights:nvfp4", "arithmetic:w4a16", "limit:context_tokens", "limit:draft_tokens", "op:markov_bias"} <= set(
        found
    )
    assert not {"op:linear/nvfp4", "limit:image", "limit:tensor_parallel", "op:all_reduce"} & set(found)


def test_an_op_that_may_fall_back_is_claimed_without_its_formats() -> None:
    cpu = manifest_of("cpu")
    found = claims.of_manifest(cpu)
    assert {"experts", "linear"} <= set(cpu.ops) & set(cpu.fallback)
    assert sorted(claim for claim in found if claim.startswith("op:")) == sorted(f"op:{op}" for op in cpu.ops)
    assert "limit:draft_tokens" not in found


def test_float32_weights_of_a_backend_that_computes_in_bfloat16_are_the_router_s() -> None:
    formats = MANIFEST.formats.model_copy(update={"compute": ("bfloat16",)})
    narrow = MANIFEST.model_copy(update={"formats": formats})
    gone = set(claims.of_manifest(MANIFEST)) - set(claims.of_manifest(narrow))
    assert {claim for claim in gone if claim.startswith("op:")} == {"op:linear/float32", "op:experts/float32"}
    first = claims.first_levels(narrow, catalog.collect(narrow, ("L1",)))
    assert first["weights:float32"] == "L1"
    asked = [i.id for i in catalog.collect(narrow, ("L1",)) if i.subject == "router"]
    assert [name for name in asked if name.endswith("/float32")]


def test_an_op_and_the_format_of_its_weights_are_a_claim_together() -> None:
    assert claims.exercised_by(["op:linear", "weights:mxfp8"]) == {"op:linear", "weights:mxfp8", "op:linear/mxfp8"}
    items = catalog.collect(MANIFEST, source=FAKE)
    first = claims.first_levels(MANIFEST, items)
    assert first["op:linear/mxfp8"] == "L1"
    assert first["compute:float32"] == "L0"
    assert claims.first_levels(MANIFEST, [])["op:linear"] is None


def test_every_storage_that_the_suite_has_items_for_is_a_claim() -> None:
    items = catalog.collect(MANIFEST, ("L1",))
    for name, forms in claims.STORED_BY.items():
        own = [i for i in items if i.subject == name]
        found = {c.removeprefix("weights:") for i in own for c in i.claims if c.startswith("weights:")}
        assert found == set(forms), name


@pytest.mark.parametrize("name", ["reference", "cpu", "triton", "m31_numpy:NumpyBackend"])
def test_every_claim_of_the_backends_that_come_with_m31_has_an_item(name: str) -> None:
    manifest = manifest_of(name)
    first = claims.first_levels(manifest, catalog.collect(manifest))
    assert [claim for claim, level in first.items() if level is None] == []


def test_every_promise_of_equal_bits_is_a_claim_with_items() -> None:
    for promise in Determinism.model_fields:
        promises = dict.fromkeys(Determinism.model_fields, False) | {promise: True}
        manifest = MANIFEST.model_copy(update={"determinism": Determinism(**promises)})
        items = catalog.collect(manifest, ("L2",))
        mine = [i for i in items if f"determinism:{promise}" in i.claims]
        assert mine, promise
        assert {i.criterion for i in mine} == {"exact"}
        assert not [i for i in items if any(c.startswith("determinism:") for c in i.claims) and i not in mine]


def test_a_backend_that_is_not_installed_is_named_by_its_class(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert manifest_of("m31_numpy:NumpyBackend") == NUMPY
    made = backend_of("m31_numpy:NumpyBackend")
    assert not isinstance(made, str)
    assert made.manifest == NUMPY
    assert backend_of("reference") == "reference"
    with pytest.raises(BackendLoadFailed, match="has no 'Nothing'"):
        backend_of("m31_numpy:Nothing")
    with pytest.raises(BackendLoadFailed, match="no module 'no_such_package'"):
        manifest_of("no_such_package:Backend")


def test_the_example_of_a_manifest_without_ops_claims_formats_only() -> None:
    text = (Path(__file__).parents[2] / "examples/numpy_backend/m31_numpy/backend.toml").read_text()
    empty = parse_manifest(text.replace('ops = "all"', "ops = []"), "empty")
    assert [claim for claim in claims.of_manifest(empty) if claim.startswith("op:")] == []
    assert "weights:nvfp4" in claims.of_manifest(empty)
