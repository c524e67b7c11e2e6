"""The fused projection + norm + rotation + insert: against float64, against the reference backend, and bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from tests.unit.triton_helpers import FORMATS, bits, pages_of, store, to_bfloat16
from torch import Tensor

from m31.errors import OpRefused
from m31.formats import nvfp4
from m31.formats.layout import ScaleOrder
from m31.graph import StepClass
from m31_reference.cache import Store
from m31_reference.kernels import KERNELS
from m31_triton.interpreter import interpret
from m31_triton.kernels import nvfp4 as device
from m31_triton.launch import IndexBranch, Pages, interpreted, launch_projection, launch_qkv_insert

EPS = 1e-6
encode, decode = device.encode, device.decode


@dataclass
class Inserted:
    """One step through `launch_qkv_insert`."""

    hq: int
    hkv: int
    hiq: int
    dim: int
    rotary: int
    page: int
    rows: Tensor
    norms: tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, index q, index k
    table: tuple[Tensor, Tensor]
    slots: Tensor
    q: Tensor
    iq: Tensor
    k: Store
    v: Store
    index: Store

    def branch(self, name: str) -> Tensor:
        """[T,heads,D] of the rows."""
        counts = [self.hq, self.hkv, self.hkv, self.hiq, 1]
        at = ("q", "k", "v", "iq", "ik").index(name)
        start = sum(counts[:at]) * self.dim
        return self.rows[:, start : start + counts[at] * self.dim].unflatten(1, (counts[at], self.dim))


def step_of(tokens: int) -> StepClass:
    return StepClass(kind="decode", q_len=1, tokens=tokens, seqs=tokens, rows=tokens, pages=4)


def insert(
    seed: int,
    fmt: str,
    order: ScaleOrder,
    *,
    hq: int = 6,
    hkv: int = 3,
    hiq: int = 2,
    dim: int = 32,
    rotary: int = 16,
    page: int = 16,
    slots: tuple[int, ...] = (3, 16, -1, 100, 50, -1),
    rows: Tensor | None = None,
    index: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Inserted:
    g = torch.Generator().manual_seed(seed)
    tokens, pages = len(slots), 7
    width = (hq + 2 * hkv + (hiq + 1 if index else 0)) * dim
    if rows is None:
        rows = torch.randn(tokens, width, generator=g) * torch.rand(tokens, 1, generator=g) * 6
    norms = tuple(torch.randn(dim, generator=g) * 0.3 for _ in range(4))
    positions = torch.randint(0, 5000, (tokens,), generator=g)
    table = (torch.empty(tokens, rotary // 2), torch.empty(tokens, rotary // 2))
    KERNELS["rope_table"]({"theta": 1e4, "rotary_dim": rotary})(table, [positions], None, None)
    out = Inserted(
        *(hq, hkv, hiq, dim, rotary, page, rows.to(dtype), norms, table, torch.tensor(slots)),
        q=torch.full((tokens, hq, dim), 9.0, dtype=torch.bfloat16),
        iq=torch.full((tokens, hiq, dim), 9.0, dtype=torch.bfloat16),
        k=store(fmt, "linear", pages, hkv, page, dim),
        v=store(fmt, order, pages, hkv, page, dim),
        index=store(fmt, "linear", pages, 1, page, dim),
    )
    branch = IndexBranch(q_norm=norms[2], k_norm=norms[3], q_out=out.iq, pages=pages_of(out.index, "linear", dim))
    launch_qkv_insert(
        interpreted,
        step_of(tokens),
        rows=out.rows,
        q_norm=norms[0],
        k_norm=norms[1],
        table=table,
        slot_map=out.slots,
        q_out=out.q,
        k=pages_of(out.k, "linear", dim),
        v=pages_of(out.v, order, dim),
        index=branch if index else None,
        eps=EPS,
    )
    return out


def oracle(x: Tensor, weight: Tensor, table: tuple[Tensor, Tensor]) -> Any:
    """MODEL.md §2.2 and §2.3 in float64, one channel pair at a time; [T,h,D], not rounded."""
    a, w = x.double().numpy(), weight.double().numpy()
    cos, sin = (part.double().numpy() for part in table)
    half = cos.shape[1]
    n = a / np.sqrt((a * a).mean(-1, keepdims=True) + EPS) * (1 + w)
    out = n.copy()
    for d in range(half):
        out[:, :, d] = n[:, :, d] * cos[:, None, d] - n[:, :, d + half] * sin[:, None, d]
        out[:, :, d + half] = n[:, :, d + half] * cos[:, None, d] + n[:, :, d] * sin[:, None, d]
    return out


def assert_rounded_once(got: Any, exact: Any) -> None:
    """bfloat16 numbers next to `exact`: half a step of bfloat16 and float32's own error away, at most."""
    scale = np.abs(exact).max(-1, keepdims=True)
    step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 1e-30))) - 7)
    assert (np.abs(got - exact) <= step / 2 + 2e-6 * scale).all()
    assert (got == to_bfloat16(exact)).mean() > 0.99


