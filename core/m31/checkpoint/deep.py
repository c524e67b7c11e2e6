"""What looks wrong inside quantised weights that decode without an error: scales against codes (`m31 inspect --deep`).

How often a block reaches the largest code tells how its scale was made. MXFP8 rounds the exponent up (MODEL.md §3.1),
which leaves a block's largest value spread over (224, 448]; the share of it that rounds to 448 is log2(448/432), 5 %.
An encoder that rounds down reaches it in a quarter of all blocks and clips most of those. An NVFP4 block scale is at
its maximum, 448, only where the block holds (nearly) the largest weight of the whole matrix.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from m31.checkpoint.encoding import chunk_rows
from m31.checkpoint.folder import listed
from m31.checkpoint.inventory import MX_BLOCK
from m31.checkpoint.logical import GlobalScale, QuantizedTensor
from m31.checkpoint.reader import TensorFolder
from m31.errors import NonFiniteWeight
from m31.formats.scales import E8M0_LARGE

_FULL = 2688.0  # 448 * 6, what the largest weight becomes under G (MODEL.md §3.2)
_TOLERANCE = 0.05  # of that; rounding the largest block scale costs at most 1/28
_MX_SHARE, _NV_SHARE = 0.15, 0.05  # of blocks at the maximum before it is worth a word
_PAIR = (".w1.weight", ".w3.weight")
_FEW = 200  # blocks below which a share says nothing
_PLAUSIBLE = (1e-4, 1e3)  # largest weight of a matrix; an inverted scale is off by eight orders (BUG-42)
_FP8_MAX_CODE, _E4M3_MAX, _FLOAT32_MAX = 0x7E, 448.0, 3.4028234663852886e38


@dataclass(slots=True)
class _Tally:
    blocks: int = 0
    at_maximum: int = 0
    silenced: int = 0  # blocks with codes that are not zero under a scale that is
    largest: float = 0.0
    infinite: bool = False  # decoded values exceed float32


@dataclass(frozen=True, slots=True)
class _Range:
    largest: float  # code times block scale
    overall: float  # G


def quantised(folder: TensorFolder) -> Iterator[str]:
    """Findings over all quantised weights of a folder; one pass, a bounded piece at a time."""
    found: dict[str, list[str]] = defaultdict(list)
    ranges: dict[str, _Range] = {}
    for name in folder.names:
        tensor = folder.tensor(name)
        if isinstance(tensor, QuantizedTensor):
            try:
                for what in _mxfp8(tensor) if tensor.format == "mxfp8" else _nvfp4(tensor, ranges):
                    found[what].append(name)
            except NonFiniteWeight as exc:
                found["have a global scale that cannot be divided by"].append(f"{name} ({exc.what})")
    if unused := [name for name in ranges if _unused(name, ranges)]:
        what = "do not use the range that their global scale gives (largest code times block scale is not 2688)"
        found[what] = unused
    for what, names in found.items():
        yield f"{len(names)} quantised weights {what}: {listed(names)}"


def _unused(name: str, ranges: Mapping[str, _Range]) -> bool:
    """Whether a matrix is away from 2688. Gate and up of an expert (w1, w3) may share a G, that of the larger one."""
    own = ranges[name]
    largest = own.largest
    for one, other in (_PAIR, _PAIR[::-1]):
        partner = ranges.get(name.removesuffix(one) + other) if name.endswith(one) else None
        if partner is not None and partner.overall == own.overall:
            largest = max(largest, partner.largest)
    return largest > 0 and abs(largest - _FULL) > _TOLERANCE * _FULL


def _mxfp8(tensor: QuantizedTensor) -> Iterator[str]:
    import torch

    from m31.formats import mxfp8

    tally = _Tally()
    for start, stop in chunk_rows(tensor.shape):
        parts = tensor.slice(0, start, stop).parts()
        stored, scale = parts["codes"].load(), parts["scale"].load()
        codes = (stored.view(torch.uint8) & 0x7F).reshape(len(stored), -1, MX_BLOCK).amax(-1)
        tally.blocks += scale.numel()
        tally.at_maximum += int((codes == _FP8_MAX_CODE).sum())
        tally.silenced += int(((scale == 0) & (codes != 0)).sum())
        if bool((scale >= E8M0_LARGE).any()):
            tally.infinite |= bool(mxfp8.decode(stored, scale, torch.float32).isinf().any())
    if tally.silenced:
        yield "have codes under a block scale of 2^-127 (byte 0), which belongs to blocks of zeros"
    if tally.infinite:
        yield "decode to infinity"
    if tally.blocks >= _FEW and tally.at_maximum > _MX_SHARE * tally.blocks:
        yield "reach the largest code in far more blocks than a scale that is rounded up allows: saturated"


def _nvfp4(tensor: QuantizedTensor, ranges: dict[str, _Range]) -> Iterator[str]:
    """Findings that need this matrix only; what is needed to judge its range goes into `ranges`."""
    import torch

    from m31.formats import nvfp4

    tally, unit, signed = _Tally(), torch.ones(1), False
    for start, stop in chunk_rows(tensor.shape):
        parts = tensor.slice(0, start, stop).parts()
        packed, scale = parts["packed"].load(), parts["scale"].load()
        sizes = scale.float()
        codes = (packed & 0x77).reshape(len(packed), -1, nvfp4.GROUP // 2).amax(-1)  # zero of either sign is zero
        tally.blocks += scale.numel()
        tally.at_maximum += int((sizes == _E4M3_MAX).sum())
        tally.silenced += int(((sizes == 0) & (codes != 0)).sum())
        tally.largest = max(tally.largest, float(nvfp4.decode(packed, scale, unit, torch.float32).abs().max()))
        signed |= bool(sizes.signbit().any())
    if signed:
        yield "have negative block scales"
    if tally.silenced:
        yield "have codes under a block scale of zero, which decode to zero"
    if tally.blocks >= _FEW and tally.at_maximum > _NV_SHARE * tally.blocks:
        yield f"have the largest block scale in more than {_NV_SHARE:.0%} of their blocks: saturated"
    overall = tensor.parts()["global_scale"]
    assert isinstance(overall, GlobalScale)
    extent = _Range(tally.largest, float(overall.load()))
    ranges[tensor.name] = extent
    if extent.largest / extent.overall > _FLOAT32_MAX:
        yield "decode to infinity"
    if extent.largest and not _PLAUSIBLE[0] < extent.largest / extent.overall < _PLAUSIBLE[1]:
        yield "decode to implausibly large or small values: is the global scale inverted?"
    tensor.parts()["input_global_scale"].load()  # refuses what cannot be divided by
