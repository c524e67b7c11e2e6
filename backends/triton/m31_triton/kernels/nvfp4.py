"""NVFP4 of keys and values inside a kernel (MODEL.md §3.4): the store rule with exact division, the exact read rule."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def encode(x_RD, R: tl.constexpr, D: tl.constexpr):
    """Codes uint8 [R,D/2] and E4M3 bytes uint8 [R,D/16] of float32 [R,D] that holds bfloat16 values.

    sf = E4M3(amax16 / 6), no floor; code = E2M1(x / sf), ties to even, saturating; minus zero is stored as zero. A
    group with NaN or infinity gets a NaN scale. The same bits as m31.formats.nvfp4.encode_kv.
    """
    x_RG16 = tl.reshape(x_RD, (R, D // 16, 16))
    # Magnitudes are ordered as their bits are, with infinity and NaN on top, whatever a device's maximum does with NaN.
    top_RG = tl.max(x_RG16.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2)
    finite_RG = top_RG < 0x7F800000
    amax_RG = tl.where(finite_RG, top_RG, 0).to(tl.float32, bitcast=True)
    ratio_RG = tl.div_rn(amax_RG, tl.full((R, D // 16), 6.0, tl.float32))
    sf8_RG = tl.minimum(ratio_RG, 448.0).to(tl.float8e4nv)  # not every device's conversion saturates by itself
    sf_RG = tl.where(finite_RG, sf8_RG.to(tl.float32), float("nan"))
    # 0 / 0 is NaN, which no comparison below holds for: code 0. x / 0 is infinite and saturates.
    y_RG16 = tl.div_rn(x_RG16, tl.broadcast_to(sf_RG[:, :, None], (R, D // 16, 16)))
    code_RD = _e2m1(tl.reshape(y_RG16, (R, D)))
    low, high = tl.split(tl.reshape(code_RD, (R, D // 2, 2)))
    scale_RG = tl.where(finite_RG, sf8_RG.to(tl.uint8, bitcast=True).to(tl.int32), 0x7F)
    return (low | (high << 4)).to(tl.uint8), scale_RG.to(tl.uint8)


@triton.jit
def _e2m1(y):
    """Nearest code by counting the midpoints below |y|; a midpoint belongs to the even one of its two codes."""
    a = tl.abs(y)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    code += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    return code + tl.where((y < 0) & (code > 0), 8, 0)


@triton.jit
def decode(packed_RB, scale_RG, R: tl.constexpr, D: tl.constexpr):
    """E2M1 * E4M3 as bfloat16 [R,D], exactly: at most six significant bits. A NaN scale makes its group NaN."""
    byte = packed_RB.to(tl.int32)
    code_RG16 = tl.reshape(tl.join(byte & 15, byte >> 4), (R, D // 16, 16))
    sf_RG = scale_RG.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return tl.reshape(_value(code_RG16) * sf_RG[:, :, None], (R, D)).to(tl.bfloat16)


@triton.jit
def _value(code):
    """float32 of an E2M1 code: its two exponent bits moved into place, or half the last bit below 1."""
    exponent = (code >> 1) & 3
    mantissa = code & 1
    normal = (((exponent + 126) << 23) | (mantissa << 22)).to(tl.float32, bitcast=True)
    magnitude = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.5, normal)
    return tl.where((code & 8) != 0, -magnitude, magnitude)


@triton.jit
def scale_offsets(token, G: tl.constexpr, QUAD: tl.constexpr):
    """[n,G]: where a page stores the scales of `token` [n], counted from the page's first scale of the same head."""
    g = tl.arange(0, G)
    if QUAD:
        return ((token // 4) * (4 * G) + token % 4)[:, None] + g[None, :] * 4
    return (token * G)[:, None] + g[None, :]
