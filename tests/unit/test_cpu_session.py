"""The CPU backend as the core sees it: its manifest, what it refuses, what it holds, and a whole model on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import quantised
from tests.support.child import child
from tests.support.expert_files import ExpertFile, write_experts
from tests.unit.test_whole_model import logits

import m31_cpu
from m31 import ops
from m31.checkpoint import Checkpoint, write
from m31.engine.api import STEPS
from m31.engine.compiler import Compiler, whole
from m31.engine.engine import Engine
from m31.errors import BackendRefused, NonFiniteWeight
from m31.formats.arithmetic import NAMED
from m31.graph import COLLECTIVES, OpInstance, Refusal, Shard, StepClass, trace
from m31.ops import TensorDecl, TensorType, WeightDecl
from m31.sdk.backend import KVSpec, stored_as
from m31.sdk.manifest import read_manifest
from m31.sdk.serving import Serving
from m31_cpu.session import FACTORIES
from m31_reference import ReferenceBackend

MANIFEST = read_manifest(Path(m31_cpu.__file__).parent / "backend.toml")
WHOLE = Shard(0, 1)
STEP = StepClass(kind="decode", q_len=1, tokens=1, seqs=1, rows=1, pages=1)
NVFP4 = {"w1": "nvfp4", "w3": "nvfp4", "w2": "nvfp4"}
BF16 = {"w1": "bfloat16", "w3": "bfloat16", "w2": "bfloat16"}


def session(**changes: Any) -> Any:
    given = {
        "device": None,
        "dtype": "float32",
        "rank": 0,
        "world": 1,
        "arithmetic": NAMED["exact"],
        "options": {},
        **changes,
    }
    return m31_cpu.CpuBackend(MANIFEST).open(**given)


def instance(file: ExpertFile, stored: dict[str, str | None]) -> OpInstance:
    width = file.values["w1.0"].shape[1]
    slots = {
        s: TensorDecl(t.name, t.shape, (None, None), stored=stored[s.partition(".")[0]]) for s, t in file.slots.items()
    }
    attrs = {"alpha": 1.702, "beta": 1.0, "limit": 7.0, "routed_scaling_factor": 2.0, "experts": len(slots) // 3}
    inputs = (
        TensorType(("T", width), "T,C", "model"),
        TensorType(("T", 2), "T,K", "int64"),
        TensorType(("T", 2), "T,K", "accum"),
        WeightDecl("layer.experts", slots),
    )
    return OpInstance("experts_1", ops.experts, attrs, inputs, ops.experts.types(attrs, inputs))


# --- what it says of itself ---


def test_the_manifest_claims_the_text_model_and_what_else_falls_back() -> None:
    assert set(MANIFEST.ops) == set(ops.ALL) - set(COLLECTIVES)
    assert set(MANIFEST.ops) <= set(FACTORIES)
    assert {*MANIFEST.fallback} == set(MANIFEST.ops) | set(ops.ADAPTER)


def test_it_serves_the_processor_only() -> None:
    with pytest.raises(BackendRefused, match="device 'meta' is not served"):
        session(device="meta")


@pytest.mark.parametrize(
    ("stored", "text"),
    [
        ({"w1": None, "w3": None, "w2": None}, "traced without a checkpoint"),
        ({"w1": "int4", "w3": "int4", "w2": "int4"}, "int4"),
        ({"w1": "nvfp4", "w3": "bfloat16", "w2": "nvfp4"}, "w1 and w3 are stored in several ways"),
    ],
)
def test_experts_that_it_leaves_to_others(tmp_path: Path, stored: dict[str, str | None], text: str) -> None:
    file = write_experts(tmp_path / "w", BF16, 2, 64, 32)
    found = session().kernel(instance(file, stored), STEP)
    assert isinstance(found, Refusal)
    assert text in found.reason


def test_it_says_when_it_has_no_kernel() -> None:
    spec = next(iter(ops.ADAPTER.values()))
    found = session().kernel(OpInstance("adapter", spec, {}, (), ()), STEP)
    assert isinstance(found, Refusal)
    assert found.reason == "no native kernel in this release"


def test_a_kernel_says_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M31_NUM_THREADS", "3")
    monkeypatch.setenv("M31_CPU_ISA", "portable")
    file = write_experts(tmp_path / "w", BF16, 2, 64, 32)
    found = session().kernel(instance(file, dict(BF16)), STEP)
    assert found.name == "m31_cpu.experts.portable"
    assert "portable (M31_CPU_ISA asks for it), threads: 3" in found.why
    assert (found.arithmetic.operands, found.arithmetic.accumulate, found.arithmetic.output) == ("float32",) * 3


# --- what it holds ---


def test_a_global_scale_that_nothing_can_be_divided_by(tmp_path: Path) -> None:
    file = write_experts(tmp_path / "w", NVFP4, 2, 64, 32)
    data = bytearray(file.path.read_bytes())
    at = file.offsets["w3.1/global_scale"]
    data[at : at + 4] = bytes(4)
    file.path.write_bytes(data)
    with pytest.raises(NonFiniteWeight, match=r"w3\.1"):
        session().prepare(instance(file, dict(NVFP4)), file.slots, WHOLE)


def test_preparing_a_large_file_takes_no_memory(tmp_path: Path) -> None:
    """Resident memory, mapped pages included: 200 MB of experts, of which only global scales are touched."""
    script = """
        import sys
        from pathlib import Path
        import numpy as np
        from m31.checkpoint.lazy import MappedFile
        from tests.support.expert_files import lazy
        from tests.unit.test_cpu_session import WHOLE, NVFP4, instance, session
        from tests.support.expert_files import ExpertFile
        path, width, inner, experts = Path(sys.argv[1]), 2048, 3072, 20
        parts = (("packed", "U8", 2), ("scale", "F8_E4M3", 16), ("global_scale", "F32", 0))
        plans, size = [], 0
        with path.open("wb") as out:  # sparse: zeros that were never written
            for expert in range(experts):
                for name in ("w1", "w3", "w2"):
                    n, k = (width, inner) if name == "w2" else (inner, width)
                    placed = {}
                    for role, dtype, per in parts:
                        placed[role] = (dtype, (n, k // per) if per else (1,), size)
                        if not per:
                            out.seek(size)
                            out.write(np.float32(100).tobytes())
                        size += n * k // per if per else 4
                    plans.append((f"{name}.{expert}", (n, k), placed))
        file = MappedFile(path, size)
        slots = {slot: lazy(slot, "nvfp4", shape, placed, file) for slot, shape, placed in plans}
        shapes = ExpertFile(path, slots, {"w1.0": np.empty((inner, width))})
        def resident():
            lines = Path("/proc/self/status").read_text().splitlines()
            return int(next(x for x in lines if x.startswith("VmRSS")).split()[1]) * 1024
        made, op = session(), instance(shapes, dict(NVFP4))
        before = resident()
        handle = made.prepare(op, slots, WHOLE)
        print(size, resident() - before, len(handle.in_place))
    """
    size, grown, slots = (int(word) for word in child(script, str(tmp_path / "large")).split())
    assert size > 200e6
    assert slots == 60
    assert grown < 2e7  # of 200 MB; the interpreter itself comes and goes by a few


# --- a whole model ---


def written(folder: Path, target: str) -> Checkpoint:
    """A small checkpoint, quantised as a target says or not at all."""
    mapping = quantised.bf16_config()
    if target == "bf16":
        write(folder, mapping, quantised.bf16_weights(mapping).items(), max_shard_bytes=1 << 20, extra_files={})
    else:
        quantised.write_quantised(folder, mapping, target)
    return Checkpoint.open(folder)


def compiled(serving: Serving, checkpoint: Checkpoint) -> Callable[[], Engine]:
    """Makes engines, each with pages of its own, on the same prepared weights."""
    text = checkpoint.config.text
    graph = trace(text, stored=lambda name: stored_as(checkpoint.tensor(name)), pages=("float32", "float32"))
    made = Compiler(serving, graph, text, whole(serving, checkpoint.tensor))
    spec = KVSpec.of(text, "float32", "float32")
    layout = serving.kv_layout(spec, made.assigned(STEPS))
    return lambda: Engine(
        compiler=made,
        cache=layout.allocate(32),
        page_tokens=spec.page_tokens,
        chunk_tokens=2048,
        prefix_cache=False,
    )


@pytest.fixture
def native() -> Serving:
    """This backend, with the reference to fall back to."""
    reference = ReferenceBackend(MANIFEST).open(device=None, dtype="float32", rank=0, world=1)
    return Serving("cpu", session(), may_fall_back=MANIFEST.fallback, spare=("reference", reference))


@pytest.mark.parametrize("target", ["m31", "m3-mxfp8", "bf16"])
def test_a_model_on_it_is_the_references(tmp_path: Path, native: Serving, target: str) -> None:
    """Every op of it runs here, in one program; nothing falls back."""
    checkpoint = written(tmp_path / target, target)
    reference = ReferenceBackend(MANIFEST).open(device=None, dtype="float32", rank=0, world=1)
    engine, ids = compiled(native, checkpoint)(), list(range(3, 40))
    got, want = logits(engine, ids), logits(compiled(Serving("reference", reference), checkpoint)(), ids)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    assert not sum(engine.fallback_calls.values())


@pytest.mark.parametrize("target", ["m31", "m3-mxfp8", "bf16"])
def test_every_damaged_matrix_is_named_and_leaves_nothing_behind(tmp_path: Path, native: Serving, target: str) -> None:
    """In a prompt and in a step of one token: what NaN makes of later layers is nobody's fault, and once the matrix is
    whole again the next request is served as ever."""
    checkpoint = written(tmp_path / target, target)
    engine, seen = compiled(native, checkpoint), 0
    for ids in (list(range(3, 40)), [3]):
        clean = logits(engine(), ids)
        for name in sorted(checkpoint.names):
            if ".experts." in name or len(checkpoint.tensor(name).shape) != 2:
                continue  # experts: test_cpu_experts; vectors are looked at when they are prepared
            tensor = checkpoint.tensor(name)
            stored = tensor.parts()["weight" if tensor.format == "plain" else "scale"].load()
            number = stored if stored.is_floating_point() else stored.view(torch.float8_e8m0fnu)
            kept = number[3, -1].item()  # row 3 is one that the lookups need
            number[3, -1] = torch.nan  # in a private map: kernels read it, and the file stays as it is
            with pytest.raises(NonFiniteWeight) as caught:
                logits(engine(), ids)
            assert name in str(caught.value)
            number[3, -1] = kept
            assert torch.equal(logits(engine(), ids), clean)
            seen += 1
    assert seen > 40
