"""What a way of storing a matrix has to say to kernels; the ways themselves are in `m31_cpu.codecs`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from m31_cpu.isa import Isa
from m31_cpu.lang import F32, I64, PTR, Val
from m31_cpu.native import Kernel

CHUNK = 128
TABLE_ROW = 48
"""Bytes of a matrix in a table: addresses of codes and scales with the bytes from row to row, the factor (float32), the
address of an int64 in which damage is noted."""
DAMAGED, INFINITE = 1, 2
"""What is noted: a weight that no encoder writes; a sum that is not finite, for which an input may be the cause."""


@dataclass(frozen=True)
class Matrix:
    """A stored matrix, as values of a kernel; see `TABLE_ROW`."""

    codes: Val
    stride: Val
    scales: Val
    scale_stride: Val
    factor: Val
    flag: Val


@dataclass(frozen=True)
class Run:
    """Vectors whose products are summed and then multiplied with `scale`, if there is one."""

    vectors: list[Val]
    scale: Val | None


@dataclass(frozen=True)
class Chunk:
    """Decoded columns.

    Args:
        runs: in order.
        bad: to be gathered with `Codec.worse`; None if there is nothing to look for.
    """

    runs: list[Run]
    bad: Val | None


class Codec:
    """A way of storing a matrix.

    Attributes:
        name: as in `TensorDecl.stored`.
        bits: of a code.
        group: columns that share a block scale; 0 without scales.
        exact: numbers that bfloat16 does not hold.
        fields: what `matrix` reads.
    """

    name: ClassVar[str]
    bits: ClassVar[int]
    group: ClassVar[int] = 0
    exact: ClassVar[bool] = False
    fields: ClassVar[Mapping[str, Any]] = {"table": PTR}

    def matrix(self, k: Kernel, a: Any, index: Val | int = 0) -> Matrix:
        """The matrix in row `index` of the table at `a.table`."""
        at = a.table + index * TABLE_ROW
        kinds = (PTR, I64, PTR, I64, F32, PTR)
        return Matrix(*(k.load(kind, at, 8 * i, align=8) for i, kind in enumerate(kinds)))

    def scale(self, k: Kernel, a: Any) -> Val:
        """The factor of the first matrix of a table."""
        return self.matrix(k, a).factor

    def pairs(self, isa: Isa) -> bool:
        """Whether vectors of a chunk are pairs of bfloat16 numbers, in int32."""
        return isa.dots and not self.exact

    @property
    def chunk_bytes(self) -> int:
        """Codes of a chunk."""
        return CHUNK * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Scales of a chunk."""
        return CHUNK // self.group if self.group else 0

    def shift(self, isa: Isa) -> int:
        """Decoded numbers are too small by 2^-shift."""
        return 0

    def order(self, isa: Isa) -> list[int]:
        """The column in each place of a chunk, its vectors one after the other."""
        raise AssertionError(f"{self.name} does not say")

    def chunk(self, k: Kernel, w: Val, s: Val) -> Chunk:
        """128 columns of a row, from codes at w and scales at s."""
        raise AssertionError(f"{self.name} does not say")

    def sound(self, k: Kernel) -> Val | None:
        """What `Chunk.bad` is if nothing is; None if there is nothing to look for."""
        return None

    def worse(self, k: Kernel, x: Val, y: Val) -> Val:
        """What is bad in either of two chunks."""
        return x | y

    def damaged(self, k: Kernel, bad: Val) -> Val:
        """Whether what was gathered says that something is (int1)."""
        raise AssertionError(f"nothing is looked for in {self.name}")

    def row(self, k: Kernel, t: Any, m: Matrix, row: Val, first: Val, width: Val, to: Val) -> None:
        """Decode `width` columns of a row from column `first` on, a multiple of `group` both, and note damage.

        Args:
            t: `t.pairs`: write bfloat16, else float32.
            to: where they go, in their order.
        """
        w = m.codes + row * m.stride + first * self.bits // 8
        s = m.scales + row * m.scale_stride + first // self.group if self.group else m.scales
        self._row(k, t.pairs, m, w, s, width, to)

    def _row(self, k: Kernel, pairs: bool, m: Matrix, w: Val, s: Val, width: Val, to: Val) -> None:
        raise AssertionError(f"{self.name} does not say")


def note(k: Kernel, flag: Val, condition: Val, what: int) -> None:
    """Note damage where the condition holds."""
    with k.when(condition):
        k.atomic("or", flag, what, "monotonic")
