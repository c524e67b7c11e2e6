"""Products of many tokens with stored weights, on tiles, and the grouped experts on them.

The bound is derived: a sum of K float32 products in any order is within `2 sqrt(K) u` of the sum of their magnitudes,
with u = 2^-24, for the random data of these tests.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch

from m31.formats.arithmetic import NAMED
from m31.graph import StepClass
from m31.sdk import this_machine
from m31_cpu.binding import Binding
from m31_cpu.codecs import CODECS, DAMAGED, TABLE_ROW
from m31_cpu.crew import Crew
from m31_cpu.isa import ALL, Isa, choose, portable
from m31_cpu.kernels.grouped import Given, Room, down_native, experts_works, gate_up_native
from m31_cpu.kernels.many import linear_bytes, linear_works, multiply_native, pack_native
from m31_cpu.kernels.tiled import SEGMENT, tiling
from m31_cpu.native import Library, Native, module_of, optimised
from m31_cpu.program import Runner, Sizes

ROUNDOFF = 2.0**-24
NATIVE = choose(this_machine().cpu.flags, {})[0]
ISAS = {isa.name: isa for isa in (NATIVE, choose(this_machine().cpu.flags, {"M31_CPU_ISA": "portable"})[0])}
ATTRS = {"alpha": 1.25, "beta": 0.5, "limit": 3.0, "routed_scaling_factor": 0.75}
STEP = StepClass(kind="mixed", q_len=0, tokens=1, seqs=1, rows=1, pages=1)


@cache
def binding(isa: str, threads: int = 2) -> Binding:
    """Where kernels run."""
    return Binding(STEP, ISAS[isa], Runner(Crew(threads, Library(ISAS[isa]))), "", NAMED["exact"])


class Walled:
    """Memory between pages that nobody may touch: what is put in begins behind the first or ends before the second."""

    def __init__(self) -> None:
        self._maps: list[Any] = []

    def __call__(self, value: torch.Tensor, front: bool) -> torch.Tensor:
        """A copy there."""
        raw = value.contiguous().view(torch.uint8).flatten()
        size = -(-max(len(raw), 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        pages = mmap.mmap(-1, size + 2 * mmap.PAGESIZE)
        whole = torch.frombuffer(pages, dtype=torch.uint8)
        begin = mmap.PAGESIZE if front else mmap.PAGESIZE + size - len(raw)
        whole[begin : begin + len(raw)] = raw
        libc = ctypes.CDLL(None, use_errno=True)
        for page in (whole.data_ptr(), whole.data_ptr() + size + mmap.PAGESIZE):
            assert libc.mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, 0) == 0
        self._maps.append((pages, whole))
        return whole[begin : begin + len(raw)].view(value.dtype).reshape(value.shape)


@dataclass
class Stored:
    """A matrix as a checkpoint stores it, and its values in float64 before the global scale."""

    name: str
    codes: torch.Tensor
    scales: torch.Tensor | None
    values: torch.Tensor
    divisor: float = 1.0

    @property
    def decoded(self) -> torch.Tensor:
        """What it stands for."""
        return self.values / self.divisor


def stored(name: str, rows: int, columns: int, seed: int) -> Stored:
    """A random one; its numbers are of the size of 1 / sqrt(columns)."""
    rng = torch.Generator().manual_seed(seed)
    if name in ("bfloat16", "float32"):
        value = torch.randn(rows, columns, generator=rng) / columns**0.5
        codes = value.to(getattr(torch, name))
        return Stored(name, codes, None, codes.double())
    if name == "mxfp8":
        codes = torch.randint(0, 256, (rows, columns), generator=rng, dtype=torch.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0x35
        scales = torch.randint(112, 120, (rows, columns // 32), generator=rng, dtype=torch.uint8)
        each = torch.exp2(scales.double() - 127).repeat_interleave(32, 1)
        return Stored(name, codes, scales, codes.view(torch.float8_e4m3fn).double() * each / 1.0)
    codes = torch.randint(0, 256, (rows, columns // 2), generator=rng, dtype=torch.uint8)
    scales = torch.randint(0, 0x7F, (rows, columns // 16), generator=rng, dtype=torch.uint8)
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    value = torch.stack((e2m1[(codes & 15).long()], e2m1[(codes >> 4).long()]), -1).reshape(rows, columns)
    each = scales.view(torch.float8_e4m3fn).double().repeat_interleave(16, 1)
    return Stored(name, codes, scales, value * each, 311.0 * columns**0.5)


@dataclass
class Listed:
    """A table of matrices, as handles have it."""

    table: Any
    flags: Any
    held: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, matrices: Sequence[Stored], isa: Isa) -> Listed:
        """Where they lie now."""
        table = np.zeros((len(matrices), TABLE_ROW // 8), np.int64)
        flags = np.zeros(len(matrices), np.int64)
        for at, m in enumerate(matrices):
            table[at, :2] = m.codes.data_ptr(), m.codes.stride(0) * m.codes.element_size()
            if m.scales is not None:
                table[at, 2:4] = m.scales.data_ptr(), m.scales.stride(0)
            table[at, 4:5].view(np.float32)[0] = np.float32(2.0 ** CODECS[m.name].shift(isa) / m.divisor)
            table[at, 5] = flags[at:].ctypes.data
        return cls(table, flags, list(matrices))


def multiply(at: Binding, x: torch.Tensor, w: Stored, y: torch.Tensor | None = None, used: int | None = None) -> Any:
    """(y, flag) of y = x W^T; outputs and workspace start as NaN."""
    listed = Listed.of([w], at.isa)
    out = torch.full((len(x), len(w.codes)), float("nan")) if y is None else y
    codec, sizes = CODECS[w.name], Sizes()
    sizes.set({"T": len(x) if used is None else used})
    room = torch.full((linear_bytes(at, codec, *x.shape) + 64,), 255, dtype=torch.uint8)
    base = -(-room.data_ptr() // 64) * 64
    held = (sizes, room, listed)
    works = linear_works(at, codec, x, out, listed.table.ctypes.data, sizes.at("T"), base, held)
    at.runner.crew.run(at.runner.program(works))
    return out, int(listed.flags[0])


def inputs(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Random float32."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def rounded(x: torch.Tensor, isa: Isa, codec: str) -> torch.Tensor:
    """Inputs as tiles hold them."""
    pairs = tiling(isa, exact=CODECS[codec].exact).pairs
    return (x.bfloat16() if pairs else x).double()


SHAPES = [(17, 7, 64), (31, 97, 96), (128, 130, 544), (513, 25, 288), (9, 13, 1312), (1, 200, 32), (16, 96, 256)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", CODECS)
def test_products_are_within_the_bound(isa: str, name: str) -> None:
    """Whatever the rows and tokens beside whole blocks."""
    ragged = [(t, n, k - 31) for t, n, k in SHAPES] if name in ("bfloat16", "float32") else []
    for seed, (tokens, outputs, columns) in enumerate(SHAPES + ragged):
        x, w = inputs(tokens, columns, seed), stored(name, outputs, columns, seed)
        y, flag = multiply(binding(isa), x, w)
        given = rounded(x, ISAS[isa], name)
        want, size = given @ w.decoded.T, given.abs() @ w.decoded.abs().T
        assert flag == 0
        assert ((y.double() - want).abs() <= 2 * columns**0.5 * ROUNDOFF * size + 2 * ROUNDOFF * want.abs()).all()


@pytest.mark.parametrize("isa", ISAS)
def test_a_token_gets_the_same_in_any_company_and_with_any_threads(isa: str) -> None:
    """In a segment with others, at the end of one, alone; by one thread or three."""
    x, w = inputs(SEGMENT + 5, 528, 1), stored("nvfp4", 150, 528, 1)
    whole, _ = multiply(binding(isa, 1), x, w)
    assert torch.equal(multiply(binding(isa, 3), x, w)[0], whole)
    for rows in (slice(0, 1), slice(7, 40), slice(3, 203)):
        assert torch.equal(multiply(binding(isa, 3), x[rows].contiguous(), w)[0], whole[rows])


@pytest.mark.parametrize("isa", ISAS)
def test_only_the_rows_in_use_are_written(isa: str) -> None:
    """A buffer has room for more tokens than a step brings."""
    x, w = inputs(40, 64, 2), stored("bfloat16", 20, 64, 2)
    y, _ = multiply(binding(isa), x, w, used=19)
    assert y[:19].isfinite().all()
    assert y[19:].isnan().all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", CODECS)
def test_nothing_beside_the_buffers_is_touched(isa: str, name: str) -> None:
    """Every buffer lies between pages without access; reading or writing past it would end this process."""
    walled, at = Walled(), binding(isa)
    for front in (False, True):
        for tokens, outputs, columns in ((19, 13, 96), (3, 101, 320)):
            x, w = inputs(tokens, columns, 3), stored(name, outputs, columns, 3)
            want, _ = multiply(at, x, w)
            w.codes = walled(w.codes, front)
            w.scales = None if w.scales is None else walled(w.scales, front)
            y = walled(torch.full((tokens, outputs), float("nan")), front)
            got, _ = multiply(at, walled(x, front), w, y)
            assert torch.equal(got, want)


DAMAGE = {
    "nvfp4": [("scales", 0x7F), ("scales", 0x80)],
    "mxfp8": [("codes", 0x7F), ("codes", 0xFF), ("scales", 0xFF)],
    "bfloat16": [("codes", float("inf")), ("codes", float("nan"))],
    "float32": [("codes", float("-inf"))],
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", CODECS)
def test_damage_is_noted_wherever_it_is(isa: str, name: str) -> None:
    """In the first number of a matrix and in its last."""
    for part, value in DAMAGE[name]:
        for place in ((0, 0), (-1, -1)):
            w = stored(name, 30, 288, 4)
            getattr(w, part)[place] = value
            assert multiply(binding(isa), inputs(20, 288, 4), w)[1] == DAMAGED


# --- experts ---


def experts(
    at: Binding, h: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, matrices: Sequence[Stored]
) -> tuple[torch.Tensor, int, Any]:
    """(y, unknown ids, flags) of `experts`; workspace and output start as NaN."""
    listed, y = Listed.of(matrices, at.isa), torch.full_like(h, float("nan"))
    codecs = CODECS[matrices[0].name], CODECS[matrices[2].name]
    tiles = tuple(tiling(at.isa, exact=codec.exact) for codec in codecs)
    room = Room(*tiles, ids.numel(), len(matrices) // 3, h.shape[1], len(matrices[0].codes), at.threads)
    space = torch.full((room.bytes + 64,), 255, dtype=torch.uint8)
    base, sizes, bad = -(-space.data_ptr() // 64) * 64, Sizes(), ctypes.c_int64(0)
    sizes.set({"T": len(h)})
    held = (space, sizes, bad, listed)
    table, flag = listed.table.ctypes.data, ctypes.addressof(bad)
    given = Given(h, ids, weights, y)
    works = experts_works(room, codecs, given, ATTRS, table, sizes.at("T"), base, flag, held)
    at.runner.crew.run(at.runner.program(works))
    return y, bad.value, listed.flags


def wanted(h: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, matrices: Sequence[Stored]) -> torch.Tensor:
    """The definition in float64 (MODEL.md §2.5)."""
    out = torch.zeros_like(h, dtype=torch.float64)
    for e in range(len(matrices) // 3):
        w1, w3, w2 = (m.decoded for m in matrices[3 * e : 3 * e + 3])
        gate = (h.double() @ w1.T).clamp(max=ATTRS["limit"])
        up = (h.double() @ w3.T).clamp(-ATTRS["limit"], ATTRS["limit"])
        act = (up + ATTRS["beta"]) * gate * torch.sigmoid(ATTRS["alpha"] * gate)
        share = ((ids == e) * weights.double()).sum(1, keepdim=True)
        out += ATTRS["routed_scaling_factor"] * share * (act @ w2.T)
    return out


def layer(count: int, width: int, inner: int, names: tuple[str, str]) -> list[Stored]:
    """w1, w3 and w2 of experts."""
    shapes = ((names[0], inner, width), (names[0], inner, width), (names[1], width, inner))
    return [stored(n, rows, columns, 10 * e + i) for e in range(count) for i, (n, rows, columns) in enumerate(shapes)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "names", [("nvfp4", "nvfp4"), ("nvfp4", "mxfp8"), ("bfloat16", "float32"), ("float32", "bfloat16")]
)
def test_experts_are_within_the_bound(isa: str, names: tuple[str, str]) -> None:
    """Many tokens of an expert, all, one, none; more than a segment; a choice made twice."""
    rng = torch.Generator().manual_seed(5)
    for tokens, count, topk, width, inner in ((0, 3, 2, 32, 64), (37, 6, 2, 96, 160), (SEGMENT + 60, 4, 1, 64, 32)):
        matrices = layer(count, width, inner, names)
        h = torch.randn(tokens, width, generator=rng)
        ids = torch.randint(0, count - 1, (tokens, topk), generator=rng)  # the last one gets none
        if topk == 1:
            ids[:] = 2
            ids[7] = 0
        weights = torch.rand(tokens, topk, generator=rng)
        y, unknown, flags = experts(binding(isa), h, ids, weights, matrices)
        assert unknown == 0
        assert not flags.any()
        close = 2e-5 if not tiling(ISAS[isa]).pairs else 3e-2
        assert y.isfinite().all()
        assert ((y.double() - wanted(h, ids, weights, matrices)).abs() <= close).all()


@pytest.mark.parametrize("isa", ISAS)
def test_what_experts_give_a_token_depends_on_it_alone(isa: str) -> None:
    """Not on other tokens, nor on the number of threads."""
    matrices = layer(5, 64, 96, ("nvfp4", "nvfp4"))
    rng = torch.Generator().manual_seed(6)
    h, weights = torch.randn(90, 64, generator=rng), torch.rand(90, 2, generator=rng)
    ids = torch.stack([torch.randperm(5, generator=rng)[:2] for _ in range(90)])
    whole, _, _ = experts(binding(isa, 1), h, ids, weights, matrices)
    assert torch.equal(experts(binding(isa, 3), h, ids, weights, matrices)[0], whole)
    some = slice(11, 31)
    part = experts(binding(isa, 3), h[some].clone(), ids[some].clone(), weights[some].clone(), matrices)[0]
    assert torch.equal(part, whole[some])


@pytest.mark.parametrize("isa", ISAS)
def test_experts_touch_nothing_beside_their_buffers(isa: str) -> None:
    """Every buffer between pages without access."""
    walled, matrices = Walled(), layer(3, 32, 48, ("nvfp4", "nvfp4"))
    rng = torch.Generator().manual_seed(7)
    h, weights = torch.randn(21, 32, generator=rng), torch.rand(21, 2, generator=rng)
    ids = torch.stack([torch.randperm(3, generator=rng)[:2] for _ in range(21)])
    want, _, _ = experts(binding(isa), h, ids, weights, matrices)
    for front in (False, True):
        for m in matrices:
            assert m.scales is not None
            m.codes, m.scales = walled(m.codes, front), walled(m.scales, front)
        got, _, _ = experts(binding(isa), *(walled(x, front) for x in (h, ids, weights)), matrices)
        assert torch.equal(got, want)


@pytest.mark.parametrize("isa", ISAS)
def test_unknown_experts_are_counted_and_damaged_ones_noted_where_they_are_used(isa: str) -> None:
    """Ids out of range reach no weight; an expert that nobody chose is not looked at."""
    matrices = layer(4, 32, 32, ("nvfp4", "nvfp4"))
    for e in (1, 3):
        assert matrices[3 * e + 2].scales is not None
        matrices[3 * e + 2].scales[-1, -1] = 0x7F  # type: ignore[index]
    h, ids = torch.ones(20, 32), torch.zeros(20, 2, dtype=torch.int64)
    ids[4, 1], ids[5, 0], ids[6, 0] = -1, 4, 1
    _, unknown, flags = experts(binding(isa), h, ids, torch.ones(20, 2), matrices)
    assert unknown == 2
    assert flags.nonzero()[0].tolist() == [5]


# --- what is compiled ---


def assembly(native: Native, isa: Isa) -> str:
    """For a processor that this one need not be."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    triple = "aarch64-unknown-linux-gnu" if isa.machine == "aarch64" else "x86_64-unknown-linux-gnu"
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=isa.cpu, features=isa.features, opt=2, reloc="pic", codemodel="default"
    )
    module = module_of(native.name, lambda m, i: native.write(m, i), isa, triple)
    return str(machine.emit_assembly(optimised(module, machine)))