def stored(s: Store, slots: Tensor, used: Tensor) -> Tensor:
    """[used,heads,D]: what the pages hold at the slots in use."""
    places = slots[used]
    return torch.stack([s.exact(int(n) // s.page)[:, int(n) % s.page] for n in places])


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"dim": 128, "rotary": 64, "hq": 16, "hkv": 1, "hiq": 1, "page": 128, "slots": (130, -1, 895)},
        {"hq": 1, "hkv": 4, "hiq": 4},
        {"hq": 5, "hkv": 1, "hiq": 1, "rotary": 32, "dtype": torch.bfloat16},
        {"dim": 64, "rotary": 24, "hkv": 2},
    ],
    ids=["small", "one-of-four-devices", "more-kv-than-q", "all-rotated-bfloat16-rows", "rotary-not-a-power-of-two"],
)
def test_queries_and_keys_are_the_definition_rounded_once(shape: dict[str, Any]) -> None:
    got = insert(0, "bfloat16", "linear", **shape)
    used = got.slots >= 0
    for name, weight, value in (
        ("q", got.norms[0], got.q[used]),
        ("k", got.norms[1], stored(got.k, got.slots, used)),
        ("iq", got.norms[2], got.iq[used]),
        ("ik", got.norms[3], stored(got.index, got.slots, used)),
    ):
        exact = oracle(got.branch(name), weight, got.table)[used.numpy()]
        assert_rounded_once(value.double().numpy(), exact)
    torch.testing.assert_close(stored(got.v, got.slots, used), got.branch("v")[used].bfloat16(), rtol=0, atol=0)


def by_reference(got: Inserted, name: str, weight: Tensor) -> Tensor:
    """The reference backend's kernels for norm, rotation and rounding, one after the other, in float32."""
    x = got.branch(name).float()
    heads = x.shape[1]
    normed, turned, rounded = (torch.empty(x.shape) for _ in range(3))
    held = type("Held", (), {"tensors": {"weight": weight}})()
    KERNELS["head_rmsnorm"]({"eps": EPS, "heads": heads})([normed], [x.flatten(1)], held, None)
    KERNELS["rope"]({})([turned], [normed, *got.table], None, None)
    KERNELS["round_heads"]({})([rounded], [turned], None, None)
    return rounded


