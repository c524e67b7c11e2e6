"""Kernels with one fault each, of every op: `check_op` catches them by the kernel's name and the case's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.unit.test_contract_drills import reference, violated

from m31 import ops
from m31.conformance import check_op
from m31.conformance.cases import cases_of, specs
from m31.conformance.op_bounds import BOUNDS
from m31.graph import Arithmetic, Kernel, OpInstance, StepClass
from m31.ops.fused import FUSED

Run = Callable[[Any, Any, Any, Any], None]
Fault = Callable[[OpInstance, Run], Run]


class Faulty:
    """The reference, whose kernels of one op are changed."""

    def __init__(self, name: str, fault: Fault, **kernel: Any) -> None:
        self._real, self._name, self._fault, self._changes = reference(), name, fault, kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def kernel(self, op: OpInstance, step: StepClass) -> Any:
        found = self._real.kernel(op, step)
        if op.spec.name != self._name or not isinstance(found, Kernel):
            return found
        return replace(found, run=self._fault(op, found.run), **self._changes)


def after(change: Callable[[Any], Any]) -> Fault:
    """The right result, changed."""

    def fault(op: OpInstance, run: Run) -> Run:
        def faulty(outs: Any, ins: Any, w: Any, workspace: Any) -> None:
            run(outs, ins, w, workspace)
            change(outs)

        return faulty

    return fault


def before(change: Callable[[list[Any]], None]) -> Fault:
    """The right kernel on changed inputs."""

    def fault(op: OpInstance, run: Run) -> Run:
        def faulty(outs: Any, ins: Any, w: Any, workspace: Any) -> None:
            mine = [x.clone() if isinstance(x, torch.Tensor) else x for x in ins]
            change(mine)
            run(outs, mine, w, workspace)

        return faulty

    return fault


def zeros(outs: Any) -> None:
    outs[0].zero_()


def constant(outs: Any) -> None:
    outs[0].fill_(float(outs[0].mean()) if outs[0].numel() else 0.0)


def shuffled(outs: Any) -> None:
    outs[0].copy_(outs[0].roll(1, 0))


def row_left(outs: Any) -> None:
    outs[0][-1:].fill_(torch.nan)


def past_the_end(outs: Any) -> None:
    x = outs[0]
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    torch.as_strided(x, (1,), (1,), x.storage_offset() + last + 1).zero_()


def before_the_start(outs: Any) -> None:
    torch.as_strided(outs[0], (1,), (1,), outs[0].storage_offset() - 1).zero_()


def into_the_input(op: OpInstance, run: Run) -> Run:
    def faulty(outs: Any, ins: Any, w: Any, workspace: Any) -> None:
        run(outs, ins, w, workspace)
        ins[0].zero_()

    return faulty


def caught(name: str, fault: Fault, said: str, **kernel: Any) -> None:
    with violated("arithmetic") as error:
        check_op(Faulty(name, fault, **kernel), SPECS[name])  # type: ignore[arg-type]
    assert f"kernel m31_reference.{name}, case {name}/" in str(error.value)
    assert said in str(error.value)


SPECS = {**ops.ALL, **ops.DRAFT, **ops.ADAPTER}
NUMBERS = [*BOUNDS, "embedding", "gather_rows", "round_channels", "round_heads"]


@pytest.mark.parametrize("name", [n for n in NUMBERS if n != "all_reduce"])
@pytest.mark.parametrize("fault", [zeros, constant, shuffled, row_left, past_the_end, before_the_start])
def test_results_that_are_none(name: str, fault: Any) -> None:
    said = {
        row_left: "elements",
        past_the_end: "elements around 'output",
        before_the_start: "elements around 'output",
    }.get(fault, "")
    caught(name, after(fault), said)


@pytest.mark.parametrize("name", ["linear", "experts", "swiglu_oai", "sparse_attention"])
def test_an_input_that_is_written(name: str) -> None:
    caught(name, into_the_input, "elements of or around '")


def unscaled(outs: Any) -> None:
    outs[0].mul_(1 + 1e-4)


@pytest.mark.parametrize("name", [n for n in BOUNDS if n not in ("all_reduce", "rope_table")])
def test_a_result_that_is_off_by_a_ten_thousandth(name: str) -> None:
    caught(name, after(unscaled), "declares float32, accumulated in float32, written in float32, and is off by")


def both_as_gate(op: OpInstance, run: Run) -> Run:
    def faulty(outs: Any, ins: Any, w: Any, workspace: Any) -> None:
        values = {s: w.tensors[s.replace("w3", "w1")] for s in w.tensors}
        run(outs, ins, replace(w, tensors=values), workspace)

    return faulty


def without_the_one(op: OpInstance, run: Run) -> Run:
    def faulty(outs: Any, ins: Any, w: Any, workspace: Any) -> None:
        run(outs, ins, replace(w, tensors={"weight": w.tensors["weight"] - 1}), workspace)

    return faulty


def bias_in_the_weights(op: OpInstance, run: Run) -> Run:
    def faulty(outs: Any, ins: Any, w: Any, workspace: Any) -> None:
        run(outs, ins, w, workspace)
        score = torch.sigmoid(ins[0] @ w.tensors["weight"].t()) + w.tensors["bias"]
        chosen = score.gather(1, outs[0])
        outs[1].copy_(chosen / chosen.sum(-1, keepdim=True))

    return faulty


def the_higher_id_of_equals(op: OpInstance, run: Run) -> Run:
    def faulty(outs: Any, ins: Any, w: Any, workspace: Any) -> None:
        run(outs, ins, w, workspace)
        if not w.tensors["weight"].any():
            outs[0].copy_(len(w.tensors["bias"]) - 1 - outs[0])

    return faulty


def set_attr(name: str, change: Callable[[Any], Any]) -> Fault:
    def fault(op: OpInstance, run: Run) -> Run:
        other = replace(op, attrs={**op.attrs, name: change(op.attrs[name])})
        found = reference().kernel(other, StepClass(kind="mixed", q_len=0, tokens=64, seqs=4, rows=64, pages=64))
        assert isinstance(found, Kernel)
        return found.run

    return fault


def change_in(at: int, change: Callable[[Any], Any]) -> Fault:
    def changed(ins: list[Any]) -> None:
        ins[at] = change(ins[at])

    return before(changed)


def one_block_less(blocks: torch.Tensor) -> torch.Tensor:
    second = torch.where(blocks[..., 1:2] < 0, blocks[..., :1], blocks[..., 1:2])
    return torch.cat([second, blocks[..., 1:]], -1)


def padding_is_written(slots: torch.Tensor) -> torch.Tensor:
    return slots.clamp(min=0)


def signs(op: OpInstance, run: Run) -> Run:
    """The handle tells the truth, and the kernel uses something else."""

    def faulty(outs: Any, ins: Any, w: Any, workspace: Any) -> None:
        run(outs, ins, replace(w, tensors={s: torch.sign(v) for s, v in w.tensors.items()}), workspace)

    return faulty


FAULTS: dict[str, tuple[str, Fault]] = {
    "up is gate": ("experts", both_as_gate),
    "factor twice": ("experts", set_attr("routed_scaling_factor", lambda x: x * x)),
    "other limit": ("experts", set_attr("limit", lambda x: 2 * x)),
    "other alpha": ("swiglu_oai", set_attr("alpha", lambda x: 1.0)),
    "missing one": ("gemma_rmsnorm", without_the_one),
    "missing one in heads": ("head_rmsnorm", without_the_one),
    "other eps": ("gemma_rmsnorm", set_attr("eps", lambda x: 1e-5)),
    "bias in weights": ("router", bias_in_the_weights),
    "tie upwards": ("router", the_higher_id_of_equals),
    "rotation backwards": ("rope", change_in(2, lambda sin: -sin)),
    "table of the next": ("rope_table", change_in(0, lambda x: x + 1)),
    "next token": ("embedding", change_in(0, lambda x: (x + 1) % 50)),
    "signs": ("linear", signs),
    "signs of experts": ("experts", signs),
    "dropped tail": ("linear", change_in(0, lambda x: torch.cat([x[:, :-1], x[:, -1:] * 0], 1))),
    "dropped tail of the head": ("lm_head", change_in(0, lambda x: torch.cat([x[:, :-1], x[:, -1:] * 0], 1))),
    "one position back": ("dense_attention", change_in(2, lambda x: (x - 1).clamp(min=0))),
    "sparse one position back": ("sparse_attention", change_in(3, lambda x: (x - 1).clamp(min=0))),
    "one block less": ("sparse_attention", change_in(2, one_block_less)),
    "heads swapped": ("sparse_attention", change_in(2, lambda x: x.flip(1))),
    "scale twice": ("dense_attention", set_attr("scale", lambda x: x * x)),
    "scores one back": ("block_scores", change_in(2, lambda x: (x - 1).clamp(min=0))),
    "local not forced": ("block_select", set_attr("local_blocks", lambda x: 0)),
    "padding trusted": ("kv_write", change_in(3, padding_is_written)),
    "padding of index keys": ("index_write", change_in(2, padding_is_written)),
    "one slot further": ("kv_write", change_in(3, lambda x: torch.where(x < 0, x, (x + 1) % 12))),
    "values for keys": ("kv_write", change_in(1, lambda x: x * 2)),
    "truncated": ("round_channels", change_in(0, lambda x: (x.view(torch.int32) & -65536).view(torch.float32))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_kernel_that_computes_something_else(fault: str) -> None:
    name, change = FAULTS[fault]
    caught(name, change, "")


def test_a_workspace_that_is_overrun() -> None:
    def overrun(op: OpInstance, run: Run) -> Run:
        def faulty(outs: Any, ins: Any, w: Any, workspace: Any) -> None:
            run(outs, ins, w, workspace)
            torch.as_strided(workspace, (80,), (1,), workspace.storage_offset()).zero_()

        return faulty

    caught("add", overrun, "writes around its workspace", workspace_bytes=64)


def test_a_declaration_that_lets_anything_through() -> None:
    for name in ("experts", "dense_attention", "linear"):
        vague = Arithmetic("float32", "e2m1", "float32")
        with violated("arithmetic") as error:
            check_op(Faulty(name, after(lambda outs: None), arithmetic=vague), ops.ALL[name])  # type: ignore[arg-type]
        assert "would pass" in str(error.value)


@pytest.mark.parametrize("fault", [zeros, constant, shuffled, row_left, past_the_end])
def test_operands_without_a_bound_excuse_no_nonsense(fault: Any) -> None:
    for name in ("experts", "dense_attention", "linear"):
        coarse = Arithmetic("e2m1*float32", "float32", "float32")
        caught(name, after(fault), "", arithmetic=coarse)


def test_what_has_no_bound_is_said() -> None:
    coarse = Arithmetic("e2m1*float32", "float32", "float32")
    done = check_op(Faulty("experts", after(lambda outs: None), arithmetic=coarse), ops.experts)  # type: ignore[arg-type]
    assert not done.ran
    assert any("no definition of experts quantises e2m1" in reason for reason in done.unjudged.values())
    done = check_op(reference(), FUSED["add_norm"])  # which it does not serve
    assert not done.ran
    assert set(done.refused.values()) == {"the reference does not implement it"}


def test_every_op_with_a_bound_has_one() -> None:
    assert {name for name, spec in SPECS.items() if spec.criterion == "bound"} == {*BOUNDS, "router"}
    for spec in specs().values():
        assert len({case.id for case in cases_of(spec)}) == len(list(cases_of(spec)))


@pytest.mark.parametrize(
    ("name", "operands", "said"),
    [
        ("linear", "bf16", "'bf16', which is the name of no format"),
        ("linear", "bfloat16*fp8", "'fp8', which is the name of no format"),
        ("swiglu_oai", "mxfp8", "no definition of swiglu_oai quantises"),
    ],
)
def test_a_declaration_that_nobody_can_judge_frees_of_no_bound(name: str, operands: str, said: str) -> None:
    """A kernel that is 3% off is far outside of every bound, and much nearer to the result than nonsense."""
    slightly = after(lambda outs: outs[0].mul_(1.03))
    caught(name, slightly, said, arithmetic=Arithmetic(operands, "float32", "float32"))
