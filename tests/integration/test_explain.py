"""`m31 explain`: what is shown is what runs; fallbacks are marked, fusions counted, no weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support import tiny
from tests.support.fusing import Composed
from tests.unit.test_serving import OTHERS, Partial, compiler

from m31.cli import demo
from m31.cli.main import main
from m31.engine.api import STEPS
from m31.engine.compiler import Compiler, whole
from m31.engine.explain import Row, explain
from m31.errors import NoKernel
from m31.graph import trace
from m31.sdk.serving import Serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("explain") / "demo"
    demo.write(target, seed=0, layers=4)
    return target


def calls(rows: list[Row], step: str, *, fused: bool) -> int:
    """How many calls a table stands for."""
    total = 0
    for row in rows:
        if (row.step, row.fused) == (step, fused):
            layers = [part.split("-") for part in row.layers.split(", ")] if row.layers else []
            total += row.calls * (sum(int(p[-1]) - int(p[0]) + 1 for p in layers) or 1)
    return total


def test_every_call_of_the_graph_is_in_the_table() -> None:
    small = tiny.text(num_layers=6, mlp=("dense", "moe", "dense", "moe", "moe", "dense"))
    graph = trace(small)
    serving = Serving("reference", tiny.engine(small, tiny.weights(graph, 0), dtype="float64").compiler.serving.session)
    made = Compiler(serving, graph, small, whole(serving, lambda name: pytest.fail(f"{name} was read")))  # type: ignore[arg-type, return-value]
    rows = explain(made, small, STEPS)
    for step in STEPS:
        for fused in (False, True):
            assert calls(rows, step.kind, fused=fused) == len(graph.calls)
    assert {(row.layers, row.kind) for row in rows} == {
        ("0, 2, 5", "sparse attention, dense"),
        ("1, 3-4", "sparse attention, moe"),
        ("", "outside the layers"),
    }


def test_fallbacks_are_marked_with_the_reason() -> None:
    made = compiler(Partial("experts", step="decode"), may=(*OTHERS, "experts"))
    rows = explain(made, tiny.text(num_layers=2), STEPS)
    mine = {(row.step, row.by, row.fallback) for row in rows if row.op == "experts"}
    assert mine == {("decode", "partial", None), ("mixed", "reference", "no experts at mixed")}
    assert {row.by for row in rows if row.op != "experts"} == {"reference"}
    assert all(row.fallback for row in rows if row.op != "experts")


class Fusing(Composed):
    def fusions(self) -> tuple[str, ...]:
        return ("qkv_insert", "add_norm")


def test_before_and_after_fusion() -> None:
    small = tiny.text(num_layers=2)
    graph = trace(small)
    real = tiny.engine(small, tiny.weights(graph, 0), dtype="float64").compiler.serving.session
    serving = Serving("reference", Fusing(real))  # type: ignore[arg-type]
    made = Compiler(serving, graph, small, whole(serving, lambda name: pytest.fail(f"{name} was read")))  # type: ignore[arg-type, return-value]
    rows = explain(made, small, STEPS[:1])
    before, after = ({row.op for row in rows if row.fused is fused} for fused in (False, True))
    assert {"qkv_insert", "add_norm"} <= after
    assert "kv_write" in before - after
    assert calls(rows, "decode", fused=True) == len(made.fused(STEPS[0])[0].calls) < len(graph.calls)


def test_an_op_that_nobody_serves_is_an_error() -> None:
    with pytest.raises(NoKernel, match="no kernel for experts"):
        explain(compiler(Partial(), may=OTHERS), tiny.text(num_layers=2), STEPS)


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(folder), "--backend", "reference", "--arithmetic", "w4a16"]) == 0
    shown = capsys.readouterr().out
    assert "arithmetic w4a16; pages m31-reference:v2:kv=bfloat16:index=bfloat16" in shown
    assert "decode step, nothing is fused" in shown
    assert "9 x linear" in shown
    (line,) = {line for line in shown.splitlines() if "9 x linear " in line}
    assert "bfloat16*float32 -> float32 -> bfloat16 " in line
    assert line.endswith("   plain torch, imitating w4a16")
    assert main(["explain", str(folder), "--backend", "reference", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["backend"] == "reference"
    assert {row["op"] for row in found["ops"]} >= {"experts", "linear", "lm_head"}
    assert main(["explain", str(folder / "absent"), "--backend", "reference"]) == 1
    assert main(["explain", str(folder), "--backend", "reference", "--max-context", "5"]) == 2