@pytest.mark.parametrize(("fmt", "order"), FORMATS)
def test_the_reference_computes_and_stores_the_same(fmt: str, order: ScaleOrder) -> None:
    """Pages are compared byte by byte; only a last bit of bfloat16 that fell on the other side may differ."""
    got = insert(1, fmt, order)
    used = got.slots >= 0
    want = {name: by_reference(got, name, got.norms[i]) for i, name in enumerate(("q", "k", "iq", "ik"))}
    for name, value in (("q", got.q), ("iq", got.iq)):
        off = (value[used].float() - want[name][used]).abs()
        assert (off <= want[name][used].abs() * 2**-7).all()
        assert (off == 0).float().mean() > 0.99
    places = got.slots[used] // got.page, got.slots[used] % got.page
    for mine, vectors, which in (
        (got.k, want["k"], "linear"),
        (got.v, got.branch("v").bfloat16().float(), order),
        (got.index, want["ik"], "linear"),
    ):
        other = store(fmt, which, 7, mine.heads, got.page, got.dim)
        other.write(*places, vectors[used])
        for name, part in bits(other.parts).items():
            assert (bits(mine.parts)[name] == part).mean() > 0.999, name


@pytest.mark.parametrize(("fmt", "order"), FORMATS[1:])
def test_nvfp4_is_quantised_from_the_bfloat16_value(fmt: str, order: ScaleOrder) -> None:
    """The same rows into bfloat16 pages and into NVFP4 pages: the second are the first, encoded; bit for bit."""
    plain, got = insert(2, "bfloat16", order), insert(2, fmt, order)
    used = got.slots >= 0
    for mine, source, which in (
        (got.k, plain.k, "linear"),
        (got.v, plain.v, order),
        (got.index, plain.index, "linear"),
    ):
        other = store(fmt, which, 7, mine.heads, got.page, got.dim)
        other.write(got.slots[used] // got.page, got.slots[used] % got.page, stored(source, got.slots, used).float())
        assert {n: p.tobytes() for n, p in bits(mine.parts).items()} == {
            n: p.tobytes() for n, p in bits(other.parts).items()
        }


@pytest.mark.parametrize(("fmt", "order"), FORMATS)
def test_padding_and_other_slots_are_left_alone(fmt: str, order: ScaleOrder) -> None:
    """NaN in a padding row reaches nothing; every byte of the pages outside the used slots is what it was."""
    g = torch.Generator().manual_seed(3)
    rows = torch.randn(4, (6 + 6 + 3) * 32, generator=g)
    rows[1] = torch.nan
    got = insert(3, fmt, order, slots=(20, -1, 5, -1), rows=rows)
    padding = got.slots < 0
    assert (got.q[padding] == 9).all()
    assert (got.iq[padding] == 9).all()
    assert got.q[~padding].isfinite().all()
    for s in (got.k, got.v, got.index):
        for page in range(7):
            rest = s.exact(page).float().isnan().all(-1)  # poison, or a slot that was written
            written = {int(n) % got.page for n in got.slots if n >= 0 and int(n) // got.page == page}
            assert [set(torch.nonzero(~head).flatten().tolist()) for head in rest] == [written] * s.heads


def test_a_step_of_padding_writes_nothing() -> None:
    got = insert(4, "bfloat16", "linear", slots=(-1, -1))
    assert (got.q == 9).all()
    assert got.k.parts["values"].isnan().all()


def test_a_layer_without_block_selection_has_no_index_branch() -> None:
    """MODEL.md §2.4, M3's first layers: rows end after v, and nothing of the index is touched."""
    got, full = insert(5, "bfloat16", "linear", index=False), insert(5, "bfloat16", "linear")
    used = got.slots >= 0
    assert got.rows.shape[1] == (6 + 6) * 32 != full.rows.shape[1]
    assert_rounded_once(got.q[used].double().numpy(), oracle(got.branch("q"), got.norms[0], got.table)[used.numpy()])
    torch.testing.assert_close(stored(got.v, got.slots, used), got.branch("v")[used].bfloat16(), rtol=0, atol=0)
    assert got.index.parts["values"].isnan().all()
    assert (got.iq == 9).all()


@triton.jit
def _encode(x, packed, scale, R: tl.constexpr, D: tl.constexpr):
    r = tl.program_id(0) * R + tl.arange(0, R)
    codes, sf = encode(tl.load(x + r[:, None] * D + tl.arange(0, D)[None, :]).to(tl.float32), R, D)
    tl.store(packed + r[:, None] * (D // 2) + tl.arange(0, D // 2)[None, :], codes)
    tl.store(scale + r[:, None] * (D // 16) + tl.arange(0, D // 16)[None, :], sf)


@triton.jit
def _decode(packed, scale, out, R: tl.constexpr, D: tl.constexpr):
    r = tl.program_id(0) * R + tl.arange(0, R)
    codes = tl.load(packed + r[:, None] * (D // 2) + tl.arange(0, D // 2)[None, :])
    sf = tl.load(scale + r[:, None] * (D // 16) + tl.arange(0, D // 16)[None, :])
    tl.store(out + r[:, None] * D + tl.arange(0, D)[None, :], decode(codes, sf, R, D))


def encoded(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, dim = x.shape
    packed, scale = torch.empty(rows, dim // 2, dtype=torch.uint8), torch.empty(rows, dim // 16, dtype=torch.uint8)
    interpret(_encode, (rows // 16,), x=x, packed=packed, scale=scale, R=16, D=dim)
    return packed, scale


def assert_encoded_as_the_format_says(x: Tensor) -> None:
    packed, scale = encoded(x)
    want_packed, want_scale = nvfp4.encode_kv(x, nonfinite="propagate")
    assert torch.equal(scale, want_scale.view(torch.uint8))
    assert torch.equal(packed, want_packed)


def adversarial() -> Tensor:
    """bfloat16 groups: every magnitude, ties of both roundings, zeros of both signs, subnormals, outliers."""
    g = torch.Generator().manual_seed(6)
    x = torch.randn(512, 128, generator=g)
    x[:128] *= torch.logspace(-38, 38, 128, base=2)[:, None]
    x[128:256] = torch.randint(-24, 25, (128, 128), generator=g) * 0.25  # midpoints of E2M1 at scale 1 and others
    x[128:256, ::16] = 6.0
    x[256] = 0.0
    x[257] = -0.0
    x[258, 1::2] = -0.0
    x[259] = 2.0**-133  # subnormal in bfloat16
    x[260, 7] = 3e38
    x[261, ::16] = 2688.0
    x[262, ::16] = 2976.0  # amax / 6 = 496, beyond E4M3
    x[263:300] *= 2.0**-9  # scales that are E4M3 subnormals
    x[300:320] *= 2.0**-12  # scales that underflow to zero: codes saturate
    return x.bfloat16()


def test_codes_and_scales_are_those_of_the_format() -> None:
    assert_encoded_as_the_format_says(adversarial())


def test_groups_that_are_not_finite_get_a_nan_scale() -> None:
    x = torch.ones(16, 128, dtype=torch.bfloat16)
    x[0, 3], x[1, 20], x[2, 127], x[3, :] = torch.nan, torch.inf, -torch.inf, torch.nan
    assert_encoded_as_the_format_says(x)
    assert (encoded(x)[1] == 0x7F).sum() == 3 + 8


def test_the_golden_group() -> None:
    """MODEL.md §3.4."""
    x = torch.tensor([((29 * i) % 31 - 15) / 10 for i in range(16)]).bfloat16().expand(16, 8, 16).flatten(1)
    packed, scale = encoded(x.contiguous())
    assert (scale == 0x28).all()
    assert packed[0, :8].tolist() == [0x7F, 0x66, 0x45, 0x23, 0xA0, 0xCB, 0xED, 0xFE]


def test_every_product_of_code_and_scale_is_exact() -> None:
    packed = torch.arange(256, dtype=torch.uint8).repeat(256, 1).view(256, 32, 8)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 32)
    out = torch.empty(256, 512, dtype=torch.bfloat16)
    interpret(_decode, (16,), packed=packed.contiguous(), scale=scale.contiguous(), out=out, R=16, D=512)
    want = nvfp4.decode_kv(packed.flatten(1), scale.view(torch.float8_e4m3fn), torch.float64)
    assert torch.equal(out.isnan(), want.isnan())
    assert want.isnan().any(1).nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert torch.equal(out.double().nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "n", "k"), [(5, 100, 72), (16, 64, 128), (130, 200, 96)])
def test_the_projection_is_a_matrix_product(dtype: torch.dtype, tokens: int, n: int, k: int) -> None:
    g = torch.Generator().manual_seed(7)
    x, w = torch.randn(tokens, k, generator=g).to(dtype), torch.randn(n, k, generator=g).bfloat16()
    slots = torch.arange(tokens)
    slots[tokens // 2] = -1
    x[tokens // 2] = torch.nan
    y = torch.full((tokens, n), 7.0)
    launch_projection(interpreted, step_of(tokens), x=x, w=w, slot_map=slots, y=y)
    used = slots >= 0
    want = x[used].bfloat16().double() @ w.double().T
    size = x[used].bfloat16().double().abs() @ w.double().abs().T
    assert ((y[used] - want).abs() <= 2**-22 * k**0.5 * size).all()
    assert (y[~used] == 7).all()


def test_projection_then_insert_is_the_attention_input_of_the_model() -> None:
    """Both launches, from hidden states: against float64 products, norms and rotations."""
    g = torch.Generator().manual_seed(8)
    hidden, width = 64, (6 + 6 + 3) * 32
    x, w = torch.randn(4, hidden, generator=g).bfloat16(), (torch.randn(width, hidden, generator=g) / 8).bfloat16()
    slots = (7, 30, -1, 64)
    y = torch.zeros(4, width)
    launch_projection(interpreted, step_of(4), x=x, w=w, slot_map=torch.tensor(slots), y=y)
    got = insert(8, "bfloat16", "linear", slots=slots, rows=y)
    used = got.slots >= 0
    got.rows = x.double() @ w.double().T
    exact = oracle(got.branch("k"), got.norms[1], got.table)[used.numpy()]
    assert_rounded_once(stored(got.k, got.slots, used).double().numpy(), exact)
    assert_rounded_once(stored(got.v, got.slots, used).double().numpy(), got.branch("v")[used].numpy())


def test_what_does_not_fit_is_refused() -> None:
    step = step_of(2)
    x, w, slots, y = (
        torch.ones(2, 16),
        torch.ones(8, 16).bfloat16(),
        torch.zeros(2, dtype=torch.int64),
        torch.ones(2, 8),
    )
    with pytest.raises(OpRefused, match=r"argument 'x'.*\[3, 16\].*expected .*\[2, 16\]"):
        launch_projection(interpreted, step, x=torch.ones(3, 16), w=w, slot_map=slots, y=y)
    with pytest.raises(OpRefused, match=r"argument 'w'.*float32.*expected torch.bfloat16"):
        launch_projection(interpreted, step, x=x, w=w.float(), slot_map=slots, y=y)
    with pytest.raises(OpRefused, match=r"argument 'y'.*not contiguous"):
        launch_projection(interpreted, step, x=x, w=w, slot_map=slots, y=torch.ones(8, 2).t())
    with pytest.raises(OpRefused, match=r"head size 24.*power of two"):
        insert(9, "bfloat16", "linear", dim=24, rotary=8)
    with pytest.raises(OpRefused, match=r"48 of them rotated.*no wider than a head"):
        insert(9, "bfloat16", "linear", dim=32, rotary=48)
    with pytest.raises(OpRefused, match=r"argument 'rows'"):
        insert(9, "bfloat16", "linear", rows=torch.ones(6, 32))
    s = store("nvfp4", "linear", 7, 3, 16, 32)
    misread = Pages(data=s.parts["packed"], scale=s.parts["scale"], order="token_quad", dim=32)
    with pytest.raises(OpRefused, match=r"argument 'k scales'.*expected torch.uint8 of shape \[7, 3, 4, 2, 4\]"):
        misread.check("k", 3, 16)
