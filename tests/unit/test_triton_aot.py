"""Compiling ahead of time for devices that are not here, and the checks that a compiler's success does not make."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from tests.unit.test_triton_session import TEXT, engine, processor
from tests.unit.test_whole_model import ids_for, logits
from torch import Tensor
from triton.runtime.driver import driver

from m31.formats.layout import ScaleOrder
from m31_triton.aot import TARGETS, Code, KernelSpec, build, compile_launch, faults, launch_of
from m31_triton.errors import CodeRejected
from m31_triton.interpreter import interpret
from m31_triton.launch import Launch, interpreted
from m31_triton.registry import DECODE, SMALL, SPECS, launch_op


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile here and now; nothing that an earlier run left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.cache, "dir", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", SPECS)
def test_every_kernel_compiles_to_the_wanted_code(name: str, target: str) -> None:
    code = build(SPECS[name], TARGETS[target])
    machine = target if target.startswith("gfx") else f".target {target}a"
    assert machine in code.text
    assert code.binary.startswith(b"\x7fELF")
    assert code.shared > 0 or not name.startswith("projection")


def test_every_spec_expects_something_on_every_target() -> None:
    assert {name for name, s in SPECS.items() if not all(s.must.get(target) for target in TARGETS)} == set()


def test_what_is_compiled_has_the_sizes_of_one_device_of_four() -> None:
    launch = launch_of(SPECS["sparse_decode/nvfp4"])
    assert launch.grid == (32, 1, 4)
    assert {n: launch.arguments[n] for n in ("GROUP", "D", "PAGE", "NVFP4", "V_QUAD", "TOPK")} == {
        "GROUP": 16,
        "D": 128,
        "PAGE": 128,
        "NVFP4": True,
        "V_QUAD": True,
        "TOPK": 16,
    }
    with pytest.raises(CodeRejected, match="0 launches of none; expected one"):
        launch_of(KernelSpec(name="none", kernel="none", launch=lambda run: None, must={}, must_not={}))


def signature(launch: Launch) -> dict[str, str]:
    """What a compilation depends on besides sizes: which arguments there are, and the dtype or type of each."""
    given = {n: str(v.dtype) if isinstance(v, Tensor) else type(v).__name__ for n, v in launch.arguments.items()}
    return given | {f"option {name}": type(value).__name__ for name, value in launch.options.items()}


@pytest.mark.parametrize(("pages", "order", "units"), [("bfloat16", "linear", 1), ("nvfp4", "token_quad", 64)])
def test_what_is_compiled_is_what_a_model_launches(pages: str, order: ScaleOrder, units: int) -> None:
    """A small model on the reference's pages: every kernel is launched with the argument types of its spec."""
    launched: dict[str, dict[str, str]] = {}

    def run(launch: Launch) -> None:
        launched[launch.name] = signature(launch)
        interpreted(launch)

    logits(engine(processor("w16a16", run=run, units=units), pages, order), ids_for(TEXT, 1))
    specs = [spec for spec in SPECS.values() if spec.name.partition("/")[2] not in {"bfloat16", "nvfp4"} - {pages}]
    assert launched.keys() == {spec.kernel for spec in specs} - ({"merge_splits"} if units == 1 else set())
    for spec in specs:
        if spec.kernel in launched:
            assert signature(launch_of(spec)) == launched[spec.kernel], spec.name


def test_an_op_that_the_session_refuses_is_no_spec() -> None:
    with pytest.raises(CodeRejected, match="op qkv_insert over fp8 pages: the session does not serve it"):
        launch_op(lambda launch: None, "qkv_insert", DECODE, "fp8", SMALL)


