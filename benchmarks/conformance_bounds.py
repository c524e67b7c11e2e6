"""How near healthy sums come to the bound of the conformance suite, and how far beyond it the smallest faults are.

    python benchmarks/conformance_bounds.py [--quick] [--docs]

A sum of K products is computed in several orders and accumulations, on values of several kinds, and its error is
divided by what `m31.conformance.bounds` allows. Then faults are put into the operands, or into the arithmetic without
declaring it, and the same is done: a fault counts as caught in a case if one of 17 results (a case's tokens) is beyond
the bound.
`--docs` writes the tables into docs/conformance/bounds.md, between its markers.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from m31.conformance.bounds import CONSTANT, bound
from m31.graph import Arithmetic

F64 = NDArray[np.float64]
DOCS = Path(__file__).resolve().parents[1] / "docs" / "conformance" / "bounds.md"
SIZES = (64, 256, 1024, 4096, 16384)
TOKENS = 17
FLOAT32 = Arithmetic("float32", "float32", "float32")


# --- values -------------------------------------------------------------------------------------------------------


def _values(kind: str, rng: np.random.Generator, rows: int, k: int) -> tuple[F64, F64]:
    """Operands [rows, K] on float32."""
    x, w = rng.standard_normal((rows, k)), rng.standard_normal((rows, k)) * 0.05
    if kind == "outlier channel":
        x[:, k // 3] *= 1e4
    elif kind == "heavy tails":
        x *= np.exp(1.5 * rng.standard_normal((rows, k)))
    elif kind == "one sign":  # what a softmax or a squared value gives: every partial sum is larger than the last
        x, w = np.abs(x), np.abs(w)
    elif kind == "falling":
        x *= np.arange(1, k + 1) ** -0.5
    return x.astype(np.float32).astype(np.float64), w.astype(np.float32).astype(np.float64)


KINDS = ("normal", "outlier channel", "heavy tails", "falling", "one sign")


# --- sums ---------------------------------------------------------------------------------------------------------


def _round(bits: int, *, truncate: bool = False) -> Callable[[F64], F64]:
    """To `bits` significant bits."""

    def rounded(x: F64) -> F64:
        mantissa, exponent = np.frexp(x)
        scaled = mantissa * 2.0**bits
        made: F64 = np.ldexp(np.trunc(scaled) if truncate else np.round(scaled), exponent - bits)
        return made

    return rounded


def _products(x: F64, w: F64) -> NDArray[np.float32]:
    made: NDArray[np.float32] = x.astype(np.float32) * w.astype(np.float32)
    return made


def _sequential(x: F64, w: F64) -> F64:
    return np.cumsum(_products(x, w), axis=1, dtype=np.float32)[:, -1].astype(np.float64)


def _pairwise(x: F64, w: F64) -> F64:
    p = _products(x, w)
    while p.shape[1] > 1:
        p = p[:, ::2] + p[:, 1::2]
    return p[:, 0].astype(np.float64)


def _blocked(size: int) -> Callable[[F64, F64], F64]:
    def made(x: F64, w: F64) -> F64:
        p = _products(x, w).reshape(len(x), -1, min(size, x.shape[1]))
        partial = np.cumsum(p, axis=2, dtype=np.float32)[:, :, -1]
        return np.cumsum(partial, axis=1, dtype=np.float32)[:, -1].astype(np.float64)

    return made


def _reversed(x: F64, w: F64) -> F64:
    return _sequential(x[:, ::-1], w[:, ::-1])


def _shuffled(x: F64, w: F64) -> F64:
    order = np.random.default_rng(1).permutation(x.shape[1])
    return _sequential(x[:, order], w[:, order])


def _stepwise(rounded: Callable[[F64], F64]) -> Callable[[F64, F64], F64]:
    """Every product exact, every partial sum rounded: as a fused multiply-add does."""

    def made(x: F64, w: F64) -> F64:
        total = np.zeros(len(x))
        for k in range(x.shape[1]):
            total = rounded(total + x[:, k] * w[:, k])
        return total

    return made


def _outer(x: F64, w: F64) -> F64:
    """Products of 16 at a time as exact as float64, added to a float32 total: a matrix unit."""
    p = (x * w).reshape(len(x), -1, 16).sum(2).astype(np.float32)
    return np.cumsum(p, axis=1, dtype=np.float32)[:, -1].astype(np.float64)


ORDERS: Mapping[str, tuple[Callable[[F64, F64], F64], str]] = {
    "sequential": (_sequential, "float32"),
    "reversed": (_reversed, "float32"),
    "random order": (_shuffled, "float32"),
    "blocks of 32": (_blocked(32), "float32"),
    "blocks of 128": (_blocked(128), "float32"),
    "pairwise": (_pairwise, "float32"),
    "multiply-add": (_stepwise(_round(24)), "float32"),
    "16 at a time": (_outer, "float32"),
    "11 bits": (_stepwise(_round(11)), "tf32"),
    "bfloat16": (_stepwise(_round(8)), "bfloat16"),
}
"""Name -> the sum, and the accumulation that a kernel would declare."""


def _allowed(x: F64, w: F64, accumulate: str) -> F64:
    arithmetic = Arithmetic("float32", accumulate, "float32")
    reference, magnitude = np.sum(x * w, axis=1), np.sum(np.abs(x * w), axis=1)
    return bound(arithmetic, reference, magnitude, x.shape[1], given="float32")


def _reference(x: F64, w: F64) -> F64:
    made: F64 = np.sum(np.longdouble(x) * w, axis=1).astype(np.float64)
    return made


# --- faults -------------------------------------------------------------------------------------------------------


def _change_w(change: Callable[[F64], Any]) -> Callable[[F64, F64], F64]:
    def made(x: F64, w: F64) -> F64:
        w = w.copy()
        change(w)
        return _pairwise(x, w)

    return made


def _double_block(w: F64) -> None:
    w[:, 32:64] *= 2


def _drop_block(w: F64) -> None:
    w[:, -32:] = 0


def _drop_last(w: F64) -> None:
    w[:, -1] = 0


def _flip_sign(w: F64) -> None:
    w[:, 7] *= -1


def _one_code(w: F64) -> None:
    w[:, 7] *= 1 + 1 / 8


def _swap(w: F64) -> None:
    w[:, [6, 7]] = w[:, [7, 6]]


def _low(x: F64) -> F64:
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


FAULTS: Mapping[str, Callable[[F64, F64], F64]] = {
    "one block scale doubled": _change_w(_double_block),
    "last block of 32 dropped": _change_w(_drop_block),
    "last product dropped": _change_w(_drop_last),
    "one weight of the other sign": _change_w(_flip_sign),
    "two weights swapped": _change_w(_swap),
    "one 8-bit code off by one": _change_w(_one_code),
    "result in bfloat16, undeclared": lambda x, w: _low(_pairwise(x, w)),
    "operands in bfloat16, undeclared": lambda x, w: _pairwise(_low(x), _low(w)),
    "operands of 11 bits, undeclared": lambda x, w: _pairwise(_round(11)(x), _round(11)(w)),
    "sums in bfloat16, undeclared": _stepwise(_round(8)),
    "sums of 11 bits, undeclared": _stepwise(_round(11)),
    "sums truncated to 24 bits": _stepwise(_round(24, truncate=True)),
}


# --- tables -------------------------------------------------------------------------------------------------------


def healthy(rows: int) -> list[list[str]]:
    """Largest ratio and median by order and K, over all kinds of values."""
    out = []
    for name, (total, accumulate) in ORDERS.items():
        cells, worst_kind, worst = [], "", 0.0
        for k in SIZES:
            found = []
            for kind in KINDS:
                rng = np.random.default_rng([k, KINDS.index(kind)])
                x, w = _values(kind, rng, max(32, rows * 64 // k), k)
                ratio = np.abs(total(x, w) - _reference(x, w)) / _allowed(x, w, accumulate)
                found.append(ratio)
                if ratio.max() > worst:
                    worst, worst_kind = float(ratio.max()), kind
            every = np.concatenate(found)
            cells.append(f"{np.median(every):.4f} / {every.max():.3f}")
        out.append([name, accumulate, *cells, worst_kind])
    return out


def faulty(cases: int) -> list[list[str]]:
    """Median over cases of the largest ratio in a case, and how many cases have one beyond 1, by fault and K."""
    out = []
    for name, total in FAULTS.items():
        cells = []
        for k in SIZES:
            n = max(8, min(cases, cases * 1024 // k))
            x, w = _values("normal", np.random.default_rng([k, 99]), n * TOKENS, k)
            # One weight row serves all tokens of a case.
            w = np.repeat(w[::TOKENS], TOKENS, axis=0)
            ratio = np.abs(total(x, w) - _reference(x, w)) / _allowed(x, w, "float32")
            most = ratio.reshape(n, TOKENS).max(1)
            cells.append(f"{np.median(most):.3g} ({100 * np.mean(most > 1):.0f}%)")
        out.append([name, *cells])
    return out


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--docs", action="store_true")
    args = parser.parse_args()
    start = time.perf_counter()
    sizes = [f"K = {k:,}" for k in SIZES]
    parts = {
        "healthy": table(["order", "declared sums", *sizes, "worst values"], healthy(256 if args.quick else 4096)),
        "faults": table(["fault", *sizes], faulty(20 if args.quick else 200)),
    }
    for name, text in parts.items():
        print(f"{name}, constant {CONSTANT:g}\n\n{text}\n")
    print(f"{time.perf_counter() - start:.0f} s")
    if args.docs:
        page = DOCS.read_text()
        for name, text in parts.items():
            marks = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
            before, after = (mark.format(name) for mark in ("<!-- {} -->\n", "<!-- /{} -->"))
            page = re.sub(marks, lambda _, made=f"{before}{text}\n{after}": made, page, flags=re.DOTALL)  # type: ignore[misc]
        DOCS.write_text(page)


if __name__ == "__main__":
    main()
