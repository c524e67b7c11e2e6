"""Every kernel of the reference against the naive definition of its op, on every case of the op.

Bound: elementwise error of a float64 kernel at most 1e-12 of the output's scale, of a float32 kernel at most
4 sqrt(K) 2^-24 of the accumulated magnitude; here a simple proportional bound is enough, because both sides see the
same float64 operands (the derived criterion of DESIGN.md §7 belongs to the conformance suite).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from m31 import ops
from m31.errors import OpRefused
from m31.ops import Attrs, Case, OpSpec
from m31.parallel import COLLECTIVES, LocalGroup, collective_kernel
from m31_reference.attention import ATTENTION
from m31_reference.cache import Store
from m31_reference.codecs import Plain
from m31_reference.draft import DRAFT
from m31_reference.kernels import ADAPTER, KERNELS
from m31_reference.weights import Weights


@dataclass
class Collective:
    """As much of an op instance as a collective kernel looks at."""

    spec: OpSpec
    attrs: Attrs


def kernel(spec: OpSpec, attrs: Attrs) -> Any:
    """The reference's kernel; collectives are the group's, which is the identity for a world of one."""
    if spec.name in COLLECTIVES:
        return collective_kernel(Collective(spec, attrs), LocalGroup())
    return (KERNELS | ATTENTION | DRAFT | ADAPTER)[spec.name](attrs)


SPECS = ops.ALL | ops.DRAFT | ops.ADAPTER
CASES = [(spec, case) for spec in SPECS.values() for case in spec.cases()]


class Pages:
    """The cache interface that the kernels use, over the arrays of a case."""

    def __init__(self, state: dict[tuple[int, str], Any], dtype: torch.dtype) -> None:
        self.kinds = [kind for _, kind in state]
        for kind in self.kinds:
            values = torch.tensor(state[0, kind], dtype=dtype)
            values = values[:, None] if kind == "index" else values  # an index key is one head
            pages, heads, self.page_tokens, dim = values.shape
            store = Store(Plain(dtype), pages, heads, self.page_tokens, dim, values.device)
            store.parts["values"].copy_(values)
            setattr(self, kind, [store])

    def arrays(self) -> dict[tuple[int, str], np.ndarray]:
        parts = {kind: getattr(self, kind)[0].parts["values"].double() for kind in self.kinds}
        return {(0, kind): (t[:, 0] if kind == "index" else t).numpy() for kind, t in parts.items()}


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values in a view with gaps and an offset, the gaps filled with NaN (or a wild index)."""
    fill = torch.nan if x.is_floating_point() else -(2**40)
    wide = torch.full((*[n + 1 for n in x.shape[:-1]], 2 * x.shape[-1] + 1), fill, dtype=x.dtype)
    view = wide[(*tuple(slice(1, None) for _ in x.shape[:-1]), slice(1, None, 2))]
    view.copy_(x)
    return view


def run(spec: OpSpec, case: Case, dtype: torch.dtype, *, gaps: bool) -> tuple[list[Any], list[Any]]:
    """(what the kernel wrote, what naive says)."""
    pages, ins, weights, naive_in = None, [], None, []
    for arg in spec.inputs:
        if arg.kind == "state":
            pages = Pages(dict(case.state), dtype)
            ins.append(pages)
            naive_in.append(dict(case.state))
        elif arg.kind == "weight":
            value = case.inputs[arg.name]
            naive_in.append(value)
            slots = value if isinstance(value, dict) else {"weight": value}
            weights = Weights({k: torch.tensor(v, dtype=dtype) for k, v in slots.items()})
        else:
            value = case.inputs[arg.name]
            naive_in.append(value)
            tensor = torch.tensor(value, dtype=torch.int64 if arg.dtype == "int64" else dtype)
            ins.append(strided(tensor) if gaps else tensor)
    expected = list(spec.naive(case.attrs, *naive_in))
    outs: list[Any] = []
    for arg, want in zip(spec.outputs, expected, strict=True):
        if arg.kind == "state":
            outs.append(pages)
        elif arg.dtype == "int64":
            outs.append(torch.full(want.shape, -99, dtype=torch.int64))
        else:
            outs.append(torch.full(want.shape, torch.nan, dtype=dtype))
        if gaps and arg.kind != "state":
            outs[-1] = strided(outs[-1])
    kernel(spec, case.attrs)(outs, ins, weights, None)
    return outs, expected