GOOD = Code(text="mma.sync ret;", binary=b"", shared=0, columns=0, scratch=0)
SPEC = KernelSpec(
    name="s", kernel="s", launch=lambda run: None, must={"sm_90": ("mma",)}, must_not={"sm_90": ("tf32",)}
)


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (dataclasses.replace(GOOD, text="ret;"), "lacks mma"),
        (dataclasses.replace(GOOD, text="mma.tf32"), "has tf32"),
        (dataclasses.replace(GOOD, text="mma; trap;"), "traps"),
        (dataclasses.replace(GOOD, shared=232_449), "needs 232449 bytes of shared memory of 232448"),
        (dataclasses.replace(GOOD, columns=1), "1 columns of tensor memory of 0"),
        (dataclasses.replace(GOOD, scratch=8), "spills 8 bytes"),
    ],
)
def test_each_fault_is_found(code: Code, fault: str) -> None:
    assert faults(SPEC, TARGETS["sm_90"], GOOD) == []
    [found] = faults(SPEC, TARGETS["sm_90"], code)
    assert fault in found


@triton.jit
def _too_much(x, y, n, N: tl.constexpr):
    """A product whose operands, loaded five iterations ahead, fit into no shared memory."""
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    acc = tl.zeros((N, N), tl.float32)
    for k in tl.range(n, num_stages=5):
        acc = tl.dot(tl.load(x + 2 * k * N * N + at), tl.load(x + (2 * k + 1) * N * N + at), acc)
    tl.store(y + at, acc)


@triton.jit
def _wrong(x, y):
    tl.store(y, tl.load(x) @ 3)


def _spec(kernel: object, must: str, **arguments: object) -> KernelSpec:
    launch = Launch(kernel, (1,), arguments, {"num_warps": 8, "enable_fp_fusion": True})
    return KernelSpec(
        name="bad", kernel=launch.name, launch=lambda run: run(launch), must={"sm_90": (must,)}, must_not={}
    )


def test_a_kernel_that_no_device_can_run_is_rejected() -> None:
    """Triton compiles it."""
    x, y = torch.empty(32, 128, 128, dtype=torch.bfloat16), torch.empty(128, 128)
    with pytest.raises(CodeRejected, match=r"bad' for sm_90: needs \d+ bytes of shared memory of 232448"):
        build(_spec(_too_much, "wgmma", x=x, y=y, n=16, N=128), TARGETS["sm_90"])


def test_code_without_the_wanted_instruction_is_rejected() -> None:
    spec = dataclasses.replace(SPECS["qkv_insert/bfloat16"], must={"sm_90": (r"tcgen05\.mma",)})
    with pytest.raises(CodeRejected, match=r"qkv_insert/bfloat16' for sm_90: lacks tcgen05"):
        build(spec, TARGETS["sm_90"])


def test_a_kernel_that_does_not_compile_is_rejected_with_the_reason() -> None:
    x = torch.empty(1)
    with pytest.raises(CodeRejected, match=r"kernel _wrong for sm_90: does not compile: "):
        compile_launch(Launch(_wrong, (1,), {"x": x, "y": x}), TARGETS["sm_90"])
    with pytest.raises(CodeRejected, match=r"nothing is expected of the code"):
        build(_spec(_wrong, "x", x=x, y=x), TARGETS["gfx950"])


@triton.jit
def _double(x, y):
    i = tl.arange(0, 16)
    tl.store(y + i, tl.load(x + i) * 2)


def test_interpreting_and_compiling_do_not_disturb_each_other() -> None:
    """The same object, in turns; the compiled code is the same before and after, and no driver is left behind."""
    before = driver._active
    x, y = torch.arange(16.0), torch.zeros(16)
    launch = Launch(_double, (1,), {"x": x, "y": y})
    first = {name: compile_launch(launch, target).text for name, target in TARGETS.items()}
    interpret(_double, (1,), x=x, y=y)
    assert torch.equal(y, 2 * x)
    _double.device_caches.clear()
    second = {name: compile_launch(launch, target).text for name, target in TARGETS.items()}
    assert first == second
    assert len({re.sub(r"\s", "", text) for text in first.values()}) == len(TARGETS)
    assert driver._active is before


def test_the_cache_of_these_tests_is_their_own(tmp_path: Path) -> None:
    assert "triton" in Path(triton.knobs.cache.dir).name
