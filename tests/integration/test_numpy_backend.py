"""The example backend, which is written against the public SDK alone and knows no torch, op by op: kernels, weights,
and what it refuses."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import tiny
from tests.support.numpy_example import EXAMPLE, MANIFEST, STEP, kernel, open_numpy, pages
from tests.unit.import_rules import backend_faults, files

from m31 import config, ops
from m31 import graph as graph_room
from m31.errors import BackendRefused, NonFiniteWeight
from m31.graph import OpInstance, Refusal, trace
from m31.ops import Case, OpSpec
from m31.parallel import COLLECTIVES, WHOLE
from m31.sdk.backend import KVCache, Limits, Session

CASES = [(spec, case) for spec in ops.ALL.values() if spec.name not in COLLECTIVES for case in spec.cases()]


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    """numpy warns where torch is silent: an invalid or overflowing operation on values that count is a fault."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


@pytest.fixture(scope="module")
def session() -> Session:
    return open_numpy()


# --- ops -------------------------------------------------------------------------------------


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values in a view with gaps that hold NaN, or a wild index."""
    fill = torch.nan if x.is_floating_point() else -(2**40)
    wide = torch.full((*[n + 1 for n in x.shape[:-1]], 2 * x.shape[-1] + 1), fill, dtype=x.dtype)
    view = wide[(*tuple(slice(1, None) for _ in x.shape[:-1]), slice(1, None, 2))]
    view.copy_(x)
    return view


@pytest.mark.parametrize("gaps", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize(("spec", "case"), CASES, ids=[case.id for _, case in CASES])
def test_every_op_equals_its_naive_definition(session: Session, spec: OpSpec, case: Case, gaps: bool) -> None:
    ins: list[Any] = []
    naive: list[Any] = []
    handle = None
    cache = pages(session, case.state) if case.state else None
    for arg in spec.inputs:
        value = dict(case.state) if arg.kind == "state" else case.inputs[arg.name]
        naive.append(value)
        if arg.kind == "state":
            ins.append(cache)
        elif arg.kind == "weight":
            slots = value if isinstance(value, dict) else {"weight": value}
            held = {s: tiny.Held(s, torch.tensor(v, dtype=torch.float32)) for s, v in slots.items()}
            handle = session.prepare(OpInstance("op", spec, case.attrs, (), ()), held, WHOLE)
        else:
            tensor = torch.tensor(value, dtype=torch.int64 if arg.dtype == "int64" else torch.float32)
            ins.append(strided(tensor) if gaps else tensor)
    expected = spec.naive(case.attrs, *naive)
    outs: list[Any] = []
    for arg, want in zip(spec.outputs, expected, strict=True):
        if arg.kind == "state":
            outs.append(cache)
            continue
        fill, dtype = (-99, torch.int64) if arg.dtype == "int64" else (torch.nan, torch.float32)
        outs.append(torch.full(want.shape, fill, dtype=dtype))
        if gaps:
            outs[-1] = strided(outs[-1])
    kernel(session, spec, case.attrs).run(outs, ins, handle, None)
    for got, want in zip(outs, expected, strict=True):
        if isinstance(got, KVCache):
            for (layer, part), array in want.items():
                read = torch.stack([got.read(layer, p)[part] for p in range(got.pages)])
                np.testing.assert_array_equal(read.numpy(), array.astype(np.float32))
        elif not got.is_floating_point():
            np.testing.assert_array_equal(got.numpy(), want)
        else:
            finite = np.isfinite(want)
            np.testing.assert_array_equal(np.isfinite(got.numpy()), finite)
            scale = np.abs(want[finite]).max(initial=0.0)
            np.testing.assert_allclose(got.double().numpy()[finite], want[finite], rtol=3e-6, atol=3e-6 * scale)


def test_the_cases_reach_every_op_and_an_unknown_one_is_refused(session: Session) -> None:
    assert {spec.name for spec, _ in CASES} == set(ops.ALL) - set(COLLECTIVES)  # those are a group's
    unknown = dataclasses.replace(ops.add, name="divide")
    found = session.kernel(OpInstance("op", unknown, {}, (), ()), STEP)
    assert isinstance(found, Refusal)
    assert "does not implement" in found.reason


@pytest.mark.parametrize("name", ["block_scores", "sparse_attention", "dense_attention"])
def test_tiles_change_nothing(session: Session, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One query per tile, and all queries in one tile, give the same result."""
    from m31_numpy import attention

    spec = ops.ALL[name]
    for case in spec.cases():
        cache = pages(session, case.state)
        ins = [cache if a.kind == "state" else np.asarray(case.inputs[a.name]) for a in spec.inputs]
        ins = [x.astype(np.float32) if isinstance(x, np.ndarray) and x.dtype == np.float64 else x for x in ins]
        results = []
        for limit in (1, 1 << 40):
            monkeypatch.setattr(attention, "_TILE", limit)
            out = np.full(spec.naive(case.attrs, *[dict(case.state) if x is cache else x for x in ins])[0].shape, 7.0)
            kernel(session, spec, case.attrs).run([out], ins, None, None)
            results.append(out)
        np.testing.assert_allclose(results[0], results[1], rtol=1e-5, atol=1e-6)


