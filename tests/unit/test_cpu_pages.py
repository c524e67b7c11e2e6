"""Pages of the CPU backend: byte orders, what its kernels write into them, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.support.cpu_pages import guard, run, session, write

from m31 import config, ops
from m31.conformance.pages import check_layout_id
from m31.errors import BackendRefused
from m31.formats import fp8, int8, nvfp4
from m31.sdk.backend import KVSpec
from m31_cpu.pages import INDEX, KEYS, CpuCache, CpuLayout, reserve

SPEC = KVSpec(
    indexed=(True, False),
    kv_heads=2,
    head_dim=32,
    index_dim=48,
    page_tokens=8,
    kv_format="float32",
    index_format="float32",
)
FORMS = [(kv, kv) for kv in KEYS] + [("nvfp4", "int8")]
ISAS = ["avx2", "portable"]


def spec(kv: str, index: str, **changes: Any) -> KVSpec:
    return dataclasses.replace(SPEC, kv_format=kv, index_format=index, **changes)


def cache(kv: str, index: str, pages: int = 5, **changes: Any) -> CpuCache:
    made = CpuLayout(spec(kv, index, **changes)).allocate(pages)
    made.poison(range(pages))
    return made


def vectors(n: int, heads: int, dim: int, seed: int = 0) -> torch.Tensor:
    """BF16 values over a wide range of magnitudes, with zero groups, and a group that only subnormal scales hold."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, heads, dim, generator=rng) * torch.exp(3 * torch.randn(n, heads, 1, generator=rng))
    x[0, 0, :16] = 0
    x[-1, -1, -16:] *= 1e-3
    return x.bfloat16().float()


