"""L2, pages: what is written is read back, in every format; pages leave one cache and are at home in another.

There is no exchange of bytes between two makers of pages. What two backends have in common is the canonical form: the
decoded values that `read` gives, which the other one's kernels write again. A format is sound if that loses nothing.
Who names pages by a layout id of the reference says that their bytes are ordered likewise: the reference imports them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from m31 import ops
from m31.conformance import oracle
from m31.conformance.bench import Bench
from m31.conformance.item import Evidence, Item, NotRun, Verdict
from m31.conformance.levels.forms import normal, pages
from m31.conformance.rig import Forms
from m31.errors import BackendRefused, ContractViolation, LayoutMismatch, OpRefused
from m31.graph import OpInstance, Refusal, StepClass
from m31.ops import StateType, TensorType
from m31.ops.cases import rng_for
from m31.sdk.backend import ExportedPages, KVCache, KVSpec
from m31.sdk.manifest import Manifest
from m31.sdk.serving import Serving

HEADS, DIM, PAGE, PAGES = 2, 128, 128, 5
WRITES = (1, 17, 127, 128, 130)
"""Tokens of each step that writes; some slots are written twice."""
_PLAIN = ("float64", "float32", "bfloat16")
_INT8 = 2.0**-22  # a float32 scale is a quotient, and its product with 127 is rounded again
Values = Mapping[str, Any]


def items(manifest: Manifest) -> Iterator[Item]:
    """For every format of pages a round trip, an exchange, and a look at the name that they are exported under."""
    for claim, forms in pages(manifest):
        kind, _, stored = claim.partition(":")
        op = "kv_write" if kind == "kv" else "index_write"
        for subject, execute, judge in (
            ("write-read", _round_trip, _judge_round_trip),
            ("export-import", _exchange, _judge_exchange),
            ("between-backends", _export, _judge_export),
        ):
            name = f"L2/pages/{subject}/{kind}-{stored}"
            yield Item(
                id=name,
                level="L2",
                subject=f"pages {subject}",
                format=stored,
                criterion="exact",
                claims=(claim, f"op:{op}"),
                attributes={"pages": kind, "format": stored},
                execute=partial(execute, name, kind, stored, forms),
                judge=partial(judge, name, kind, stored),
                seconds=0.05,
            )


def _given(name: str, kind: str, stored: str) -> tuple[list[dict[str, Any]], list[Any]]:
    """Values and slots of each write. What is quantised is on the grid of BF16, as after a rounding node."""
    rng, steps, slots = rng_for(f"{name}/slots"), [], []
    for at, count in enumerate(WRITES):
        shapes = {"k": (count, HEADS, DIM), "v": (count, HEADS * DIM)} if kind == "kv" else {"index": (count, 1, DIM)}
        values = {part: torch.from_numpy(normal(f"{name}/{part}/{at}", *shape)) for part, shape in shapes.items()}
        # Whatever computes in BF16 gives such values only, so one set serves every compute dtype.
        steps.append({part: value.to(torch.bfloat16).double() for part, value in values.items()})
        slots.append(rng.permutation(PAGES * PAGE - 60)[:count])  # the last slots stay unwritten
    return steps, slots


class Book:
    """A cache of one layer, written by the kernels of whoever serves writing.

    Raises:
        NotRun: the format is refused, or writing is left to the reference.
    """

    def __init__(self, bench: Bench, kind: str, stored: str, forms: Forms) -> None:
        self.kind, self.stored = kind, stored
        self.serving: Serving = bench.serving(None, forms.arithmetic)
        session = self.serving.session
        other = str(session.dtypes["model"]).removeprefix("torch.")
        kv = stored if kind == "kv" else _partner(bench.manifest.formats.kv, forms, other)
        index = stored if kind == "index" else _partner(bench.manifest.formats.index, forms, other)
        self.formats = kv, index
        self.write_op = self._op(1)
        found = self.serving.assign(self.write_op, _step(1))
        if isinstance(found, Refusal):
            raise NotRun("refused", found.reason)
        if found.by != self.serving.name:
            raise NotRun("fallback", f"{self.write_op.spec.name} is left to {found.by}: {found.fallback}")
        try:
            self.layout = session.kv_layout(_spec(kv, index))
        except BackendRefused as refusal:
            raise NotRun("refused", str(refusal)) from refusal
        self.cache: KVCache = self.layout.allocate(PAGES)
        self.cache.poison(range(PAGES))

    def _op(self, count: int) -> OpInstance:
        spec = ops.kv_write if self.kind == "kv" else ops.index_write
        kv, index = self.formats
        given: list[Any] = [StateType("kv", kv, index), TensorType(("T", HEADS, DIM), "T,h,D", "model")]
        if self.kind == "kv":
            given.append(TensorType(("T", HEADS * DIM), "T,C", "model"))
        else:
            given[1] = TensorType(("T", 1, DIM), "T,h,D", "model")
        given.append(TensorType(("T",), "T", "int64"))
        attrs = {"layer": 0}
        return OpInstance(f"write-{count}", spec, attrs, tuple(given), spec.types(attrs, given))

    def write(self, values: Values, slots: Any) -> None:
        """One step of writing: `k` and `v`, or `index`; slots [n]."""
        session, count = self.serving.session, len(slots)
        found = self.serving.assign(self._op(count), _step(count))
        if isinstance(found, Refusal):
            raise ContractViolation(
                "prepared-at-load",
                f"writes one token and refuses {count}: {found.reason}",
                where=f"op {self.write_op.spec.name}",
                expected="the same ops served at every size",
            )
        device, dtype = session.device, session.dtypes["model"]
        data = [torch.as_tensor(value).to(device, dtype) for value in values.values()]
        space = torch.empty(found.kernel.workspace_bytes, dtype=torch.uint8, device=device)
        given = [self.cache, *data, torch.as_tensor(slots).to(device)]
        found.kernel.run([self.cache], given, None, space if space.numel() else None)

    def read(self) -> dict[str, Any]:
        """What the pages hold: `k` and `v` [pages, heads, page, D], or `index` [pages, page, D], float64."""
        parts = ("k", "v") if self.kind == "kv" else ("index",)
        return _read(self.cache, parts)

    def rows(self, held: Values) -> tuple[dict[str, Any], Any]:
        """What `read` gave, as `write` takes it, and the slots that hold something."""
        flat = {part: x if x.ndim == 4 else x[:, None] for part, x in held.items()}
        rows = {part: np.moveaxis(x, 2, 1).reshape(PAGES * PAGE, x.shape[1], DIM) for part, x in flat.items()}
        slots = np.flatnonzero(~np.isnan(next(iter(rows.values()))).all((1, 2)))
        return {p: x[slots].reshape(len(slots), -1) if p == "v" else x[slots] for p, x in rows.items()}, slots


def _spec(kv: str, index: str) -> KVSpec:
    return KVSpec(
        indexed=(True,),
        kv_heads=HEADS,
        head_dim=DIM,
        index_dim=DIM,
        page_tokens=PAGE,
        kv_format=kv,  # type: ignore[arg-type]
        index_format=index,  # type: ignore[arg-type]
    )


def _read(cache: KVCache, parts: tuple[str, ...]) -> dict[str, Any]:
    held = [cache.read(0, page) for page in range(PAGES)]
    return {part: np.stack([page[part].double().cpu().numpy() for page in held]) for part in parts}


def _partner(claimed: tuple[str, ...], forms: Forms, compute: str) -> str:
    """The format of the other kind of pages: a plain one where there is one."""
    return next((name for name in (compute, *_PLAIN) if name in claimed), claimed[0])


def _step(count: int) -> StepClass:
    tokens = 1 << max(0, count - 1).bit_length()
    return StepClass(kind="mixed", q_len=0, tokens=tokens, seqs=1, rows=1, pages=16)


def _filled(bench: Bench, name: str, kind: str, stored: str, forms: Forms) -> Book:
    book = Book(bench, kind, stored, forms)
    for values, slots in zip(*_given(name, kind, stored), strict=True):
        book.write(values, slots)
    return book


def _round_trip(name: str, kind: str, stored: str, forms: Forms, bench: Bench) -> Evidence:
    book = _filled(bench, name, kind, stored, forms)
    first = book.read()
    again = Book(bench, kind, stored, forms)
    again.write(*again.rows(first))
    arrays = {f"first.{part}": value for part, value in first.items()}
    arrays |= {f"again.{part}": value for part, value in again.read().items()}
    return Evidence(arrays, {"layout": book.layout.layout_id})


def _judge_round_trip(name: str, kind: str, stored: str, evidence: Evidence) -> Verdict:
    try:
        want = _filled(oracle.bench(), name, kind, stored, Forms()).read()
    except NotRun as missing:
        raise OpRefused(f"the reference has no {stored} pages: {missing}", where=name) from missing
    for part, exact in want.items():
        first, again = evidence.arrays[f"first.{part}"], evidence.arrays[f"again.{part}"]
        _equal(first, exact, f"{name}, {part} as written", "the values as this format holds them, and NaN elsewhere")
        if stored == "int8":
            again = np.where(np.abs(again - first) <= _INT8 * np.abs(first).max(), first, again)
        _equal(again, first, f"{name}, {part} written again", "the same values: a second rounding changes nothing")
    return Verdict(margin=0.0, max_error=0.0, allowed=0.0, note=f"layout {evidence.facts['layout']}")


def _exchange(name: str, kind: str, stored: str, forms: Forms, bench: Bench) -> Evidence:
    book = _filled(bench, name, kind, stored, forms)
    want = book.read()
    other = Book(bench, kind, stored, forms)
    there, here = [3, 0, 4], [1, 4, 2]
    exported = book.cache.export(there)
    book.cache.poison(there)  # what was exported is a copy
    other.cache.import_(exported, here)
    book.cache.import_(other.cache.export(here), there)
    got, back = other.read(), book.read()
    arrays = {f"want.{part}": value for part, value in want.items()}
    arrays |= {f"there.{part}": value[here] for part, value in got.items()}
    arrays |= {f"rest.{part}": np.delete(value, here, axis=0) for part, value in got.items()}
    arrays |= {f"back.{part}": value for part, value in back.items()}
    same = book.layout.layout_id == other.layout.layout_id == exported.layout_id
    return Evidence(arrays, {"there": there, "same_id": same, "layout": book.layout.layout_id})


def _judge_exchange(name: str, kind: str, stored: str, evidence: Evidence) -> Verdict:
    arrays = evidence.arrays
    if not evidence.facts["same_id"]:
        raise ContractViolation("pages", "has two layout ids for one spec", where=name, expected="one")
    for part in ("k", "v") if kind == "kv" else ("index",):
        want = arrays[f"want.{part}"]
        _equal(arrays[f"there.{part}"], want[evidence.facts["there"]], f"{name}, {part} of imported pages", "the pages")
        _equal(arrays[f"back.{part}"], want, f"{name}, {part} of pages that came back", "the pages as they were")
        rest = arrays[f"rest.{part}"]
        _equal(rest, np.full_like(rest, np.nan), f"{name}, {part} of pages that were not named", "NaN, as poisoned")
    return Verdict(margin=0.0, max_error=0.0, allowed=0.0, note=f"layout {evidence.facts['layout']}")


def _export(name: str, kind: str, stored: str, forms: Forms, bench: Bench) -> Evidence:
    book = _filled(bench, name, kind, stored, forms)
    exported = book.cache.export(range(PAGES))
    tensors = {part: tensor.detach().cpu().contiguous() for part, tensor in exported.tensors.items()}
    arrays = {f"bytes.{part}": tensor.reshape(PAGES, -1).view(torch.int8).numpy() for part, tensor in tensors.items()}
    arrays |= {f"want.{part}": value for part, value in book.read().items()}
    types = {part: [str(x.dtype).removeprefix("torch."), list(x.shape)] for part, x in tensors.items()}
    return Evidence(arrays, {"layout": exported.layout_id, "formats": list(book.formats), "types": types})


def _judge_export(name: str, kind: str, stored: str, evidence: Evidence) -> Verdict:
    facts = evidence.facts
    own = Verdict(note=f"pages of a maker of its own: {facts['layout']}")
    try:
        layout = oracle.bench().session().kv_layout(_spec(*facts["formats"]))
    except BackendRefused:
        return own
    if facts["layout"] != layout.layout_id:
        return own
    tensors = {
        part: torch.from_numpy(evidence.arrays[f"bytes.{part}"].copy()).view(getattr(torch, dtype)).reshape(shape)
        for part, (dtype, shape) in facts["types"].items()
    }
    cache = layout.allocate(PAGES)
    try:
        cache.import_(ExportedPages(layout.layout_id, PAGES, tensors), range(PAGES))
    except LayoutMismatch as mismatch:
        raise ContractViolation(
            "layout-id", f"exports under the reference's id what is none of its pages: {mismatch}", where=name
        ) from mismatch
    parts = ("k", "v") if kind == "kv" else ("index",)
    for part, got in _read(cache, parts).items():
        _equal(got, evidence.arrays[f"want.{part}"], f"{name}, {part} in the reference", "what their maker reads")
    return Verdict(margin=0.0, max_error=0.0, allowed=0.0, note=f"layout {layout.layout_id}")


def _equal(got: Any, want: Any, where: str, expected: str) -> None:
    if got.shape == want.shape and np.array_equal(got, want, equal_nan=True):
        return
    wrong = ~((got == want) | (np.isnan(got) & np.isnan(want)))
    at = np.argwhere(wrong)[0].tolist()
    raise ContractViolation(
        "pages",
        f"holds {got[tuple(at)]:.6g} at {at} where it should be {want[tuple(at)]:.6g}, and {int(wrong.sum())} such",
        where=where,
        expected=expected,
    )