WANTED = {"avx512": "vdpbf16ps", "avx2": "vfmadd", "neon": "fmla", "portable": "mulps"}


@pytest.mark.parametrize("isa", [isa.name for isa in ALL])
def test_tiles_compile_to_what_the_processor_multiplies_with(isa: str) -> None:
    """Register blocks use its instruction for each of their sums, and nothing is left to a run-time library."""
    found = portable("x86_64") if isa == "portable" else next(i for i in ALL if i.name == isa)
    t, codec = tiling(found), CODECS["nvfp4"]
    sums = t.full.rows * t.full.vectors
    for native in (multiply_native(codec), gate_up_native(codec, False), down_native(codec), pack_native(False)):
        text = assembly(native, found)
        lines = [line.split() for line in text.splitlines() if line.startswith("\t")]
        calls = {words[1].split("@")[0] for words in lines if words[0] in ("call", "callq", "bl")}
        assert calls <= {"memset", "memcpy"}
        blocks = [block.splitlines() for block in re.split(r"^\.LBB.*", text, flags=re.MULTILINE)]
        inner = [b for b in blocks if sum(WANTED[isa] in line for line in b) >= sums]
        assert len(inner) >= (0 if native.name == pack_native(False).name else 2)
        spills = re.compile(r"[xyz]mm.*rsp|rsp.*[xyz]mm|\bq\d+.*\bsp\b")
        for block in inner if isa != "portable" else ():
            # Sums stay in registers; a vector of tokens may be put aside once.
            assert sum(bool(spills.search(line)) for line in block) <= 2