def odd(n: int, heads: int, dim: int) -> torch.Tensor:
    """Zeros of both signs, subnormals, numbers beyond every format, what lies between two codes, NaN and infinity."""
    x = vectors(n, heads, dim, seed=9)
    x[0], x[1], x[2] = 0.0, -0.0, 1e-41
    x[3] *= 1e30
    x[4] = torch.arange(dim) * 0.125 - 2
    x[5] = torch.arange(dim).float() + 440
    x[6, :, 3], x[7, :, 5], x[8, :, 2] = torch.nan, torch.inf, -torch.inf
    x[9] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).repeat(dim // 8)
    return x.bfloat16().float()


def expected(name: str, x: torch.Tensor) -> torch.Tensor:
    if name == "fp8":
        return fp8.decode(fp8.encode(x))
    if name == "nvfp4":
        return nvfp4.decode_kv(*nvfp4.encode_kv(x))
    if name == "int8":
        return int8.decode(*int8.encode(x))
    return x.to(getattr(torch, name))


# --- orders of bytes ---


@pytest.mark.parametrize("page", [4, 5, 20, 128])
@pytest.mark.parametrize("form", INDEX)
def test_what_is_read_is_what_the_format_makes_of_it(form: str, page: int) -> None:
    """In any tokens of any pages; the rest stays poisoned. Whole layouts keep the rules of the suite."""
    made = cache("bfloat16" if form == "int8" else form, form, page_tokens=page)
    check_layout_id(made.layout, layers=2)
    slots = torch.randperm(5 * page, generator=torch.Generator().manual_seed(page))[: 2 * page]
    for store in (made.k[0], made.v[0], made.index[0]):
        assert store is not None
        x = vectors(len(slots), store.heads, store.dim)
        write(store, slots // page, slots % page, x)
        want = torch.full((5, store.heads, page, store.dim), torch.nan, dtype=store.form.storage)
        want[slots // page, :, slots % page] = expected(store.form.name, x).to(want.dtype)
        got = torch.stack([store.read(at) for at in range(5)]).view(want.shape)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("form", KEYS)
def test_keys_lie_in_lanes_and_values_do_not(form: str) -> None:
    """Token 21 of head 1, as the table of the module says where its channels are."""
    made = cache(form, "int8", page_tokens=32)
    x = vectors(1, 2, 32, seed=4)
    for store in (made.k[0], made.v[0]):
        write(store, torch.tensor([3]), torch.tensor([21]), x)
    k, v = made.k[0].parts, made.v[0].parts
    if form == "bfloat16":
        number = x.bfloat16().view(torch.int16)[0, 1]
        assert k["values"][3, 1, 21 // 16, 5, 21 % 16].tolist() == number[10:12].tolist()
        assert v["values"][3, 1, 21 // 2, 7, 21 % 2] == number[7]
    elif form == "nvfp4":
        codes, scale = nvfp4.encode_kv(x)
        assert k["codes"][3, 1, 1, 5, 5] == codes[0, 1, 5]
        assert k["scale"][3, 1, 1, 1, 5] == scale.view(torch.uint8)[0, 1, 1]
        assert torch.equal(v["codes"][3, 1, 21], codes[0, 1])
        assert torch.equal(v["scale"][3, 1, 21], scale.view(torch.uint8)[0, 1])
    else:
        name, number = ("values", x[0, 1]) if form == "float32" else ("codes", fp8.encode(x).view(torch.uint8)[0, 1])
        assert torch.equal(k[name][3, 1, 1, :, 5], number)
        assert torch.equal(v[name][3, 1, 21], number)


def test_lanes_without_a_token_are_zero() -> None:
    made = cache("bfloat16", "int8", page_tokens=5)
    assert not made.k[0].parts["values"][..., 5:, :].any()
    assert not made.v[0].parts["values"][:, :, -1, :, 1].any()
    index = made.index[0]
    assert index is not None
    assert not index.parts["codes"][..., 5:, :].any()


@pytest.mark.parametrize(
    ("kv", "index", "total"),
    [("nvfp4", "nvfp4", 38_880), ("nvfp4", "bfloat16", 49_920), ("fp8", "fp8", 69_120), ("bfloat16", "int8", 130_800)],
)
def test_bytes_per_token_of_the_published_model(kv: Any, index: Any, total: int) -> None:
    """MODEL.md §3.3: no order needs more."""
    text = config.parse(config.published("m3.1-flash"), where="published").text
    assert CpuLayout(KVSpec.of(text, kv, index)).page_bytes == 128 * total


@pytest.mark.parametrize(("kv", "index"), FORMS)
def test_page_bytes_are_what_is_allocated(kv: str, index: str) -> None:
    for page in (4, 128):
        made = cache(kv, index, pages=3, page_tokens=page)
        stored = sum(part.numel() * part.element_size() for part in made.components().values())
        assert stored == 3 * made.layout.page_bytes


def test_large_parts_are_aligned_and_start_as_zeros() -> None:
    made = reserve((3, 1 << 20), torch.int16)
    assert made.data_ptr() % (1 << 21) == 0
    assert not made.any()
    made[2] = 5
    assert made.sum() == 5 << 20


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kv_format": "float64"}, "K and V cannot be stored as float64"),
        ({"kv_format": "int8"}, "K and V cannot be stored as int8"),
        ({"head_dim": 24, "kv_format": "nvfp4"}, "vectors of 24 elements cannot be stored as nvfp4.*a multiple of 16"),
        ({"index_dim": 6, "index_format": "int8"}, "vectors of 6 elements cannot be stored as int8"),
        ({"kv_format": "nvfp4", "v_scale_order": "token_quad"}, "V scales in the order 'token_quad'"),
    ],
)
def test_what_pages_do_not_hold(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(BackendRefused, match=text):
        CpuLayout(dataclasses.replace(SPEC, **changes))


# --- what kernels write ---


def _written(made: CpuCache, cpu: Any, slots: torch.Tensor, data: dict[str, torch.Tensor]) -> None:
    spec_ = made.layout.spec  # type: ignore[attr-defined]
    forms = spec_.kv_format, spec_.index_format
    run(cpu, ops.kv_write, {"layer": 0}, (made, data["k"], data["v"].flatten(1), slots), forms)
    run(cpu, ops.index_write, {"layer": 0}, (made, data["index"], slots), forms)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("kv", "index"), FORMS)
def test_kernels_write_what_the_formats_say(kv: str, index: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte of every part, against torch: padding is skipped, no other token changes, nothing behind inputs and
    pages is touched, in any order, in steps of many tokens, and where vectors are odd."""
    cpu = session(monkeypatch, isa)
    for page, n in ((20, 37), (4, 10)):
        sizes = {"page_tokens": page}
        native, plain = guard(cache(kv, index, pages=4, **sizes)), cache(kv, index, pages=4, **sizes)
        order = torch.Generator().manual_seed(n)
        slots = torch.randperm(4 * page, generator=order)[:n] if page == 4 else torch.arange(11, 11 + n)
        slots[n // 2] = -1
        data = {kind: odd(n, heads, dim) for kind, heads, dim in (("k", 2, 32), ("v", 2, 32), ("index", 1, 48))}
        _written(native, cpu, slots, data)
        real = slots >= 0
        at = slots[real] // page, slots[real] % page
        for kind, x in data.items():
            mine, theirs = getattr(native, kind)[0], getattr(plain, kind)[0]
            write(theirs, *at, x[real])
            for name, part in theirs.parts.items():
                got = mine.parts[name]
                if name == "values":  # bits of NaN may differ
                    got, part = (x.view(theirs.form.storage) for x in (got, part))
                torch.testing.assert_close(got, part, rtol=0, atol=0, equal_nan=True, msg=f"{kind}.{name}")


@pytest.mark.parametrize("isa", ISAS)
def test_no_tokens_write_nothing(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, made = session(monkeypatch, isa), guard(cache("nvfp4", "int8"))
    before = {name: part.clone() for name, part in made.components().items()}
    empty = {kind: torch.zeros(0, heads, dim) for kind, heads, dim in (("k", 2, 32), ("v", 2, 32), ("index", 1, 48))}
    _written(made, cpu, torch.zeros(0, dtype=torch.int64), empty)
    _written(made, cpu, torch.full((3,), -1), {k: x.new_ones(3, *x.shape[1:]) for k, x in empty.items()})
    for name, part in made.components().items():
        torch.testing.assert_close(part, before[name], rtol=0, atol=0, equal_nan=True)