@pytest.mark.parametrize("gaps", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize(("spec", "case"), CASES, ids=[case.id for _, case in CASES])
def test_reference_equals_naive(spec: OpSpec, case: Case, dtype: torch.dtype, gaps: bool) -> None:
    # rope_table is float32 by definition, so float64 buffers hold float32 values
    rel = 1e-12 if dtype == torch.float64 and spec.name != "rope_table" else 3e-6
    outs, expected = run(spec, case, dtype, gaps=gaps)
    for got, want in zip(outs, expected, strict=True):
        if isinstance(got, Pages):
            for key, array in got.arrays().items():
                np.testing.assert_array_equal(array, torch.tensor(want[key], dtype=dtype).double().numpy())
        elif not got.is_floating_point():
            np.testing.assert_array_equal(got.numpy(), want)
        else:
            finite = np.isfinite(want)
            np.testing.assert_array_equal(np.isfinite(got.numpy()), finite)
            scale = np.abs(want[finite]).max(initial=0.0)
            np.testing.assert_allclose(got.double().numpy()[finite], want[finite], rtol=rel, atol=rel * scale)


def test_the_case_list_reaches_every_op() -> None:
    assert {spec.name for spec, _ in CASES} == set(ops.ALL) | set(ops.DRAFT) | set(ops.ADAPTER)
    assert set(ops.ALL) == set(KERNELS) | set(ATTENTION) | set(COLLECTIVES)
    assert set(ops.DRAFT) == set(DRAFT)
    assert set(ops.ADAPTER) == set(ADAPTER)


@pytest.mark.parametrize("name", ["choice", "choice-before-unwritten", "choice-in-company", "choice-at-128"])
def test_sparse_cases_leave_blocks_out(name: str) -> None:
    """Many queries at once, none of which selects all that it could see, nor what its neighbour or other head does."""
    case = next(c for c in ops.sparse_attention.cases() if c.id == f"sparse_attention/{name}")
    blocks_ThK = np.asarray(case.inputs["blocks"])
    assert int(np.diff(case.inputs["cu_q"]).max()) >= 20
    assert blocks_ThK.shape[2] == 4
    assert (np.asarray(case.inputs["positions"]) // 4 + 1 > 4).all()
    assert (blocks_ThK[:, 0] != blocks_ThK[:, 1]).any()
    assert len(np.unique(blocks_ThK[-20:, 0], axis=0)) > 10
    k = case.state[0, "k"]
    last = case.inputs["page_table"][0, -1] if len(case.inputs["cu_q"]) == 2 else None
    if name == "choice-before-unwritten":
        assert np.isnan(k[last, :, 3]).all()
        assert not np.isnan(k[last, :, 2]).any()


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_declared_refusals_are_refused(spec: OpSpec) -> None:
    assert spec.refuses
    for _, attrs, types in spec.refuses:
        with pytest.raises(OpRefused, match=f"op {spec.name}"):
            spec.types(attrs, types)


@pytest.mark.parametrize("spec", [s for s in SPECS.values() if s.attrs], ids=lambda s: s.name)
def test_no_attribute_has_a_default(spec: OpSpec) -> None:
    """BUG-2: a dropped parameter is an error, never a plausible value."""
    case = next(spec.cases())
    for name in spec.attrs:
        attrs = {k: v for k, v in case.attrs.items() if k != name}
        with pytest.raises(OpRefused, match=name):
            spec.check_attrs(attrs)
    with pytest.raises(OpRefused, match="surprise"):
        spec.check_attrs({**case.attrs, "surprise": 1})


def test_golden_rope_table() -> None:
    """MODEL.md §2.3: values at position 1,048,575, bit for bit as torch computes them."""
    outs = [torch.empty(1, 32), torch.empty(1, 32)]
    KERNELS["rope_table"]({"theta": 1e7, "rotary_dim": 64})(outs, [torch.tensor([1_048_575])], None, None)
    assert float(outs[0][0, 1]) == pytest.approx(-0.9691473, abs=1e-7)
    assert float(outs[1][0, 1]) == pytest.approx(-0.2464823, abs=1e-7)
    from m31.ops.rope import inverse_frequencies

    inv = inverse_frequencies(1e7, 64)
    assert inv[16].view(np.uint32) == 0x39A5CB60
    assert inv[0] == 1.0
    assert float(inv[1]) == pytest.approx(0.60429639, rel=1e-7)
    assert float(inv[31]) == pytest.approx(1.65481710e-7, rel=1e-7)


def test_golden_activation_and_router() -> None:
    """MODEL.md §2.5."""
    case = next(c for c in ops.swiglu_oai.cases() if c.id.endswith("golden"))
    outs, _ = run(ops.swiglu_oai, case, torch.float64, gaps=False)
    np.testing.assert_allclose(outs[0].numpy()[0], [55.9996, -5.07477, -6.0095e-6, 0.437986], rtol=1e-5)
    case = next(c for c in ops.router.cases() if c.id.endswith("golden"))
    outs, _ = run(ops.router, case, torch.float64, gaps=False)
    assert outs[0].tolist() == [[1, 0, 4, 2]]
    np.testing.assert_allclose(outs[1].numpy()[0], [0.105855, 0.262697, 0.228654, 0.402795], atol=1e-6)


def test_doubling_the_routed_factor_doubles_the_output() -> None:
    """BUG-27, metamorphic: the factor is applied exactly once."""
    case = next(c for c in ops.experts.cases() if c.id.endswith("many"))
    once, _ = run(ops.experts, case, torch.float64, gaps=False)
    attrs = {**case.attrs, "routed_scaling_factor": 2 * case.attrs["routed_scaling_factor"]}
    twice, _ = run(ops.experts, Case(case.id, attrs, case.inputs), torch.float64, gaps=False)
    torch.testing.assert_close(twice[0], 2 * once[0], rtol=0, atol=0)


def test_index_heads_choose_their_own_blocks() -> None:
    """BUG-29: two index heads with different scores select different blocks."""
    scores = torch.full((1, 2, 12), -1.0)
    scores[0, 0, [1, 2, 3]] = 5.0
    scores[0, 1, [6, 7, 8]] = 5.0
    out = torch.empty(1, 2, 4, dtype=torch.int64)
    attrs = {"topk": 4, "block": 4, "local_blocks": 1, "init_blocks": 0}
    ATTENTION["block_select"](attrs)([out], [scores, torch.tensor([47])], None, None)
    assert out[0].tolist() == [[1, 2, 3, 11], [6, 7, 8, 11]]
