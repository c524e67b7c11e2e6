"""Every rule of MODEL.md §3 once more, one number at a time, in plain Python: the definition.

Written to be checked against the specification by eye, not to be fast; the vectorised modules must agree with it bit
for bit. Inputs are Python floats that float32 holds exactly; `f32` rounds after each operation, which makes it the
float32 operation: a product of two float32 numbers is exact in a Python float, and a quotient, having more than twice
the bits, is not rounded twice to a different result. Everything is finite here; refusals are the other modules' task.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence


def f32(x: float) -> float:
    """The float32 nearest to x, ties to even; infinity beyond the largest."""
    try:
        return float(struct.unpack("f", struct.pack("f", x))[0])
    except OverflowError:
        return math.copysign(math.inf, x)


def _minifloat(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """Value of a sign-exponent-mantissa code, special codes not considered."""
    bias = 2 ** (exponent_bits - 1) - 1
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent = (code >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = code & (2**mantissa_bits - 1)
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp(2**mantissa_bits + mantissa, exponent - bias - mantissa_bits)


def e2m1_value(code: int) -> float:
    """Value of an E2M1 code 0..15."""
    return _minifloat(code, 2, 1)


def e4m3_value(code: int) -> float:
    """Value of an E4M3 code 0..255: all ones but the sign is NaN, there is no infinity."""
    return math.nan if code & 0x7F == 0x7F else _minifloat(code, 4, 3)


def e5m2_value(code: int) -> float:
    """Value of an E5M2 code 0..255: the largest exponent holds infinity and NaN."""
    if code & 0x7F > 0x7C:
        return math.nan
    return math.copysign(math.inf, 1 - (code & 0x80)) if code & 0x7F == 0x7C else _minifloat(code, 5, 2)


def e8m0_value(code: int) -> float:
    """Value of an E8M0 code 0..255."""
    return math.nan if code == 255 else 2.0 ** (code - 127)


_E2M1 = [e2m1_value(code) for code in range(8)]
_E4M3 = [e4m3_value(code) for code in range(0x7F)]


def _nearest(magnitude: float, table: Sequence[float]) -> int:
    """Index of the nearest entry, the even index at a tie, the last one beyond the end."""
    if magnitude >= table[-1]:
        return len(table) - 1
    return min(range(len(table)), key=lambda code: (abs(table[code] - magnitude), code % 2))


def e2m1_encode(x: float) -> int:
    """Nearest E2M1 code, saturating; zero is code 0 whatever its sign or the sign of what rounded to it."""
    code = _nearest(abs(x), _E2M1)
    return code + 8 if x < 0 and code else code


def e4m3_encode(x: float) -> int:
    """Nearest E4M3 code, saturating, without -0."""
    code = _nearest(abs(x), _E4M3)
    return code + 128 if x < 0 and code else code


def mxfp8_scale(amax: float) -> int:
    """The smallest s of 0..254 with max(amax, smallest normal) <= 448 * 2^(s - 127): ceil(log2(a / 448)) + 127."""
    a = max(amax, 2.0**-126)
    s = 0
    while a > 448.0 * 2.0 ** (s - 127):
        s += 1
    return min(s, 254)


def mxfp8_encode(block: Sequence[float]) -> tuple[list[int], int]:
    """Codes and scale of 32 numbers (MODEL.md §3.1)."""
    s = mxfp8_scale(max(abs(x) for x in block))
    return [e4m3_encode(f32(x * 2.0 ** (127 - s))) for x in block], s


def nvfp4_global_scale(amax: float) -> float:
    """G = 2688 / amax; 1 for a tensor of zeros; at most the largest float32."""
    return min(f32(2688.0 / amax), 3.4028234663852886e38) if amax else 1.0


def nvfp4_encode(block: Sequence[float], g: float) -> tuple[list[int], int]:
    """Codes and E4M3 scale code of 16 weights under the encode scale g (MODEL.md §3.2)."""
    sf = e4m3_encode(f32(f32(max(abs(x) for x in block) / 6.0) * g))
    value = e4m3_value(sf)
    return [e2m1_encode(f32(f32(x * g) / value)) if value else 0 for x in block], sf


def nvfp4_decode(code: int, sf: int, g: float) -> float:
    """E2M1 * E4M3 / G."""
    return f32(e2m1_value(code) * e4m3_value(sf) / g)


def _clip(x: float) -> float:
    return min(max(x, 2.0**-9), 448.0)


def nvfp4_token_scale(token: Sequence[float]) -> float:
    """Decode scale of a token: max(amax, 1e-12) / 2688."""
    return f32(max(max(abs(x) for x in token), f32(1e-12)) / 2688.0)


def nvfp4_encode_token_block(block: Sequence[float], token_scale: float) -> tuple[list[int], int]:
    """Codes and scale code of 16 inputs of FC1 under their token's scale (MODEL.md §3.2)."""
    v = [f32(x / token_scale) for x in block]
    sf = e4m3_encode(_clip(f32(max(abs(x) for x in v) / 6.0)))
    return [e2m1_encode(f32(x / e4m3_value(sf))) for x in v], sf


def nvfp4_encode_static(block: Sequence[float], input_global_scale: float) -> tuple[list[int], int]:
    """Codes and scale code of 16 inputs of FC2 under the stored encode scale (MODEL.md §3.2)."""
    s = f32(1.0 / input_global_scale)
    sf = e4m3_encode(_clip(f32(max(abs(x) for x in block) / f32(6.0 * s))))
    unit = f32(e4m3_value(sf) * s)
    return [e2m1_encode(f32(x / unit)) for x in block], sf


def nvfp4_encode_kv(block: Sequence[float]) -> tuple[list[int], int]:
    """Codes and scale code of 16 bfloat16 numbers of the cache (MODEL.md §3.4, g = 1, exact division)."""
    sf = e4m3_encode(f32(max(abs(x) for x in block) / 6.0))
    value = e4m3_value(sf)
    return [e2m1_encode(f32(x / value) if value else math.copysign(math.inf, x)) if x else 0 for x in block], sf


def nvfp4_kv_e4m3(code: int, sf: int, scale_shift: int = 0) -> float:
    """What an E4M3 product sees of a cached element (MODEL.md §3.4, read rule)."""
    scale = e4m3_value(e4m3_encode(e4m3_value(sf) * 2.0**-scale_shift))
    return e4m3_value(e4m3_encode(e2m1_value(code) * scale)) * 2.0**scale_shift


def int8_encode(vector: Sequence[float]) -> tuple[list[int], float]:
    """Codes and scale of one vector: amax / 127, nearest integer, ties to even."""
    scale = f32(max(abs(x) for x in vector) / 127.0)
    if scale == 0:
        return [0] * len(vector), scale
    return [max(-127, min(127, round(f32(x / scale)))) for x in vector], scale


def pack(codes: Sequence[int]) -> bytes:
    """Two E2M1 codes a byte, the even column in the low nibble."""
    return bytes(codes[i] | codes[i + 1] << 4 for i in range(0, len(codes), 2))


def swizzled_offset(row: int, column: int, columns: int) -> int:
    """Where the byte of scale (row, column) lies in the 128x4 order, for a matrix of `columns` scale columns."""
    tiles = -(-columns // 4)
    tile = row // 128 * tiles + column // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


def token_quad_offset(token: int, group: int, groups: int = 8) -> int:
    """Where a page stores the V scale of (token, group) in token-quad order (MODEL.md §3.4)."""
    return token // 4 * 4 * groups + group * 4 + token % 4
