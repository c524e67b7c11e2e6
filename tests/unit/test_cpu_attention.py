"""Attention of the CPU backend: against float64 on fuzzed steps, with memory that ends with every buffer; who may not
notice whom; what it refuses; what other processors would run."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.cpu_pages import guard, run, session, write
from tests.unit.test_cpu_index import assembly

from m31 import ops
from m31.formats.arithmetic import parse
from m31.graph import OpInstance, Refusal, StepClass
from m31.ops import StateType, TensorType
from m31.ops.cases import Batch, batch
from m31.ops.draft import draft_attention
from m31.sdk.backend import KVSpec
from m31_cpu import isa as isas
from m31_cpu.kernels.attend import Geometry
from m31_cpu.kernels.attention import PART_TOKENS, _attention, _joined
from m31_cpu.pages import CpuCache, CpuLayout
from m31_cpu.session import CpuSession

ISAS = ["avx2", "portable"]
FORMS = ["float32", "bfloat16", "fp8", "nvfp4"]
SPECS = {"sparse": ops.sparse_attention, "dense": ops.dense_attention, "draft": draft_attention}


class Step:
    """A step with its pages: KV heads, query heads for each, channels, page; top-k and window.

    Tokens are written as far as the step has them (of a drafted block, as far as its context); all else is NaN.
    """

    def __init__(
        self, kind: str, form: str, q_lens: list[int], contexts: list[int], sizes: tuple[int, ...], seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        self.kind, self.form = kind, form
        self.heads, self.group, dim, page, self.topk, window = sizes
        self.b = batch(rng, q_lens, contexts, page)
        tokens = sum(q_lens)
        spec = KVSpec(
            indexed=(False,),
            kv_heads=self.heads,
            head_dim=dim,
            index_dim=0,
            page_tokens=page,
            kv_format=form,  # type: ignore[arg-type]
            index_format="bfloat16",
        )
        self.cache: CpuCache = guard(CpuLayout(spec).allocate(self.b.num_pages))
        self.cache.poison(range(self.b.num_pages))
        self.written = [n - q * (kind == "draft") for q, n in zip(q_lens, contexts, strict=True)]
        for s, n in enumerate(self.written):
            at = torch.arange(n)
            where = torch.as_tensor(self.b.page_table[s])[at // page]
            for store in (self.cache.k[0], self.cache.v[0]):
                write(store, where, at % page, self._random(rng, n, self.heads, dim))
        self.q = self._random(rng, tokens, self.heads * self.group, dim) * 2
        self.attrs = {"layer": 0, "kv_heads": self.heads, "scale": dim**-0.5}
        self.more: list[torch.Tensor] = []
        if kind == "sparse":
            self.more = [torch.as_tensor(self._lists(rng, page))]
        if kind == "draft":
            self.attrs["window"] = window
            self.more = [self._random(rng, tokens, self.heads, dim), self._random(rng, tokens, self.heads * dim)]

    @staticmethod
    def _random(rng: np.random.Generator, *shape: int) -> torch.Tensor:
        return torch.as_tensor(rng.standard_normal(shape)).bfloat16().float()

    def _lists(self, rng: np.random.Generator, page: int) -> Any:
        """Each query's own block and random ones before it."""
        found = np.full((len(self.q), self.heads, self.topk), -1)
        for t, p in enumerate(self.b.positions):
            for h in range(self.heads):
                own = int(p) // page
                chosen = np.sort(np.append(rng.permutation(own)[: self.topk - 1], own))
                found[t, h, : len(chosen)] = chosen
        return found

    def result(self, cpu: CpuSession) -> torch.Tensor:
        """Of the kernels."""
        rest = [torch.as_tensor(x) for x in (self.b.positions, self.b.cu_q, self.b.seq_lens, self.b.page_table)]
        ins = {
            "sparse": [self.q, self.cache, *self.more, *rest],
            "dense": [self.q, self.cache, *rest],
            "draft": [self.q, *self.more, self.cache, *rest],
        }[self.kind]
        (y,) = run(cpu, SPECS[self.kind], self.attrs, ins, (self.form, "bfloat16"))
        assert isinstance(y, torch.Tensor)
        return y

    def expected(self) -> torch.Tensor:
        """In float64, from what the pages read as."""
        page, dim = self.cache.page_tokens, self.q.shape[2]
        pages = [self.cache.read(0, i) for i in range(self.cache.pages)]
        k, v = (torch.stack([p[name] for p in pages]).double() for name in ("k", "v"))
        out = torch.zeros(len(self.q), self.heads, self.group, dim, dtype=torch.float64)
        for s, n in enumerate(self.written):
            lo, hi = int(self.b.cu_q[s]), int(self.b.cu_q[s + 1])
            at = torch.arange(n)
            where = torch.as_tensor(self.b.page_table[s])[at // page]
            for t in range(lo, hi):
                position = int(self.b.positions[t])
                for h in range(self.heads):
                    seen = at > position - self.attrs["window"] if self.kind == "draft" else at <= position
                    if self.kind == "sparse":
                        seen &= torch.isin(at // page, self.more[0][t, h])
                    keys, values = (x[where[seen], h, (at % page)[seen]] for x in (k, v))
                    if self.kind == "draft":
                        own = self.more[1].view(len(self.q), self.heads, dim)
                        keys = torch.cat([keys, self.more[0][lo:hi, h].double()])
                        values = torch.cat([values, own[lo:hi, h].double()])
                    q = self.q[t, h * self.group : (h + 1) * self.group].double()
                    out[t, h] = torch.softmax(q @ keys.T * self.attrs["scale"], -1) @ values
        return out.flatten(1)


# Query lengths, contexts, (KV heads, group, channels, page, top-k, window). Pages that do not fill lanes, an odd
# number of tokens, channels that do not fill vectors, groups that do not fill products.
STEPS = [
    ([1, 1, 0, 1], [3, 4, 7, 5], (2, 2, 16, 4, 4, 9)),
    ([3, 1, 20], [40, 33, 75], (1, 5, 48, 5, 6, 30)),
    ([9], [1060], (1, 1, 16, 128, 5, 200)),
    ([33, 1, 8], [190, 300, 150], (2, 4, 32, 32, 4, 64)),
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", SPECS)
def test_attention(kind: str, form: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right, and the same on one thread as on three, where parts of a context are tasks."""
    few, many = session(monkeypatch, isa, 1), session(monkeypatch, isa, 3)
    first = (
        FORMS.index(form) + list(SPECS).index(kind) + ISAS.index(isa)
    )  # every step for every ISA, not with everything
    for seed in range(first, first + (2 if isa == "avx2" else 1)):
        q_lens, contexts, sizes = STEPS[seed % len(STEPS)]
        step = Step(kind, form, q_lens, contexts, sizes, seed)
        y = step.result(few)
        assert float((y - step.expected()).abs().max()) < 1e-5, (q_lens, contexts, sizes)
        assert torch.equal(y, step.result(many))


@pytest.mark.parametrize("isa", ISAS)
def test_a_published_layer(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 128, blocks of 128, sixteen of seventeen blocks; and channels that no vector divides."""
    for form, sizes in (("bfloat16", (1, 16, 128, 128, 16, 0)), ("float32", (1, 3, 11, 16, 16, 0))):
        step = Step("sparse", form, [2], [17 * sizes[3] - 1], sizes, 3)
        assert float((step.result(session(monkeypatch, isa)) - step.expected()).abs().max()) < 1e-5


@pytest.mark.parametrize("kind", ["dense", "draft"])
def test_parts_of_a_long_context(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(kind, "bfloat16", [3], [2 * PART_TOKENS + 77], (1, 2, 16, 64, 0, PART_TOKENS + 500), 5)
    y = step.result(session(monkeypatch, "portable", 1))
    assert float((y - step.expected()).abs().max()) < 1e-5
    assert torch.equal(y, step.result(session(monkeypatch, "portable", 2)))


@pytest.mark.parametrize("kind", ["sparse", "dense"])
@pytest.mark.parametrize("isa", ISAS)
def test_a_query_does_not_notice_its_company(kind: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of a prefill is what it is as the only one of its step, bit for bit."""
    cpu = session(monkeypatch, isa)
    step = Step(kind, "nvfp4", [30], [200], (2, 2, 16, 8, 9, 0), 6)
    together = step.result(cpu)
    q, more, b = step.q, step.more, step.b
    for t in (0, 17, 29):
        at = b.positions[t : t + 1]
        step.b = Batch(at, np.asarray([0, 1]), at + 1, b.page_table, b.slot_map[t : t + 1], b.num_pages)
        step.q, step.more = q[t : t + 1], [x[t : t + 1] for x in more]
        assert torch.equal(step.result(cpu)[0], together[t])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("isa", ISAS)
def test_nan_reaches_those_who_see_it_and_nobody_else(form: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = session(monkeypatch, isa)
    for which in ("k", "v"):
        step = Step("dense", form, [6], [11], (1, 2, 16, 4, 0, 0), 7)
        before = step.result(cpu)
        at = torch.tensor([7])  # the third query's own token: those before it must not see it
        page = torch.as_tensor(step.b.page_table[0])[at // 4]
        write(getattr(step.cache, which)[0], page, at % 4, torch.full((1, 1, 16), torch.nan))
        after = step.result(cpu)
        assert torch.equal(after[:2], before[:2])
        assert bool(after[2:].isnan().all())


@pytest.mark.parametrize("isa", ISAS)
def test_entries_that_are_no_block(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """-1 anywhere, and blocks after the query's own, add nothing."""
    cpu = session(monkeypatch, isa)
    step = Step("sparse", "float32", [4], [40], (2, 2, 8, 4, 8, 0), 8)
    want = step.result(cpu)
    (lists,) = step.more
    step.more = [torch.cat([torch.full_like(lists, -1), lists, torch.full_like(lists, 11)], 2)]
    step.b.page_table.resize((1, 12), refcheck=False)
    got = step.result(cpu)
    assert float((got - want).abs().max()) < 1e-6


def kernel(form: str, heads: int, dim: int, arithmetic: str = "exact") -> Any:
    types = (
        TensorType(("T", heads, dim), "T,h,D", "model"),
        StateType("kv", form, "bfloat16"),
        TensorType(("T",), "T", "int64"),
        TensorType(("S+1",), "S", "int64"),
        TensorType(("S",), "S", "int64"),
        TensorType(("S", "P"), "S,P", "int64"),
    )
    attrs = {"layer": 0, "kv_heads": 1, "scale": 1.0}
    op = OpInstance("dense_1", ops.dense_attention, attrs, types, ops.dense_attention.types(attrs, types))
    step = StepClass(kind="mixed", q_len=0, tokens=1, seqs=1, rows=1, pages=1)
    return CpuSession(parse(arithmetic)).kernel(op, step)


@pytest.mark.parametrize(
    ("form", "heads", "dim", "arithmetic", "text"),
    [
        ("float64", 1, 16, "exact", "float64"),
        ("bfloat16", 17, 16, "exact", "17 query heads"),
        ("bfloat16", 1, 7, "exact", "7 channels"),
        ("nvfp4", 1, 24, "exact", "24 channels"),
        ("nvfp4", 1, 16, "exact+kv_read=e4m3-shift3", "e4m3-shift3"),
        ("fp8", 1, 16, "exact+probability=e4m3", "softmax weights"),
        ("fp8", 1, 16, "exact+query=e4m3", "queries"),
    ],
)
def test_what_it_refuses(form: str, heads: int, dim: int, arithmetic: str, text: str) -> None:
    found = kernel(form, heads, dim, arithmetic)
    assert isinstance(found, Refusal)
    assert text in found.reason


def test_a_reading_rule_of_nvfp4_concerns_no_other_format() -> None:
    assert not isinstance(kernel("fp8", 1, 16, "exact+kv_read=e4m3"), Refusal)


@pytest.mark.parametrize(
    ("name", "form", "needs"),
    [
        ("avx512", "bfloat16", ("vdpbf16ps", "zmm")),
        ("avx512", "nvfp4", ("vdpbf16ps", "vpshufb")),
        ("avx512", "float32", ("vfmadd", "zmm")),
        ("avx2", "fp8", ("vcvtph2ps", "vfmadd", "ymm")),
        ("neon", "nvfp4", ("tbl", "fmla")),
        ("portable", "nvfp4", ("mulps",)),
    ],
)
def test_what_other_processors_run(name: str, form: str, needs: tuple[str, ...]) -> None:
    """The instructions that the kernels are for, and no calls but to memset: LLVM's own helpers do not exist here."""
    isa = next(x for x in isas.ALL if x.name == name)
    g = Geometry(form, 4, 16, 128, 128, isa)
    text = assembly(_attention("sparse", g, split=False, topk=16), name) + assembly(_joined(g), name)
    assert [x for x in needs if x not in text] == []
    called = set(re.findall(r"\tbl\t(\w+)", text)) | set(re.findall(r"(?:callq?\t|\$)(\w+)@(?:PLT|GOT)\b", text))
    assert called <= {"memset"}
