"""LLVM code for dot products with stored weights, read where they lie (MODEL.md §3.2).

A row of weights is cut into chunks of 64 columns. A chunk is decoded into eight vectors of eight float32, exactly. In
NVFP4 two lanes belong to a group of 16, the same in all vectors, so that a scale is applied once to a sum of four
products. Which column lands where is `columns`; inputs are put into that order before they are used. Everything below
works with addresses (int64), and every path through it performs the same operations in the same order for a given row
and token: alone or in company, fused or decoded first.

Two instruction sets: "avx2" looks codes up with byte shuffles; "portable" uses only what LLVM can lower for any
processor. With either, values are decoded exactly and sums are float32. Between input and sum NVFP4 numbers are
2^25 times too large, so inputs may not exceed 2^98 or so: beyond that a finite sum may become infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

Isa = Literal["avx2", "portable"]
Stored = Literal["nvfp4", "bfloat16"]

LANES = 8
VECTORS = 8
CHUNK = LANES * VECTORS
GROUP = 16
MOST_TOKENS = 3  # that a fused product takes at once: as many sums as sixteen registers hold
DECODED_BYTES = {"nvfp4": 4 * (CHUNK + LANES), "bfloat16": 4 * CHUNK}  # of a decoded chunk; nvfp4 with its scales
_AHEAD = 8192  # bytes of weights to ask for early; rows follow each other, so this is the linear order

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32, _HALF, _PTR = ir.FloatType(), ir.HalfType(), ir.PointerType()
_VF, _VI = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_ZERO = ir.Constant(_VF, [0.0] * LANES)
# 2 * E2M1 by code. In the top byte of an integer it is E2M1 * 2^25, which is what decoded vectors hold.
_TABLE = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]
_DIGITS = 0xC8643210  # the same, a hexadecimal digit for each of the first eight
_CODE_EXPONENT = 25
# Scales are decoded as E4M3 * 2^-8: the half-precision number with the same bits.
_SCALE_EXPONENT = -8
# Vectors whose products are summed before they join the total: two short chains of additions instead of a long one.
_SUMS = range(VECTORS // 2), range(VECTORS // 2, VECTORS)


def columns(stored: Stored) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Column within a chunk of each place in its decoded form, [64]."""
    j, lane = np.divmod(np.arange(CHUNK), LANES)
    if stored == "bfloat16":
        return np.asarray(16 * (j // 2) + 2 * lane + j % 2, np.int64)
    return np.asarray(LANES * lane + j, np.int64)


@dataclass(frozen=True)
class Products:
    """Numba intrinsics for one way of storing weights. Each takes one tuple of int64, addresses and counts.

    fused[M-1]((w, s, x_0 .. x_{M-1}, chunks, rest, out)): products of one stored row with M inputs.
    decode((w, s, to, chunks, rest)): one row into decoded chunks.
    tile[M-1]((a, b, x_0 .. x_{M-1}, chunks, out_a, out_b)): products of two decoded rows with M inputs.

    `chunks` are whole chunks, `rest` the columns after them (0, 16, 32 or 48); a tile counts the last one as whole.
    `out` receives M float32. The first two return nonzero if a block scale is NaN or has a sign, or a BF16 weight is
    not finite.
    """

    fused: tuple[Any, ...]
    decode: Any
    tile: tuple[Any, ...]


def products(isa: Isa, stored: Stored) -> Products:
    """The intrinsics of a format; compiled where they are used."""
    counts = range(1, MOST_TOKENS + 1)
    return Products(
        fused=tuple(_intrinsic(_fused(isa, stored, m), m + 5) for m in counts),
        decode=_intrinsic(_decode(isa, stored), 5),
        tile=tuple(_intrinsic(_tile(isa, stored, m), m + 5) for m in counts),
    )


Emit = Callable[[Any, list[Any]], Any]


def _intrinsic(emit: Emit, count: int) -> Any:
    """A numba intrinsic: a tuple of `count` int64 (`arguments` is its type) to an int64."""

    def product(context: Any, arguments: Any) -> Any:
        def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
            return emit(b, [b.extract_value(args[0], i) for i in range(count)])

        return types.int64(arguments), generate

    return intrinsic(product)


# --- pieces of code ---


def _c64(value: int) -> Any:
    return ir.Constant(_I64, value)


def _splat(kind: Any, count: int, value: int) -> Any:
    return ir.Constant(ir.VectorType(kind, count), [value] * count)


def _function(b: Any, name: str, result: Any, given: Sequence[Any]) -> Any:
    known = b.module.globals.get(name)
    return known or ir.Function(b.module, ir.FunctionType(result, given), name)


def _at(b: Any, address: Any, offset: int = 0) -> Any:
    return b.inttoptr(b.add(address, _c64(offset)) if offset else address, _PTR)


def _load(b: Any, kind: Any, address: Any, offset: int = 0) -> Any:
    return b.load(_at(b, address, offset), typ=kind, align=1)


def _store(b: Any, value: Any, address: Any, offset: int = 0) -> None:
    b.store(value, _at(b, address, offset), align=4)


def _shuffle(b: Any, x: Any, y: Any | None, picks: Sequence[int]) -> Any:
    other = ir.Constant(x.type, ir.Undefined) if y is None else y
    return b.shuffle_vector(x, other, ir.Constant(ir.VectorType(_I32, len(picks)), list(picks)))


def _fma(b: Any, isa: Isa, x: Any, y: Any, z: Any) -> Any:
    """x * y + z: rounded once with avx2; portable lets LLVM round twice where the processor cannot do better."""
    name = "llvm.fma.v8f32" if isa == "avx2" else "llvm.fmuladd.v8f32"
    return b.call(_function(b, name, _VF, [_VF] * 3), [x, y, z])


def _total(b: Any, x: Any) -> Any:
    """The sum of eight lanes in a fixed order."""
    for width in (4, 2, 1):
        x = b.fadd(
            _shuffle(b, x, None, list(range(width))),
            _shuffle(b, x, None, list(range(width, 2 * width))),
        )
    return b.extract_element(x, ir.Constant(_I32, 0))


def _loop(b: Any, count: Any, state: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """`count` turns of `body(turn, state) -> state`."""
    before, head, turn, after = b.block, *(b.append_basic_block(n) for n in ("head", "turn", "after"))
    b.branch(head)
    b.position_at_end(head)
    i = b.phi(_I64)
    i.add_incoming(_c64(0), before)
    phis = [b.phi(value.type) for value in state]
    for phi, value in zip(phis, state, strict=True):
        phi.add_incoming(value, before)
    b.cbranch(b.icmp_signed("<", i, count), turn, after)
    b.position_at_end(turn)
    results = body(i, list(phis))
    following = b.add(i, _c64(1))
    for phi, value in zip((i, *phis), (following, *results), strict=True):
        phi.add_incoming(value, b.block)
    b.branch(head)
    b.position_at_end(after)
    return list(phis)


def _if(b: Any, condition: Any, state: list[Any], body: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """`state`, or `body(state)` if the condition holds."""
    before, then, after = b.block, b.append_basic_block("then"), b.append_basic_block("join")
    b.cbranch(condition, then, after)
    b.position_at_end(then)
    results = body(list(state))
    end = b.block
    b.branch(after)
    b.position_at_end(after)
    phis = [b.phi(value.type) for value in state]
    for phi, old, new in zip(phis, state, results, strict=True):
        phi.add_incoming(old, before)
        phi.add_incoming(new, end)
    return phis


def _gather(b: Any, pairs: Sequence[tuple[Any, int, int]], groups: Any) -> list[Any]:
    """Copies of the last columns of a row, padded with zeros to a whole chunk; nothing behind them is touched.

    Args:
        pairs: (address, bytes per group of 16 columns, bytes of a chunk) of weights and scales.
        groups: how many there are.
    """
    places: list[Any] = []
    for _source, _each, size in pairs:
        with b.goto_entry_block():
            room = b.alloca(ir.ArrayType(_I8, size))
        b.store(ir.Constant(room.allocated_type, bytearray(size)), room)
        places.append(b.ptrtoint(room, _I64))

    def copy(i: Any, _: list[Any]) -> list[Any]:
        for (source, size, _whole), place in zip(pairs, places, strict=True):
            kind = {1: _I8, 8: _I64, 32: _VI}[size]
            offset = b.mul(i, _c64(size))
            b.store(_load(b, kind, b.add(source, offset)), _at(b, b.add(place, offset)), align=1)
        return []

    _loop(b, groups, [], copy)
    return places


# --- chunks ---


@dataclass(frozen=True)
class _Chunk:
    vectors: list[Any]  # eight times eight float32
    scale: Any | None  # of the sum of all their products; None if the format has none
    bad: Any  # bits to collect, see _BAD


_BAD = {"nvfp4": (_I32, 0x80808080), "bfloat16": (_VI, 0x80008000)}
_STRIDE = {"nvfp4": (CHUNK // 2, CHUNK // GROUP), "bfloat16": (2 * CHUNK, 0)}  # bytes of weights and scales of a chunk


def _chunk(b: Any, isa: Isa, stored: Stored, w: Any, s: Any) -> _Chunk:
    if stored == "bfloat16":
        return _bfloat16_chunk(b, w)
    raw = _load(b, ir.VectorType(_I8, 32), w)
    vectors = _shuffled(b, raw) if isa == "avx2" else _shifted(b, raw)
    packed = _load(b, ir.VectorType(_I8, 4), s)
    word = b.bitcast(packed, _I32)
    # Bit 7 of a byte is set in s or in s + 1 exactly if s >= 0x7F: NaN or a sign (a carry only leaves a bad byte).
    bad = b.or_(word, b.add(word, ir.Constant(_I32, 0x01010101)))
    twice = _shuffle(b, packed, None, [lane // 2 for lane in range(LANES)])
    return _Chunk(vectors, _half_scales(b, twice) if isa == "avx2" else _built_scales(b, twice), bad)


def _bfloat16_chunk(b: Any, w: Any) -> _Chunk:
    vectors, bad = [], None
    for part in range(4):
        pair = _load(b, _VI, w, 32 * part)
        vectors.append(b.bitcast(b.shl(pair, _splat(_I32, LANES, 16)), _VF))
        vectors.append(b.bitcast(b.and_(pair, _splat(_I32, LANES, 0xFFFF0000)), _VF))
        # An exponent of all ones carries into the sign bit, which was masked away.
        sign = b.add(b.and_(pair, _splat(_I32, LANES, 0x7F807F80)), _splat(_I32, LANES, 0x00800080))
        bad = sign if bad is None else b.or_(bad, sign)
    return _Chunk(vectors, None, bad)


def _shuffled(b: Any, raw: Any) -> list[Any]:
    """E2M1 by byte shuffles: first through a table of sixteen, then each byte to the top of its integer."""
    kind = ir.VectorType(_I8, 32)
    look = _function(b, "llvm.x86.avx2.pshuf.b", kind, [kind, kind])
    codes = b.and_(raw, _splat(_I8, 32, 15)), b.lshr(raw, _splat(_I8, 32, 4))
    values = [b.call(look, [ir.Constant(kind, _TABLE * 2), code]) for code in codes]
    zero = _splat(_I8, 32, 0)
    vectors = []
    for byte in range(4):
        picks = [p for lane in range(LANES) for p in (32, 32, 32, 4 * lane + byte)]
        for value in values:
            vectors.append(b.sitofp(b.bitcast(_shuffle(b, value, zero, picks), _VI), _VF))
    return vectors


def _shifted(b: Any, raw: Any) -> list[Any]:
    """E2M1 by shifting a constant of hexadecimal digits; any processor can do that."""
    words = b.bitcast(raw, _VI)
    vectors = []
    for j in range(VECTORS):
        code = b.lshr(words, _splat(_I32, LANES, 4 * j)) if j else words
        place = b.shl(b.and_(code, _splat(_I32, LANES, 7)), _splat(_I32, LANES, 2))
        digit = b.and_(b.lshr(_splat(_I32, LANES, _DIGITS), place), _splat(_I32, LANES, 15))
        sign = b.shl(b.and_(code, _splat(_I32, LANES, 8)), _splat(_I32, LANES, 28))
        unit = b.or_(sign, _splat(_I32, LANES, (127 + _CODE_EXPONENT - 1) << 23))
        vectors.append(b.fmul(b.sitofp(digit, _VF), b.bitcast(unit, _VF)))
    return vectors


def _half_scales(b: Any, packed: Any) -> Any:
    wide = b.shl(b.zext(packed, ir.VectorType(_I16, LANES)), _splat(_I16, LANES, 7))
    return b.fpext(b.bitcast(wide, ir.VectorType(_HALF, LANES)), _VF)


def _built_scales(b: Any, packed: Any) -> Any:
    """The same numbers without half precision; a subnormal is a normal number minus its leading one."""
    bias = 127 - 7 + _SCALE_EXPONENT
    wide = b.zext(packed, _VI)
    mantissa = b.shl(wide, _splat(_I32, LANES, 20))
    normal = b.bitcast(b.add(mantissa, _splat(_I32, LANES, bias << 23)), _VF)
    above = b.bitcast(b.add(mantissa, _splat(_I32, LANES, (bias + 1) << 23)), _VF)
    small = b.fsub(above, ir.Constant(_VF, [2.0 ** (bias + 1 - 127)] * LANES))
    return b.select(b.icmp_unsigned("<", wide, _splat(_I32, LANES, 8)), small, normal)


def _rows(
    b: Any,
    isa: Isa,
    stored: Stored,
    place: tuple[Any, Any, Any, Any],
    state: list[Any],
    use: Callable[[Any, _Chunk, list[Any]], list[Any]],
) -> tuple[list[Any], Any]:
    """Run over a stored row, `use(index, chunk, state) -> state`; returns the state and whether anything was bad."""
    w, s, chunks, rest = place
    per_w, per_s = _STRIDE[stored]
    kind, bits = _BAD[stored]
    mask = ir.Constant(kind, bits) if kind is _I32 else _splat(_I32, LANES, bits)
    ask = _function(b, "llvm.prefetch.p0", ir.VoidType(), [_PTR, _I32, _I32, _I32])

    def step(i: Any, values: list[Any]) -> list[Any]:
        at = b.add(w, b.mul(i, _c64(per_w)))
        for line in range(0, per_w, 64):
            b.call(ask, [_at(b, at, _AHEAD + line), *(ir.Constant(_I32, v) for v in (0, 2, 1))])
        chunk = _chunk(b, isa, stored, at, b.add(s, b.mul(i, _c64(per_s))))
        return [b.or_(values[0], chunk.bad), *use(i, chunk, values[1:])]

    def remainder(values: list[Any]) -> list[Any]:
        pairs = [(b.add(w, b.mul(chunks, _c64(per_w))), per_w * GROUP // CHUNK, per_w)]
        if per_s:
            pairs.append((b.add(s, b.mul(chunks, _c64(per_s))), 1, per_s))
        places = _gather(b, pairs, b.sdiv(rest, _c64(GROUP)))
        chunk = _chunk(b, isa, stored, places[0], places[-1])
        return [b.or_(values[0], chunk.bad), *use(chunks, chunk, values[1:])]

    none = ir.Constant(kind, 0) if kind is _I32 else _splat(_I32, LANES, 0)
    values = _loop(b, chunks, [none, *state], step)
    values = _if(b, b.icmp_signed("!=", rest, _c64(0)), values, remainder)
    bad = b.and_(values[0], mask)
    if kind is not _I32:
        wide = b.bitcast(bad, ir.VectorType(_I64, 4))
        parts = [b.extract_element(wide, ir.Constant(_I32, i)) for i in range(4)]
        folded = b.or_(b.or_(parts[0], parts[1]), b.or_(parts[2], parts[3]))
    else:
        folded = b.zext(bad, _I64)
    return values[1:], folded


def _joined(b: Any, isa: Isa, part: Any, scale: Any | None, total: Any) -> Any:
    return b.fadd(total, part) if scale is None else _fma(b, isa, part, scale, total)


def _finished(b: Any, stored: Stored, total: Any) -> Any:
    value = _total(b, total)
    return b.fmul(value, ir.Constant(_F32, 2.0 ** -(_CODE_EXPONENT + _SCALE_EXPONENT))) if stored == "nvfp4" else value


# --- the three products ---


def _fused(isa: Isa, stored: Stored, count: int) -> Emit:
    def emit(b: Any, args: list[Any]) -> Any:
        w, s, *inputs = args[: 2 + count]
        chunks, rest, out = args[2 + count :]

        def use(i: Any, chunk: _Chunk, totals: list[Any]) -> list[Any]:
            offset = b.mul(i, _c64(4 * CHUNK))
            for m, x in enumerate(inputs):
                for places in _SUMS:
                    part = None
                    for j in places:
                        value = _load(b, _VF, b.add(x, offset), 4 * LANES * j)
                        product = (chunk.vectors[j], value)
                        part = b.fmul(*product) if part is None else _fma(b, isa, *product, part)
                    totals[m] = _joined(b, isa, part, chunk.scale, totals[m])
            return totals

        totals, bad = _rows(b, isa, stored, (w, s, chunks, rest), [_ZERO] * count, use)
        for m, total in enumerate(totals):
            _store(b, _finished(b, stored, total), out, 4 * m)
        return bad

    return emit


def _decode(isa: Isa, stored: Stored) -> Emit:
    def emit(b: Any, args: list[Any]) -> Any:
        w, s, to, chunks, rest = args

        def use(i: Any, chunk: _Chunk, _: list[Any]) -> list[Any]:
            at = b.add(to, b.mul(i, _c64(DECODED_BYTES[stored])))
            for j, vector in enumerate([*chunk.vectors, *([] if chunk.scale is None else [chunk.scale])]):
                _store(b, vector, at, 4 * LANES * j)
            return []

        return _rows(b, isa, stored, (w, s, chunks, rest), [], use)[1]

    return emit


def _tile(isa: Isa, stored: Stored, count: int) -> Emit:
    def emit(b: Any, args: list[Any]) -> Any:
        first, second, *inputs = args[: 2 + count]
        chunks, *outs = args[2 + count :]

        def step(i: Any, totals: list[Any]) -> list[Any]:
            offset = b.mul(i, _c64(4 * CHUNK))
            at = b.mul(i, _c64(DECODED_BYTES[stored]))
            for places in _SUMS:
                parts: list[Any] = [None] * len(totals)
                for j in places:
                    weights = [_load(b, _VF, b.add(row, at), 4 * LANES * j) for row in (first, second)]
                    for m, x in enumerate(inputs):
                        value = _load(b, _VF, b.add(x, offset), 4 * LANES * j)
                        for r, weight in enumerate(weights):
                            k, part = 2 * m + r, parts[2 * m + r]
                            parts[k] = b.fmul(weight, value) if part is None else _fma(b, isa, weight, value, part)
                scales = [None, None]
                if stored == "nvfp4":
                    scales = [_load(b, _VF, b.add(row, at), 4 * CHUNK) for row in (first, second)]
                totals = [_joined(b, isa, p, scales[k % 2], totals[k]) for k, p in enumerate(parts)]
            return totals

        totals = _loop(b, chunks, [_ZERO] * (2 * count), step)
        for k, total in enumerate(totals):
            _store(b, _finished(b, stored, total), outs[k % 2], 4 * (k // 2))
        return _c64(0)

    return emit
