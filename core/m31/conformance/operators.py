"""Rule `arithmetic`, op by op: every case of an op, on the kernels of a session, against the definition in float64."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from m31 import ops
from m31.conformance import judge
from m31.conformance.buffers import Buffer, Workspace
from m31.conformance.cases import cases_of, instance, step_of, storable, weight_of, weights_of
from m31.conformance.op_bounds import Given
from m31.conformance.weights import WHOLE, Held, HeldQuantised, require_losses
from m31.errors import BackendRefused, ContractViolation
from m31.formats import mxfp8, nvfp4
from m31.graph import Kernel, OpInstance, Refusal, StepClass
from m31.ops import Case, OpSpec, StateType, TensorType
from m31.ops.fused import FUSED
from m31.sdk.backend import KVCache, KVSpec, LazyTensor, Session


@dataclass
class Checked:
    """What of an op was run.

    Attributes:
        ran: cases, with the storage of their weights where they have some.
        refused: case -> why the session has no kernel for it.
        unjudged: case -> why what ran has no bound; it was only required to be nearer to the definition than nonsense.
    """

    ran: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    unjudged: dict[str, str] = field(default_factory=dict)


def check_ops(session: Session, *, pages: Session | None = None, gaps: bool = True) -> dict[str, Checked]:
    """`check_op` for every op and fused op, by name; what the session does not serve is in `Checked.refused`."""
    specs = {**ops.ALL, **FUSED}
    return {name: check_op(session, spec, pages=pages, gaps=gaps) for name, spec in specs.items()}


def check_op(session: Session, spec: OpSpec, *, pages: Session | None = None, gaps: bool = True) -> Checked:
    """Rule `arithmetic`, on the cases of an op: the op's own and those of `m31.conformance.cases`.

    Each runs in every way in which its weights can be stored that the session serves. Inputs and outputs lie inside
    larger tensors, as the narrowed buffers of a plan do; outputs start as NaN. Judged are: that every element of every
    output is written, that nothing else is, inputs and what surrounds the workspace included, that the values are
    within the bound of the declared arithmetic (`m31.conformance.op_bounds`; exactly right for an op whose criterion
    says so), that zeros, a constant and a shuffled result would not be, and that the weights are what they should be
    (rule `losses`). Pages are filled by the kernels that write pages, and read back.

    Args:
        session: whose kernels run.
        spec: of `m31.ops.ALL`, or a fused one, which has no bound yet: see `Checked.unjudged`.
        pages: another session, of whose pages and page-writing kernels the first one's kernels make use.
        gaps: also with something between any two elements of inputs and outputs.

    Raises:
        ContractViolation: names the kernel and the case.
    """
    done = Checked()
    for case in cases_of(spec):
        for stored in storable(spec, weights_of(case, spec)):
            _check_case(session, pages or session, spec, case, stored, gaps, done)
    return done


def _check_case(
    session: Session, owner: Session, spec: OpSpec, case: Case, stored: str, gaps: bool, done: Checked
) -> None:
    label = f"{case.id}/{stored}" if stored else case.id
    step = step_of(spec, case)
    forms = _page_formats(session, owner, case, done) if case.state else [""]
    for form in forms:
        label_here = f"{label}/{form} pages" if form else label
        op = instance(spec, case, stored, (form, form))
        kernel = session.kernel(op, step)
        if isinstance(kernel, Refusal):
            done.refused[label_here] = kernel.reason
            continue
        reason = judge.unjudged(spec, kernel)
        for between in (False, True) if gaps and form == forms[0] else (False,):
            run = _Run(session, owner, op, case, step, form, between)
            run.judge(kernel, f"kernel {kernel.name}, case {label_here}", bounded=reason is None)
        if reason:
            done.unjudged[label_here] = reason
        else:
            done.ran.append(label_here)


def _page_formats(session: Session, owner: Session, case: Case, done: Checked) -> list[str]:
    """Those of the plain formats that the owner of the pages has; why it has none of them is noted."""
    found, reasons = [], []
    for form in dict.fromkeys((str(session.dtypes["model"]).removeprefix("torch."), "bfloat16")):
        try:
            owner.kv_layout(_spec_of(case, form))
        except BackendRefused as refusal:
            reasons.append(str(refusal))
        else:
            found.append(form)
    if not found:
        done.refused[case.id] = "; ".join(reasons)
    return found


def _spec_of(case: Case, form: str) -> KVSpec:
    index, k = case.state.get((0, "index")), case.state.get((0, "k"))
    return KVSpec(
        indexed=(index is not None,),
        kv_heads=k.shape[1] if k is not None else 1,
        head_dim=k.shape[3] if k is not None else index.shape[2],  # type: ignore[union-attr]
        index_dim=index.shape[2] if index is not None else 0,
        page_tokens=k.shape[2] if k is not None else index.shape[1],  # type: ignore[union-attr]
        kv_format=form,  # type: ignore[arg-type]
        index_format=form,  # type: ignore[arg-type]
    )


class _Run:
    """One case with its inputs, weights and pages."""

    def __init__(
        self, session: Session, owner: Session, op: OpInstance, case: Case, step: StepClass, form: str, gaps: bool
    ) -> None:
        self.session, self.owner, self.op, self.case, self.step = session, owner, op, case, step
        self.form, self.gaps, self.spec = form, gaps, op.spec

    def judge(self, kernel: Kernel, where: str, *, bounded: bool) -> None:
        """Run the kernel and raise what it breaks."""
        slots = {slot: self._held(slot, value) for slot, value in weights_of(self.case, self.spec).items()}
        handle = None
        if slots:
            handle = self.session.prepare(self.op, slots, WHOLE)
            require_losses(handle, self.op, slots)
        used = {slot: v.double().cpu().numpy() for slot, v in handle.dequantise().items()} if handle else {}
        cache = self._cache(where) if self.case.state else None
        state = _arrays(cache, self.case) if cache else {}
        grid = torch.bfloat16 if "bfloat16" in kernel.arithmetic.operands else self.session.dtypes["model"]

        args: list[Any] = []
        ins: list[Any] = []
        buffers: dict[str, Buffer] = {}
        for arg in self.spec.inputs:
            if arg.kind == "weight":
                several = sum(a.kind == "weight" for a in self.spec.inputs) > 1
                prefix = f"{arg.name}." if several else ""
                args.append({slot: used[prefix + slot] for slot in weight_of(self.case, arg.name)})
            elif arg.kind == "state":
                args.append(state)
                ins.append(cache)
            else:
                values = torch.as_tensor(np.asarray(self.case.inputs[arg.name]))
                values = values.to(grid) if values.is_floating_point() else values
                args.append(values.double().numpy() if values.is_floating_point() else values.numpy())
                buffers[arg.name] = self._buffer(arg.name, arg.layout, self.session.dtypes[arg.dtype], values)
                ins.append(buffers[arg.name].tensor)
        plain = [v["weight"] if isinstance(v, dict) and set(v) == {"weight"} else v for v in args]
        expected = self.spec.naive(self.case.attrs, *plain)
        outs: list[Any] = []
        for arg, want in zip(self.spec.outputs, expected, strict=True):
            if arg.kind == "state":
                outs.append(cache)
                continue
            empty = Buffer(
                want.shape,
                self.session.dtypes[arg.dtype],
                self.session.device,
                narrow=_narrow(arg.layout),
                gaps=self.gaps and want.ndim > 0,
            )
            buffers[f"output {arg.name}"] = empty
            outs.append(empty.tensor)
        space = Workspace(kernel.workspace_bytes, self.session.device)
        kernel.run(outs, ins, handle, space.tensor)

        for name, buffer in buffers.items():
            buffer.require_untouched(name, where)
        space.require_untouched(where)
        for arg, want in zip(self.spec.outputs, expected, strict=True):
            if arg.kind != "state" and np.isfinite(want).all():
                buffers[f"output {arg.name}"].require_written(arg.name, where)
        given = Given(self.case.attrs, args, expected, kernel.arithmetic, str(grid).removeprefix("torch."))
        got = [_arrays(cache, self.case) if out is cache and cache else out.double().cpu().numpy() for out in outs]
        if bounded:
            judge.require(self.spec, given, got, where, self._stored)
        else:
            judge.require_likeness(self.spec, given, got, where)

    def _held(self, slot: str, value: Any) -> LazyTensor:
        """A weight of the case in memory, stored as the instance says."""
        decl = self.op.slots[slot]
        x = torch.as_tensor(np.asarray(value), dtype=torch.float32)
        if decl.stored == "mxfp8":
            mx = mxfp8.encode(x)
            return HeldQuantised(decl.name, mxfp8.decode(*mx), "mxfp8", {"codes": mx.codes, "scale": mx.scale})
        if decl.stored == "nvfp4":
            nv = nvfp4.encode(x)
            stored = {**nv._asdict(), "input_global_scale": torch.tensor([300.0])}
            return HeldQuantised(decl.name, nvfp4.decode(*nv), "nvfp4", stored)
        return Held(decl.name, x.to(getattr(torch, str(decl.stored))))

    def _buffer(self, name: str, layout: str, dtype: torch.dtype, values: torch.Tensor) -> Buffer:
        return Buffer(
            values.shape,
            dtype,
            self.session.device,
            values=values.to(self.session.device, dtype),
            narrow=_narrow(layout),
            gaps=self.gaps,
        )

    def _stored(self, values: Any) -> Any:
        """float64 as pages hold it."""
        return torch.as_tensor(np.asarray(values)).to(getattr(torch, self.form)).double().numpy()

    def _cache(self, where: str) -> KVCache:
        """Pages with the arrays of the case: poisoned, then written by the owner's kernels where there is a value."""
        cache = self.owner.kv_layout(_spec_of(self.case, self.form)).allocate(len(next(iter(self.case.state.values()))))
        cache.poison(range(cache.pages))
        device, dtype = self.owner.device, self.owner.dtypes["model"]
        for kinds, spec in ((("k", "v"), ops.kv_write), (("index",), ops.index_write)):
            arrays = [self.case.state[0, kind] for kind in kinds if (0, kind) in self.case.state]
            if not arrays:
                continue
            rows = [np.moveaxis(x, -2, 1).reshape(x.shape[0] * x.shape[-2], -1, x.shape[-1]) for x in arrays]
            slots = np.flatnonzero(~np.isnan(rows[0]).all((1, 2)))
            shape = ("T", *rows[0].shape[1:])
            x_ThD = [torch.as_tensor(x[slots]).to(device, dtype) for x in rows]
            data = [x_ThD[0], *(x.flatten(1) for x in x_ThD[1:]), torch.as_tensor(slots).to(device)]
            types: list[Any] = [StateType("kv", self.form, self.form), TensorType(shape, "T,h,D", "model")]
            if len(x_ThD) > 1:
                types.append(TensorType(("T", shape[1] * shape[2]), "T,C", "model"))
            types.append(TensorType(("T",), "T", "int64"))
            attrs = {"layer": 0}
            op = OpInstance(f"fill {spec.name}", spec, attrs, tuple(types), spec.types(attrs, types))
            found = self.owner.kernel(op, replace(self.step, tokens=max(1, len(slots))))
            if isinstance(found, Refusal):
                raise ContractViolation(
                    "arithmetic", f"has pages and no {spec.name}: {found.reason}", where=where, expected="a kernel"
                )
            space = Workspace(found.workspace_bytes, device)
            found.run([cache], [cache, *data], None, space.tensor)
        for key, got in _arrays(cache, self.case).items():
            if not np.array_equal(got, self._stored(self.case.state[key]), equal_nan=True):
                raise ContractViolation(
                    "arithmetic",
                    f"'{key[1]}' in pages is not what {'index_write' if key[1] == 'index' else 'kv_write'} was given",
                    where=where,
                    expected=f"the values in {self.form}, NaN where a poisoned page was not written",
                )
        return cache


def _narrow(layout: str) -> tuple[int, ...]:
    return tuple(i for i, axis in enumerate(layout.split(",")) if axis in ("T", "S", "R", "P"))


def _arrays(cache: KVCache, case: Case) -> dict[tuple[int, str], Any]:
    """What the pages hold, as `Case.state` has it."""
    return {
        (layer, kind): np.stack([cache.read(layer, page)[kind].double().cpu().numpy() for page in range(cache.pages)])
        for layer, kind in case.state
    }