# --- weights ---------------------------------------------------------------------------------


def test_weights_are_decoded_as_the_formats_say(session: Session) -> None:
    """Own decoding of the stored parts against `m31.formats`, bit for bit; float32 stays where it is."""
    graph = trace(tiny.quantisable())
    values = tiny.quantised(graph, tiny.weights(graph, seed=3))
    seen = set()
    for call in graph.calls:
        if call.op.weights is None:
            continue
        slots = {s: tiny.held(t.name, values[t.name]) for s, t in call.op.weights.slots.items()}
        handle = session.prepare(call.op, slots, WHOLE)
        for slot, tensor in slots.items():
            seen.add(tensor.format)
            want = tensor.load()
            got = handle.dequantise()[slot]
            assert torch.equal(got, want)
            assert (slot in handle.in_place) == (tensor.format == "plain") == (got.data_ptr() == want.data_ptr())
        need = sum(4 * t.value.numel() for t in (values[s.name] for s in slots.values()) if not torch.is_tensor(t))
        assert session.weight_bytes(call.op, slots) == need
        assert not handle.losses
    assert seen == {"plain", "mxfp8", "nvfp4"}
    op = OpInstance("op", ops.linear, {}, (), ())
    bf16 = torch.tensor([[1.5, -0.0, 3e38, 1e-40]], dtype=torch.bfloat16)
    handle = session.prepare(op, {"weight": tiny.Held("w", bf16)}, WHOLE)
    assert torch.equal(handle.dequantise()["weight"], bf16.float())
    assert handle.in_place == frozenset()
    assert session.weight_bytes(op, {"weight": tiny.Held("w", bf16)}) == 16


def test_damaged_weights_are_refused_by_name(session: Session) -> None:
    graph = trace(tiny.quantisable())
    values = tiny.quantised(graph, tiny.weights(graph, seed=3))
    op = OpInstance("op", ops.linear, {}, (), ())
    nv = next(v for v in values.values() if getattr(v, "format", "") == "nvfp4")
    mx = next(v for v in values.values() if getattr(v, "format", "") == "mxfp8")
    for source, role, byte in ((nv, "scale", 0x7F), (nv, "scale", 0x81), (mx, "scale", 255), (mx, "codes", 0x7F)):
        stored = {name: t.clone() for name, t in source.stored.items()}  # type: ignore[union-attr]
        stored[role].view(torch.uint8)[1, 1] = byte
        damaged = tiny.Quantised(source.format, source.value, stored)  # type: ignore[union-attr]
        with pytest.raises(NonFiniteWeight, match=r"tensor 'bad\.weight'"):
            session.prepare(op, {"weight": tiny.held("bad.weight", damaged)}, WHOLE)
    with pytest.raises(NonFiniteWeight):
        session.prepare(op, {"weight": tiny.Held("bad.weight", torch.tensor([[torch.inf]]))}, WHOLE)


# --- what is refused, and what it may know ---------------------------------------------------


@pytest.mark.parametrize(
    "asked",
    [
        {"device": "meta"},
        {"dtype": "float64"},
        {"world": 2},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_is_not_served_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(BackendRefused, match=r"backend numpy: .* is not served; expected"):
        open_numpy(**asked)


def test_what_is_served_can_be_named() -> None:
    opened = open_numpy(device="cpu")
    declared = Limits.declared(MANIFEST, config.parse(config.published("m3.1-flash"), where="published"))
    assert opened.limits(None, declared) == declared  # type: ignore[arg-type]
    assert MANIFEST.arithmetic == (opened.numerics.name,)
    assert 0 < opened.memory_free() < 1 << 50


def test_it_knows_only_the_sdk_and_keeps_torch_at_the_door() -> None:
    public = frozenset(graph_room.__all__)
    sources = list(files(EXAMPLE))
    assert len(sources) > 5
    faults = []
    with_torch = set()
    for path, module, is_package in sources:
        text = path.read_text()
        faults += backend_faults(text, module, is_package=is_package, graph_public=public)
        if "import torch" in text:
            with_torch.add(path.name)
    assert faults == []
    assert with_torch <= {"session.py", "pages.py", "plan.py", "weights.py"}
    assert not any("naive" in path.read_text() for path, _, _ in sources)
