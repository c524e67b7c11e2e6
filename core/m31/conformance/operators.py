"""Rule `arithmetic`, op by op: every case of an op, on the kernels of a session, against the definition in float64."""

from __future__ import annotations

from dataclasses import dataclass, field

from m31.conformance.cases import cases_of, last_axes, specs, step_of, storable
from m31.conformance.execution import Run, execute, judge_case, kv_spec
from m31.errors import BackendRefused
from m31.graph import Refusal
from m31.ops import Case, OpSpec
from m31.sdk.backend import Session


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
    """`check_op` for every op, by name: of the text model, of the draft head, of adapters, and fused ones; what the
    session does not serve is in `Checked.refused`."""
    return {name: check_op(session, spec, pages=pages, gaps=gaps) for name, spec in specs().items()}


def check_op(session: Session, spec: OpSpec, *, pages: Session | None = None, gaps: bool = True) -> Checked:
    """Rule `arithmetic`, on the cases of an op: the op's own and small ones of `m31.conformance.cases`; L1
    (`m31.conformance.levels.ops`) has all, in every format.

    Each runs in every way in which its weights can be stored that the session serves. Inputs and outputs lie inside
    larger tensors, as the narrowed buffers of a plan do; outputs start as NaN. Judged are: that every element of every
    output is written, that nothing else is, inputs and what surrounds the workspace included, that the values are
    within the bound of the declared arithmetic (`m31.conformance.op_bounds`; exactly right for an op whose criterion
    says so), that zeros, a constant and a shuffled result would not be, and that the weights are what they should be
    (rule `losses`). Pages are filled by the kernels that write pages, and read back.

    Args:
        session: whose kernels run.
        spec: of `m31.ops.ALL`, `DRAFT` or `ADAPTER`, or a fused one, whose bound follows from its body
            (`m31.conformance.composition`).
        pages: another session, of whose pages and page-writing kernels the first one's kernels make use.
        gaps: also with something between any two elements of inputs and outputs.

    Raises:
        ContractViolation: names the kernel and the case.
    """
    done = Checked()
    for case in cases_of(spec):
        for stored in storable(spec, last_axes(case, spec)[0]):
            _check_case(session, pages or session, spec, case, stored, gaps, done)
    return done


def _check_case(
    session: Session, owner: Session, spec: OpSpec, case: Case, stored: str, gaps: bool, done: Checked
) -> None:
    forms = _page_formats(session, owner, case, done) if case.state else [""]
    for form in forms:
        run = Run(spec, case, stored, (form, form), gaps=False)
        kernel = session.kernel(run.op, step_of(spec, case))
        if isinstance(kernel, Refusal):
            done.refused[run.label] = kernel.reason
            continue
        reason = None
        for between in (False, True) if gaps and form == forms[0] else (False,):
            way = Run(spec, case, stored, (form, form), between)
            _, reason = judge_case(way, execute(session, owner, way, kernel))
        if reason:
            done.unjudged[run.label] = reason
        else:
            done.ran.append(run.label)


def _page_formats(session: Session, owner: Session, case: Case, done: Checked) -> list[str]:
    """Those of the plain formats that the owner of the pages has; why it has none of them is noted."""
    found, reasons = [], []
    for form in dict.fromkeys((str(session.dtypes["model"]).removeprefix("torch."), "bfloat16")):
        try:
            owner.kv_layout(kv_spec(case, (form, form)))
        except BackendRefused as refusal:
            reasons.append(str(refusal))
        else:
            found.append(form)
    if not found:
        done.refused[case.id] = "; ".join(reasons)
    return found
