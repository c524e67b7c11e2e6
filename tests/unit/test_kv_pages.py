"""Page formats of the reference one by one: bytes, round trips, orders, export and import, poison."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import numerics, tiny
from tests.unit.sdk_fakes import shipped_manifest

from m31 import config
from m31.errors import BackendRefused, LayoutMismatch
from m31.formats import fp8, int8, layout, nvfp4
from m31.formats.layout import ScaleOrder
from m31.sdk.backend import KVSpec, Limits
from m31_reference.cache import PagedCache, PagedLayout
from m31_reference.codecs import Fp8, Nvfp4
from m31_reference.session import ReferenceBackend

CPU = torch.device("cpu")
KV = ["float64", "float32", "bfloat16", "fp8", "nvfp4"]
INDEX = [*KV, "int8"]
# Two heads of 32, pages of 8 tokens, the second layer dense
SPEC = KVSpec(
    indexed=(True, False),
    kv_heads=2,
    head_dim=32,
    index_dim=48,
    page_tokens=8,
    kv_format="float32",
    index_format="float32",
)


def spec(kv: str, index: str, order: ScaleOrder = "linear") -> KVSpec:
    return dataclasses.replace(SPEC, kv_format=kv, index_format=index, v_scale_order=order)


def cache(kv: str, index: str, order: ScaleOrder = "linear", pages: int = 5) -> PagedCache:
    made = PagedLayout(spec(kv, index, order), CPU, read="exact").allocate(pages)
    made.poison(range(pages))
    return made


def vectors(n: int, heads: int, dim: int, seed: int = 0) -> torch.Tensor:
    """BF16 values over a wide range of magnitudes, with zero groups, and a group that only subnormal scales hold."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, heads, dim, generator=rng) * torch.exp(3 * torch.randn(n, heads, 1, generator=rng))
    x[0, 0, :16] = 0
    x[-1, -1, -16:] *= 1e-3
    return x.bfloat16().float()


