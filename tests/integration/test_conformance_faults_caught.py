"""Backends with one mistake each fail at a named item, with the rule that they break."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import numpy_example
from tests.support.faulty import Faulty, manifest, promising

from m31.conformance import oracle
from m31.conformance.bench import Bench
from m31.conformance.levels import contract, model, state
from m31.errors import ContractViolation
from m31.graph import Kernel
from m31.sdk.manifest import read_manifest

ITEMS = {"L0": contract.items, "L2": state.items, "L3": model.items}


def caught(backend: Any, item_id: str, scratch: Path) -> ContractViolation:
    bench = Bench(backend, scratch=scratch)
    item = next(item for item in ITEMS[item_id[:2]](bench.manifest) if item.id == item_id)
    with pytest.raises(ContractViolation) as found:
        item.judge(item.execute(bench))
    return found.value


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


# --- kernels --------------------------------------------------------------------------------------------------------


def sees_one_too_many(kernel: Kernel, outs: Any, ins: Any, weights: Any, space: Any) -> None:
    """Attention that reads the token after the query's: what a rejected draft left there, or poison."""
    at = 3 if len(ins) == 7 else 2
    ins = [*ins[:at], ins[at] + (ins[at] % 128 != 127).long(), *ins[at + 1 :]]
    kernel.run(outs, ins, weights, space)


def forgets_the_last_of_a_page(kernel: Kernel, outs: Any, ins: Any, weights: Any, space: Any) -> None:
    """A write that leaves what was there before in the last slot of each page."""
    keep = ins[-1] % 128 != 127
    kernel.run(outs, [ins[0], *(x[keep] for x in ins[1:])], weights, space)


def writes_twice_as_large(kernel: Kernel, outs: Any, ins: Any, weights: Any, space: Any) -> None:
    kernel.run(outs, [ins[0], ins[1] * 2, *ins[2:]], weights, space)


def spoils_a_row(kernel: Kernel, outs: Any, ins: Any, weights: Any, space: Any) -> None:
    """The fourth token of a step of several gets a little more."""
    kernel.run(outs, ins, weights, space)
    if len(outs[0]) > 3:
        outs[0][3].mul_(1.01)


def half_a_percent(kernel: Kernel, outs: Any, ins: Any, weights: Any, space: Any) -> None:
    kernel.run(outs, ins, weights, space)
    outs[0].mul_(1.005)


def second_best(kernel: Kernel, outs: Any, ins: Any, weights: Any, space: Any) -> None:
    """The two chosen experts in the other order, each with the other's weight."""
    kernel.run(outs, ins, weights, space)
    outs[1].copy_(outs[1].flip(1).clone())


def worst_block(kernel: Kernel, outs: Any, ins: Any, weights: Any, space: Any) -> None:
    kernel.run(outs, [torch.where(ins[0].isfinite(), -ins[0], ins[0]), ins[1]], weights, space)


@pytest.mark.parametrize(
    ("op", "fault", "item", "rule"),
    [
        ("kv_write", writes_twice_as_large, "L2/pages/write-read/kv-bfloat16", "pages"),
        ("kv_write", forgets_the_last_of_a_page, "L2/chunks/300-split-129", "order"),
        ("sparse_attention", sees_one_too_many, "L2/verify/rewind-of-3", "drafts"),
        ("linear", spoils_a_row, "L2/chunks/300-split-1", "order"),
        ("linear", spoils_a_row, "L2/batch/3-together", "order"),
        ("linear", spoils_a_row, "L2/verify/step-of-3", "drafts"),
        ("experts", half_a_percent, "L3/layers/random-m31/prefill/layer-1", "arithmetic"),
        ("router", second_best, "L3/layers/random-m31/prefill/layer-2", "arithmetic"),
        ("experts", half_a_percent, "L3/agreement/random-m31/default", "agreement"),
    ],
)
def test_a_kernel(op: str, fault: Any, item: str, rule: str, scratch: Path) -> None:
    assert caught(Faulty({op: fault}), item, scratch).rule == rule


def test_blocks_are_those_of_the_scores(scratch: Path) -> None:
    error = caught(Faulty({"block_select": worst_block}), "L3/layers/random-m31/decode/layer-0", scratch)
    assert error.rule == "arithmetic"
    assert "block_select" in str(error)


# --- declarations ---------------------------------------------------------------------------------------------------


