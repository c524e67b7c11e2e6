"""Index kernels of the CPU backend: block scores, selection, the table of RoPE; what other processors would run."""

from __future__ import annotations

import dataclasses
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch
from tests.support.cpu_pages import guard, run, session, write

from m31 import ops
from m31.ops.cases import Batch, batch
from m31.sdk.backend import KVSpec
from m31_cpu import isa as isas
from m31_cpu.kernels.scores import _scores, _Shape
from m31_cpu.kernels.table import TABLE
from m31_cpu.native import module_of, optimised
from m31_cpu.pages import INDEX, CpuCache, CpuLayout

ISAS = ["avx2", "portable"]
SPEC = KVSpec(
    indexed=(True,),
    kv_heads=1,
    head_dim=16,
    index_dim=32,
    page_tokens=32,
    kv_format="float32",
    index_format="float32",
)


def filled(form: str, b: Batch, rng: np.random.Generator, **changes: Any) -> CpuCache:
    """Pages with random keys for every token of a batch; all else is NaN, the pages of nobody too."""
    made = guard(CpuLayout(dataclasses.replace(SPEC, index_format=form, **changes)).allocate(b.num_pages))
    made.poison(range(b.num_pages))
    store = made.index[0]
    assert store is not None
    for s, n in enumerate(b.seq_lens):
        at = torch.arange(int(n))
        pages = torch.as_tensor(b.page_table[s])[at // store.page]
        x = torch.as_tensor(rng.standard_normal((int(n), 1, store.dim))).bfloat16().float()
        write(store, pages, at % store.page, x)
    return made


def context(b: Batch) -> tuple[torch.Tensor, ...]:
    return tuple(torch.as_tensor(x) for x in (b.positions, b.cu_q, b.seq_lens, b.page_table))


def scores(cpu: Any, made: CpuCache, q: torch.Tensor, b: Batch) -> torch.Tensor:
    form = made.layout.spec.index_format  # type: ignore[attr-defined]
    (y,) = run(cpu, ops.block_scores, {"layer": 0}, (q, made, *context(b)), ("float32", form))
    assert isinstance(y, torch.Tensor)
    return y


def wanted(made: CpuCache, q: torch.Tensor, b: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores in float64, and of each the sum of the magnitudes of its products."""
    store = made.index[0]
    assert store is not None
    keys = torch.stack([store.read(page) for page in range(made.pages)]).double()
    out = torch.full((*q.shape[:2], b.page_table.shape[1]), -torch.inf, dtype=torch.float64)
    size = torch.ones_like(out)
    for s in range(len(b.seq_lens)):
        for t in range(int(b.cu_q[s]), int(b.cu_q[s + 1])):
            for block in range(int(b.positions[t]) // store.page + 1):
                seen = keys[b.page_table[s, block], : int(b.positions[t]) + 1 - block * store.page]
                product = q[t].double() @ seen.T
                out[t, :, block] = product.nan_to_num(nan=-torch.inf, neginf=-torch.inf).amax(-1)
                size[t, :, block] = (q[t].double().abs() @ seen.abs().T).nan_to_num().amax(-1)
    return out, size


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", INDEX)
def test_block_scores(form: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64, on steps of all kinds: prefills of more than a tile, decodes, a sequence without queries; pages
    in any order, unwritten tokens NaN, keys that are NaN, and memory that ends with every buffer."""
    cpu = session(monkeypatch, isa)
    rng = np.random.default_rng(7)
    steps = [([1], [200], 4), ([37, 1, 0, 5], [70, 33, 40, 131], 4), ([1, 1, 1], [31, 32, 33], 4), ([19], [19], 3)]
    for case, (q_lens, contexts, heads) in enumerate(steps if form == "bfloat16" else steps[:3]):
        b = batch(rng, q_lens, contexts, 32)
        made = filled(form, b, rng)
        if case == 0:
            store = made.index[0]
            assert store is not None
            bad = torch.full((1, 1, store.dim), torch.nan)
            write(store, torch.as_tensor(b.page_table[0, 1:2]), torch.tensor([9]), bad)
        q = torch.as_tensor(rng.standard_normal((len(b.positions), heads, 32))).float()
        want, size = wanted(made, q, b)
        got = scores(cpu, made, q, b).double()
        assert torch.equal(got.isinf(), want.isinf())
        off = (got - want).nan_to_num(nan=0.0).abs()
        assert bool((off <= 4e-6 * size).all()), float((off / size).max())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("form", "page"), [("bfloat16", 4), ("int8", 20)])
def test_block_scores_of_pages_that_do_not_fill_lanes(
    form: str, page: int, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes without a token hold zeros, which must not win over negative scores."""
    cpu = session(monkeypatch, isa)
    rng = np.random.default_rng(page)
    b = batch(rng, [3, 1], [45, 41], page)
    made = filled(form, b, rng, page_tokens=page, index_dim=8)
    q = torch.as_tensor(rng.standard_normal((4, 2, 8))).float()
    want, size = wanted(made, q, b)
    got = scores(cpu, made, q, b).double()
    assert torch.equal(got.isinf(), want.isinf())
    assert bool(((got - want).nan_to_num(nan=0.0).abs() <= 4e-6 * size).all())


@pytest.mark.parametrize("isa", ISAS)
def test_scores_depend_on_neither_threads_nor_company(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    b = batch(rng, [21, 1], [300, 280], 32)
    made = filled("int8", b, rng)
    q = torch.as_tensor(rng.standard_normal((22, 4, 32))).float()
    together = scores(session(monkeypatch, isa, 1), made, q, b)
    assert torch.equal(scores(session(monkeypatch, isa, 5), made, q, b), together)
    for s, t in ((0, 13), (1, 21)):
        alone = Batch(
            b.positions[t : t + 1],
            np.asarray([0, 1]),
            b.seq_lens[s : s + 1],
            b.page_table[s : s + 1],
            b.slot_map[t : t + 1],
            b.num_pages,
        )
        assert torch.equal(scores(session(monkeypatch, isa), made, q[t : t + 1], alone)[0], together[t])


@pytest.mark.parametrize("isa", ISAS)
def test_block_select(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the definition, from few blocks to 8,192: ties, zeros of both signs, NaN, infinities, rising scores."""
    cpu = session(monkeypatch, isa)
    rng = np.random.default_rng(5)
    forms = {"few": (4, 1, 0), "init": (4, 1, 1), "two": (16, 2, 0), "free": (16, 0, 0), "all": (2, 1, 1)}
    for name, (topk, local, init) in forms.items():
        attrs = {"topk": topk, "block": 4, "local_blocks": local, "init_blocks": init}
        for blocks in (1, 3, 17, 255, 700) + ((8192,) if name == "two" else ()):
            x = rng.standard_normal((5, 2, blocks))
            x[1] = np.round(2 * x[1])
            x[2] = np.where(rng.random((2, blocks)) < 0.7, -np.inf, x[2])
            x[2] = np.where(rng.random((2, blocks)) < 0.1, np.nan, x[2])
            x[3] = np.where(rng.random((2, blocks)) < 0.5, 0.0, -0.0)
            x[4] = np.arange(blocks)
            x[4, 1, ::5] = np.inf
            positions = np.asarray([4 * blocks - 1, 4 * blocks - 4, 4 * blocks - 2, 2 * blocks, 4 * blocks - 1])
            given = torch.as_tensor(x).float()
            (got,) = run(cpu, ops.block_select, attrs, (given, torch.as_tensor(positions)))
            (want,) = ops.block_select.naive(attrs, given.double().numpy(), positions)
            np.testing.assert_array_equal(got.numpy(), want, err_msg=f"{name}, {blocks} blocks")


@pytest.mark.parametrize("isa", ISAS)
def test_rope_table(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Correctly rounded float32 almost everywhere, up to a million radians; MODEL.md §2.3 has the golden numbers."""
    cpu = session(monkeypatch, isa)
    positions = torch.cat([torch.arange(0, 1_048_576, 977), torch.tensor([1_048_575, 710, 103_993, 833_719])])
    attrs = {"theta": 1e7, "rotary_dim": 64}
    cos, sin = run(cpu, ops.rope_table, attrs, (positions,))
    want_cos, want_sin = ops.rope_table.naive(attrs, positions.numpy())
    for got, want in ((cos, want_cos), (sin, want_sin)):
        assert float((got.double() - torch.as_tensor(want)).abs().max()) < 3.1e-8
    last = len(positions) - 4
    assert (round(float(cos[last, 1]), 7), round(float(sin[last, 1]), 7)) == (-0.9691473, -0.2464823)
    odd = run(cpu, ops.rope_table, {"theta": 1e4, "rotary_dim": 6}, (positions[:5],))
    assert all(bool(x.isfinite().all()) for x in odd)


def assembly(native: Any, name: str) -> str:
    """What LLVM makes of a kernel for an instruction set, this machine's or not."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    isa = next(x for x in isas.ALL if x.name == name)
    triple = "aarch64-unknown-linux-gnu" if name == "neon" else "x86_64-unknown-linux-gnu"
    cpu = isa.cpu or "x86-64"
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=isa.features, opt=2, reloc="pic", codemodel="default"
    )
    return str(machine.emit_assembly(optimised(module_of(native.name, native.write, isa, triple), machine)))


@pytest.mark.parametrize(
    ("name", "form", "needs"),
    [
        ("avx512", "bfloat16", ("vdpbf16ps", "zmm")),
        ("avx512", "int8", ("vcvtdq2ps", "vfmadd", "zmm")),
        ("avx512", "nvfp4", ("vpshufb", "vfmadd", "zmm")),
        ("neon", "bfloat16", ("fmla",)),
        ("neon", "nvfp4", ("tbl", "fmla")),
        ("neon", "fp8", ("fcvtl", "fmla")),
        ("portable", "fp8", ("mulps",)),
    ],
)
def test_what_other_processors_run(name: str, form: str, needs: tuple[str, ...]) -> None:
    """The instructions that the kernels are for, and no calls: LLVM's own helpers do not exist here."""
    text = assembly(_scores(_Shape(form, 4, 32, 32)), name)
    assert [x for x in needs if x not in text] == []
    assert "call" not in text
    assert "\tbl\t" not in text


@pytest.mark.parametrize("name", ["avx512", "avx2", "neon", "portable"])
def test_the_table_calls_nobody(name: str) -> None:
    text = assembly(TABLE, name)
    assert "call" not in text
    assert "\tbl\t" not in text