def fill(made: PagedCache, slots: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Write vectors to slots of layer 0; what was given."""
    at = torch.tensor(slots)
    page, offset = at // SPEC.page_tokens, at % SPEC.page_tokens
    given = {
        "k": vectors(len(slots), 2, 32, seed),
        "v": vectors(len(slots), 2, 32, seed + 1),
        "index": vectors(len(slots), 1, 48, seed + 2),
    }
    for kind, x in given.items():
        store = getattr(made, kind)[0]
        store.write(page, offset, x)
    return given


def expected(name: str, x: torch.Tensor) -> torch.Tensor:
    """What `m31.formats` makes of the values."""
    if name == "fp8":
        return fp8.decode(fp8.encode(x))
    if name == "nvfp4":
        return nvfp4.decode_kv(*nvfp4.encode_kv(x))
    if name == "int8":
        return int8.decode(*int8.encode(x))
    return x.to(getattr(torch, name))


@pytest.mark.parametrize(
    ("kv", "index", "total"),
    [
        ("nvfp4", "nvfp4", 38_880),
        ("nvfp4", "bfloat16", 49_920),
        ("nvfp4", "fp8", 42_240),
        ("fp8", "fp8", 69_120),
        ("fp8", "bfloat16", 76_800),
        ("bfloat16", "bfloat16", 138_240),
    ],
)
def test_bytes_per_token_of_the_published_model(kv: Any, index: Any, total: int) -> None:
    """MODEL.md §3.3, to the digit; K and V alone are 34,560 and 61,440. A page is 128 tokens."""
    text = config.parse(config.published("m3.1-flash"), where="published").text
    of = KVSpec.of(text, kv, index)
    assert of.main_bytes == {"nvfp4": 34_560, "fp8": 61_440, "bfloat16": 122_880}[kv]
    assert of.main_bytes + of.index_bytes == total
    made = PagedLayout(of, CPU, read="exact")
    assert made.page_bytes == 128 * total


@pytest.mark.parametrize("index", INDEX)
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("order", ["linear", "token_quad"])
def test_page_bytes_are_what_is_allocated(kv: str, index: str, order: ScaleOrder) -> None:
    made = cache(kv, index, order, pages=3)
    stored = sum(t.numel() * t.element_size() for _, t in made._parts())
    assert stored == 3 * made.layout.page_bytes


@pytest.mark.parametrize("index", INDEX)
@pytest.mark.parametrize("kv", KV)
def test_what_is_read_is_what_the_format_makes_of_it(kv: str, index: str) -> None:
    """Bit for bit, in pages out of order, in single tokens; the rest of a page stays poisoned."""
    made = cache(kv, index)
    slots = [33, 34, 35, 36, 37, 38, 39, 8, 9, 10]  # most of page 4, then the start of page 1
    given = fill(made, slots)
    for kind, x in given.items():
        want = expected(index if kind == "index" else kv, x)
        for i, slot in enumerate(slots):
            got = made.read(0, slot // 8)[kind]
            assert torch.equal(
                got[slot % 8] if kind == "index" else got[:, slot % 8], want[i, 0] if kind == "index" else want[i]
            )
    for page, used in ((4, {1, 2, 3, 4, 5, 6, 7}), (1, {0, 1, 2}), (0, set())):
        for kind, values in made.read(0, page).items():
            nan = values.isnan().all(-1)
            for offset in range(8):
                assert bool(nan[..., offset].all()) == (offset not in used), (kind, page, offset)


@pytest.mark.parametrize("name", ["bfloat16", "fp8", "nvfp4", "int8"])
def test_the_formats_agree_with_tables(name: str) -> None:
    """The quantisers of the naive model were written from MODEL.md without m31.formats."""
    x = vectors(40, 2, 48, seed=5)
    got = expected(name, x).double().numpy()
    want = numerics.STORED[name](x.numpy())
    if name == "int8":  # codes times scale: float32 rounds the product
        np.testing.assert_allclose(got, want, rtol=1e-7, atol=0)
    else:
        np.testing.assert_array_equal(np.abs(got), np.abs(want))
        np.testing.assert_array_equal(got, want)


def test_fp8_pages_saturate_at_unit_scale() -> None:
    """MODEL.md §3.5, BUG-8: there is no scale that a reader could forget, and nothing overflows to NaN."""
    made = cache("fp8", "fp8")
    x = torch.tensor([1e5, -1e5, 448.0, 449.0, 0.001, 1.0] + [0.0] * 26).expand(1, 2, 32)
    made.k[0].write(torch.tensor([0]), torch.tensor([3]), x)
    assert made.read(0, 0)["k"][1, 3, :4].tolist() == [448.0, -448.0, 448.0, 448.0]
    assert made.read(0, 0)["k"][1, 3, 5] == 1.0


@pytest.mark.parametrize("kind", ["k", "v"])
def test_scale_orders(kind: str) -> None:
    """MODEL.md §3.4: token-quad for V only, (token // 4) * 32 + group * 4 + token % 4 in a page of eight groups."""
    geometry = dataclasses.replace(SPEC, head_dim=128, page_tokens=128, kv_format="nvfp4", index_format="nvfp4")
    x = vectors(128, 2, 128)
    _, scale = nvfp4.encode_kv(x)
    bytes_ = {}
    for order in ("linear", "token_quad"):
        made = PagedLayout(dataclasses.replace(geometry, v_scale_order=order), CPU, read="exact").allocate(2)
        store = getattr(made, kind)[0]
        store.write(torch.ones(128, dtype=torch.int64), torch.arange(128), x)
        bytes_[order] = store.parts["scale"][1].reshape(2, -1)
        assert torch.equal(made.read(0, 1)[kind], nvfp4.decode_kv(*nvfp4.encode_kv(x)).transpose(0, 1))
    per_head = scale.view(torch.uint8).transpose(0, 1)  # [heads, token, group]
    assert torch.equal(bytes_["linear"], per_head.flatten(1))
    assert torch.equal(bytes_["linear"], layout.linear(per_head))
    want = layout.token_quad(per_head) if kind == "v" else per_head.flatten(1)
    assert torch.equal(bytes_["token_quad"], want)
    assert bytes_["token_quad"][1, (77 // 4) * 32 + 5 * 4 + 77 % 4] == per_head[1, 77, 5] or kind == "k"


@pytest.mark.parametrize("read", ["exact", "e4m3", "e4m3-shift3"])
def test_the_fast_decoder_is_the_format(read: str) -> None:
    """All 256 bytes under all 256 scales, NaN included: what kernels read equals `m31.formats`, bit for bit."""
    packed = torch.arange(256, dtype=torch.uint8).view(1, 32, 8).expand(256, 32, 8)
    scale = torch.arange(256, dtype=torch.uint8).view(256, 1, 1).expand(256, 32, 1).contiguous()
    got = Nvfp4("linear", read).decode({"packed": packed, "scale": scale}, torch.float32)
    stored = packed, scale.view(torch.float8_e4m3fn)
    shift = 3 if read == "e4m3-shift3" else 0
    want = nvfp4.decode_kv(*stored) if read == "exact" else nvfp4.decode_kv_e4m3(*stored, scale_shift=shift)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num().view(torch.int32), want.nan_to_num().view(torch.int32))
    codes = torch.arange(256, dtype=torch.uint8).view(1, 8, 32)
    values = Fp8().decode({"codes": codes}, torch.float32)
    assert torch.equal(values.view(torch.int32), fp8.decode(codes).view(torch.int32))


def test_golden_kv_vector() -> None:
    """MODEL.md §3.4: scale byte 0x28, payload 7F 66 45 23 A0 CB ED FE."""
    made = cache("nvfp4", "nvfp4")
    x = torch.tensor([((29 * i) % 31 - 15) / 10 for i in range(16)]).bfloat16().float().repeat(2).expand(1, 2, 32)
    made.v[0].write(torch.tensor([2]), torch.tensor([1]), x)
    assert made.v[0].parts["scale"][2, 0, 1].tolist() == [0x28, 0x28]
    assert bytes(made.v[0].parts["packed"][2, 1, 1, :8].tolist()).hex(" ") == "7f 66 45 23 a0 cb ed fe"


@pytest.mark.parametrize("index", INDEX)
@pytest.mark.parametrize("kv", KV)
def test_poison_copy_export_import(kv: str, index: str) -> None:
    made = cache(kv, index)
    fill(made, list(range(8, 24)))
    made.copy_pages([1, 2], [4, 0])
    for source, target in ((1, 4), (2, 0)):
        for kind, values in made.read(0, source).items():
            assert torch.equal(made.read(0, target)[kind], values)
    exported = made.export([2, 1])
    other = cache(kv, index, pages=9)
    other.import_(exported, [3, 8])
    for source, target in ((2, 3), (1, 8)):
        for kind, values in made.read(0, source).items():
            assert torch.equal(other.read(0, target)[kind], values)
            assert not values.isnan().any()
    made.poison([1])
    assert all(values.isnan().all() for values in made.read(0, 1).values())
    for name, values in exported.tensors.items():  # copies, not views of the cache; layer 1 was never written
        assert name.startswith("1.") or torch.equal(values[1], dict(other._parts())[name][8])


def test_every_choice_is_a_layout_of_its_own() -> None:
    ids = {PagedLayout(spec(kv, index), CPU, read="exact").layout_id for kv in KV for index in INDEX}
    assert len(ids) == len(KV) * len(INDEX)
    base = spec("nvfp4", "nvfp4")
    name = PagedLayout(base, CPU, read="exact").layout_id
    changes: list[dict[str, Any]] = [
        {"v_scale_order": "token_quad"},
        {"head_shard": (0, 2)},
        {"head_shard": (1, 2)},
        {"kv_heads": 4},
        {"indexed": (True, True)},
        {"page_tokens": 128},
        {"head_dim": 64},
    ]
    others = [PagedLayout(dataclasses.replace(base, **c), CPU, read="exact").layout_id for c in changes]
    assert len({name, *others}) == len(changes) + 1
    assert PagedLayout(base, CPU, read="e4m3").layout_id == name  # how it is read is not how it is stored
    assert base.name("m31-reference", 3) != name
    assert name == (
        "m31-reference:v2:kv=nvfp4/v-scales-linear:index=nvfp4:heads=2x32,shard0of1:page=8:index_dim=48:layers=1i1-"
    )


def test_import_refuses_other_layouts() -> None:
    """BUG-71: pages of another order, or of a version nobody knows, are refused by name and nothing is written."""
    target = cache("nvfp4", "nvfp4")
    before = {name: t.clone() for name, t in target._parts()}
    quad = cache("nvfp4", "nvfp4", "token_quad").export([0])
    with pytest.raises(
        LayoutMismatch, match=r"KV import: pages have the layout '.*v-scales-token_quad.*expected '.*linear"
    ):
        target.import_(quad, [1])
    unknown = dataclasses.replace(target.export([0]), layout_id="somebody-else:v7")
    with pytest.raises(LayoutMismatch, match=r"layout 'somebody-else:v7'; .*pages are not converted"):
        target.import_(unknown, [1])
    good = target.export([0, 1])
    with pytest.raises(LayoutMismatch, match="2 pages for 1 different places"):
        target.import_(good, [1])
    with pytest.raises(LayoutMismatch, match="2 pages for 1 different places"):
        target.import_(good, [1, 1])
    lying = dataclasses.replace(
        good, tensors={k: v[..., :1] if k == "1.v.scale" else v for k, v in good.tensors.items()}
    )
    with pytest.raises(LayoutMismatch, match=r"component '1\.v\.scale' is .*not what their layout id says"):
        target.import_(lying, [1, 2])
    short = dataclasses.replace(good, tensors={k: v for k, v in good.tensors.items() if k != "0.k.packed"})
    with pytest.raises(LayoutMismatch, match=r"component '0\.k\.packed' is absent"):
        target.import_(short, [1, 2])
    assert all(torch.equal(t, before[name]) for name, t in target._parts())


def test_geometry_that_a_format_cannot_hold_is_refused() -> None:
    odd = dataclasses.replace(SPEC, head_dim=24, kv_format="nvfp4")
    with pytest.raises(
        BackendRefused, match=r"vectors of 24 elements cannot be stored as NVFP4; expected a multiple of 16"
    ):
        PagedLayout(odd, CPU, read="exact").allocate(1)
    ragged = dataclasses.replace(SPEC, page_tokens=6, kv_format="nvfp4", v_scale_order="token_quad")
    with pytest.raises(BackendRefused, match="pages of 6 tokens have no token-quad order"):
        PagedLayout(ragged, CPU, read="exact").allocate(1)
    with pytest.raises(BackendRefused, match="K and V cannot be stored as int8"):
        PagedLayout(spec("int8", "int8"), CPU, read="exact")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["nvfp4", "int8", "bfloat16"])
def test_what_is_not_finite_stays_visible(name: str, bad: float) -> None:
    """A step that went wrong is noticed at its logits; the writer does not hide it."""
    made = cache("nvfp4" if name == "int8" else name, name)
    x = vectors(1, 1, 48)
    x[0, 0, 20] = bad
    made.index[0].write(torch.tensor([0]), torch.tensor([0]), x)  # type: ignore[union-attr]
    assert not made.read(0, 0)["index"][0].isfinite().all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_manifest_and_the_session_name_the_same_formats(dtype: str) -> None:
    """The first is the default: the compute dtype on the reference."""
    session = ReferenceBackend(None).open(device=None, dtype=dtype, rank=0, world=1)  # type: ignore[arg-type]
    model = config.parse(config.published("m3.1-flash"), where="published")
    declared = Limits.declared(shipped_manifest("reference"), model)
    limits, manifest = session.limits(model, declared), shipped_manifest("reference").formats
    assert limits.within(declared)
    assert limits.kv_formats[0] == limits.index_formats[0] == dtype
    assert set(limits.kv_formats) == set(manifest.kv)
    assert set(limits.index_formats) == set(manifest.index)
    if dtype == "float32":
        assert (limits.kv_formats, limits.index_formats) == (manifest.kv, manifest.index)


@pytest.mark.parametrize("kv", ["float32", "nvfp4", "fp8"])
def test_readers_decode_only_the_pages_that_they_need(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding the whole cache for every step would cost with the pool's size, not with the context."""
    from m31_reference.cache import Store

    decoded: list[int] = []
    real = Store.rows, Store.head

    def rows(self: Store, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        decoded.append(len(rows) // self.heads)
        return real[0](self, rows, dtype)

    def head(self: Store, ids: list[int], head: int, dtype: torch.dtype) -> torch.Tensor:
        decoded.append(len(ids))
        return real[1](self, ids, head, dtype)

    monkeypatch.setattr(Store, "rows", rows)
    monkeypatch.setattr(Store, "head", head)
    description = tiny.quantisable()
    values = tiny.weights(tiny.trace(description), seed=0)
    engine = tiny.engine(description, values, dtype="float32", kv=kv, index=kv, pages=500)
    from tests.unit.test_whole_model import greedy

    greedy(engine, [list(range(3, 23))], 3)
    assert decoded
    assert max(decoded) <= 6  # 22 tokens are six pages