def test_a_promise_of_equal_bits_is_tested(scratch: Path) -> None:
    for promise, item in (("batch_invariant", "L2/batch/3-together"), ("chunk_invariant", "L2/chunks/300-split-127")):
        backend = Faulty(manifest=manifest(determinism=promising(**{promise: True})))
        assert caught(backend, item, scratch).rule == "determinism"


def test_results_that_vary_break_a_promise(scratch: Path) -> None:
    backend = Faulty(manifest=manifest(determinism=promising(run_to_run=True)), noise={"linear": 1e-7})
    assert caught(backend, "L2/repeat/run-to-run", scratch).rule == "determinism"
    silent = Bench(Faulty(manifest=manifest(determinism=None), noise={"linear": 1e-8}), scratch=scratch)
    item = next(item for item in state.items(silent.manifest) if item.id == "L2/repeat/run-to-run")
    assert item.judge(item.execute(silent)).margin < 1  # type: ignore[operator]


def test_a_kernel_that_is_the_references(scratch: Path) -> None:
    from m31_numpy import NumpyBackend

    class Borrowing(NumpyBackend):  # type: ignore[misc]
        def open(self, **asked: Any) -> Any:
            session, inner = super().open(**asked), oracle.bench().session("float32")
            own = session.kernel

            def kernel(op: Any, step: Any) -> Any:
                found = own(op, step)
                if op.spec.name != "swiglu_oai":
                    return found
                other = inner.kernel(op, step)
                assert isinstance(other, Kernel)
                return replace(found, run=lambda *args: other.run(*args))

            session.kernel = kernel
            return session

    error = caught(Borrowing(numpy_example.MANIFEST), "L2/fallback/nothing-borrowed/random-bf16", scratch)
    assert error.rule == "claims"
    assert "claims swiglu_oai" in str(error)


# --- limits ---------------------------------------------------------------------------------------------------------


def test_a_session_that_serves_less_context_than_declared(scratch: Path) -> None:
    backend = Faulty(limits=lambda found: replace(found, max_context=4096))
    assert caught(backend, "L2/context/last-of-1048576", scratch).rule == "claims"


def test_the_limits_of_hopper_are_exact(scratch: Path) -> None:
    """262,144 tokens are taken, one more is refused by name, and so are drafts (MODEL.md §8)."""
    limits = read_manifest(Path(str(find_spec("m31_hopper").origin)).parent / "backend.toml").limits  # type: ignore[union-attr]
    bench = Bench(Faulty(manifest=manifest(name="hopper", limits=limits)), scratch=scratch)
    items = {item.id: item for item in contract.items(bench.manifest)}
    said = {
        case: items[f"L0/limits/{case}"].execute(bench).facts["note"]
        for case in ("context-exact", "context-and-one", "draft-and-one")
    }
    assert said["context-exact"].startswith("262,144 tokens are taken")
    assert "hopper serves at most 262,144 tokens, asked for 262,145" in said["context-and-one"]
    assert "does not draft 1 tokens" in said["draft-and-one"]
    assert "L0/limits/draft-exact" not in items


def test_a_session_that_drafts_less_than_declared(scratch: Path) -> None:
    backend = Faulty(limits=lambda found: replace(found, draft_tokens=3))
    bench = Bench(backend, scratch=scratch)
    item = next(item for item in contract.items(bench.manifest) if item.id == "L0/limits/draft-exact")
    with pytest.raises(ContractViolation, match="declares 64"):
        item.execute(bench)


def test_a_backend_that_takes_any_world(scratch: Path) -> None:
    class Careless(Faulty):
        def open(self, **asked: Any) -> Any:
            return super().open(**{**asked, "world": 1})

    assert caught(Careless(), "L0/refuses/world/2", scratch).rule == "refusals"


def test_a_backend_that_fails_instead_of_refusing(scratch: Path) -> None:
    class Crashing(Faulty):
        def open(self, **asked: Any) -> Any:
            torch.device(asked["device"] or "cpu")
            return super().open(**asked)

    error = caught(Crashing(), "L0/refuses/device/no-such-thing", scratch)
    assert error.rule == "refusals"
    assert "RuntimeError" in str(error)


def test_one_session_for_everybody(scratch: Path) -> None:
    class Shared(Faulty):
        kept: dict[str, Any] = {}  # noqa: RUF012

        def open(self, **asked: Any) -> Any:
            key = f"{asked['dtype']} {asked['arithmetic'].name}"
            if key not in self.kept:
                self.kept[key] = super().open(**asked)
            return self.kept[key]

    assert caught(Shared(), "L0/open/float64", scratch).rule == "opened"
