"""The example backend, which is written against the public SDK alone and knows no torch: in this process, op by op and
as a whole model; then installed with m31 into an environment of its own and run from the command line."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import tiny
from tests.unit.import_rules import backend_faults, files

from m31 import config, ops
from m31 import graph as graph_room
from m31.config import Text
from m31.engine.compiler import Compiler, whole
from m31.engine.engine import Engine, Sequence
from m31.errors import BackendRefused, LayoutMismatch, NonFiniteWeight
from m31.graph import DefaultPlan, Kernel, OpInstance, Refusal, Shard, StepBatch, StepClass, trace
from m31.ops import Case, OpSpec
from m31.sdk.backend import KVCache, KVSpec, Session
from m31.sdk.manifest import read_manifest
from m31.sdk.serving import Serving

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "numpy_backend"
sys.path.append(str(EXAMPLE))  # not installed here: the last test installs it where it belongs

from m31_numpy import NumpyBackend  # noqa: E402

MANIFEST = read_manifest(EXAMPLE / "m31_numpy" / "backend.toml")
CASES = [(spec, case) for spec in ops.ALL.values() for case in spec.cases()]
STEP = StepClass(kind="mixed", q_len=0, tokens=16, seqs=4, rows=16, pages=16)
WHOLE = Shard(rank=0, world=1)
OPEN: dict[str, Any] = {
    "device": None,
    "dtype": "float32",
    "rank": 0,
    "world": 1,
    "arithmetic": None,
    "weight_cache_bytes": None,
}


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    """numpy warns where torch is silent: an invalid or overflowing operation on values that count is a fault."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


@pytest.fixture(scope="module")
def session() -> Session:
    return NumpyBackend(MANIFEST).open(**OPEN)


def kernel(session: Session, spec: OpSpec, attrs: Mapping[str, Any]) -> Kernel:
    found = session.kernel(OpInstance("op", spec, attrs, (), ()), STEP)
    assert isinstance(found, Kernel), found
    return found


# --- ops -------------------------------------------------------------------------------------


def pages(session: Session, state: Mapping[tuple[int, str], Any], form: str = "float32") -> KVCache:
    """A cache that holds the arrays of a case, written by the backend's own kernels."""
    index = state.get((0, "index"))
    k = state.get((0, "k"))
    if k is None:
        k = np.zeros((len(index), 1, index.shape[1], 2))
    spec = KVSpec(
        indexed=(index is not None,),
        kv_heads=k.shape[1],
        head_dim=k.shape[3],
        index_dim=index.shape[2] if index is not None else 0,
        page_tokens=k.shape[2],
        kv_format=form,  # type: ignore[arg-type]
        index_format=form,  # type: ignore[arg-type]
    )
    cache = session.kv_layout(spec).allocate(len(k))
    slots = torch.arange(len(k) * spec.page_tokens)
    k_ThD, v_ThD = (
        torch.tensor(x, dtype=torch.float32).transpose(1, 2).flatten(0, 1) for x in (k, state.get((0, "v"), k))
    )
    kernel(session, ops.kv_write, {"layer": 0}).run([cache], [cache, k_ThD, v_ThD.flatten(1), slots], None, None)
    if index is not None:
        k_T1D = torch.tensor(index, dtype=torch.float32).flatten(0, 1)[:, None]
        kernel(session, ops.index_write, {"layer": 0}).run([cache], [cache, k_T1D, slots], None, None)
    return cache


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values in a view with gaps that hold NaN, or a wild index."""
    fill = torch.nan if x.is_floating_point() else -(2**40)
    wide = torch.full((*[n + 1 for n in x.shape[:-1]], 2 * x.shape[-1] + 1), fill, dtype=x.dtype)
    view = wide[(*tuple(slice(1, None) for _ in x.shape[:-1]), slice(1, None, 2))]
    view.copy_(x)
    return view


@pytest.mark.parametrize("gaps", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize(("spec", "case"), CASES, ids=[case.id for _, case in CASES])
def test_every_op_equals_its_naive_definition(session: Session, spec: OpSpec, case: Case, gaps: bool) -> None:
    ins: list[Any] = []
    naive: list[Any] = []
    handle = None
    cache = pages(session, case.state) if case.state else None
    for arg in spec.inputs:
        value = dict(case.state) if arg.kind == "state" else case.inputs[arg.name]
        naive.append(value)
        if arg.kind == "state":
            ins.append(cache)
        elif arg.kind == "weight":
            slots = value if isinstance(value, dict) else {"weight": value}
            held = {s: tiny.Held(s, torch.tensor(v, dtype=torch.float32)) for s, v in slots.items()}
            handle = session.prepare(OpInstance("op", spec, case.attrs, (), ()), held, WHOLE)
        else:
            tensor = torch.tensor(value, dtype=torch.int64 if arg.dtype == "int64" else torch.float32)
            ins.append(strided(tensor) if gaps else tensor)
    expected = spec.naive(case.attrs, *naive)
    outs: list[Any] = []
    for arg, want in zip(spec.outputs, expected, strict=True):
        if arg.kind == "state":
            outs.append(cache)
            continue
        fill, dtype = (-99, torch.int64) if arg.dtype == "int64" else (torch.nan, torch.float32)
        outs.append(torch.full(want.shape, fill, dtype=dtype))
        if gaps:
            outs[-1] = strided(outs[-1])
    kernel(session, spec, case.attrs).run(outs, ins, handle, None)
    for got, want in zip(outs, expected, strict=True):
        if isinstance(got, KVCache):
            for (layer, part), array in want.items():
                read = torch.stack([got.read(layer, p)[part] for p in range(got.pages)])
                np.testing.assert_array_equal(read.numpy(), array.astype(np.float32))
        elif not got.is_floating_point():
            np.testing.assert_array_equal(got.numpy(), want)
        else:
            finite = np.isfinite(want)
            np.testing.assert_array_equal(np.isfinite(got.numpy()), finite)
            scale = np.abs(want[finite]).max(initial=0.0)
            np.testing.assert_allclose(got.double().numpy()[finite], want[finite], rtol=3e-6, atol=3e-6 * scale)


def test_the_cases_reach_every_op_and_an_unknown_one_is_refused(session: Session) -> None:
    assert {spec.name for spec, _ in CASES} == set(ops.ALL)
    unknown = dataclasses.replace(ops.add, name="divide")
    found = session.kernel(OpInstance("op", unknown, {}, (), ()), STEP)
    assert isinstance(found, Refusal)
    assert "does not implement" in found.reason


@pytest.mark.parametrize("name", ["block_scores", "sparse_attention", "dense_attention"])
def test_tiles_change_nothing(session: Session, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One query per tile, and all queries in one tile, give the same result."""
    from m31_numpy import attention

    spec = ops.ALL[name]
    for case in spec.cases():
        cache = pages(session, case.state)
        ins = [cache if a.kind == "state" else np.asarray(case.inputs[a.name]) for a in spec.inputs]
        ins = [x.astype(np.float32) if isinstance(x, np.ndarray) and x.dtype == np.float64 else x for x in ins]
        results = []
        for limit in (1, 1 << 40):
            monkeypatch.setattr(attention, "_TILE", limit)
            out = np.full(spec.naive(case.attrs, *[dict(case.state) if x is cache else x for x in ins])[0].shape, 7.0)
            kernel(session, spec, case.attrs).run([out], ins, None, None)
            results.append(out)
        np.testing.assert_allclose(results[0], results[1], rtol=1e-5, atol=1e-6)


# --- pages -----------------------------------------------------------------------------------

SPEC = KVSpec(
    indexed=(False, True, True),
    kv_heads=2,
    head_dim=6,
    index_dim=5,
    page_tokens=4,
    kv_format="float32",
    index_format="float32",
)
FORMATS = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "bfloat16")]


def written(session: Session, spec: KVSpec, count: int) -> tuple[KVCache, dict[tuple[int, str], torch.Tensor]]:
    """A poisoned cache whose pages 1 and 3 are written, all but the last token of page 3, and what was written."""
    cache = session.kv_layout(spec).allocate(count)
    cache.poison(range(count))
    slots = torch.tensor([12, 13, 14, -1, 4, 5, 6, 7])
    rng = torch.Generator().manual_seed(1)
    given = {}
    for layer, indexed in enumerate(spec.indexed):
        k = torch.randn(8, spec.kv_heads, spec.head_dim, generator=rng)
        v = torch.randn(8, spec.kv_heads * spec.head_dim, generator=rng)
        kernel(session, ops.kv_write, {"layer": layer}).run([cache], [cache, k, v, slots], None, None)
        given |= {(layer, "k"): k, (layer, "v"): v.view(k.shape)}
        if indexed:
            key = torch.randn(8, 1, spec.index_dim, generator=rng)
            kernel(session, ops.index_write, {"layer": layer}).run([cache], [cache, key, slots], None, None)
            given[layer, "index"] = key
    return cache, given


@pytest.mark.parametrize(("kv", "index"), FORMATS)
def test_pages_live(session: Session, kv: Any, index: Any) -> None:
    spec = dataclasses.replace(SPEC, kv_format=kv, index_format=index)
    cache, given = written(session, spec, 5)
    assert cache.layout.page_bytes == spec.page_tokens * (spec.main_bytes + spec.index_bytes)
    for (layer, part), x in given.items():
        stored = x.to(getattr(torch, index if part == "index" else kv))
        got = cache.read(layer, 3)[part]
        assert got.dtype == stored.dtype
        if part == "index":
            assert torch.equal(got[:3], stored[:3, 0])
            assert torch.equal(cache.read(layer, 1)[part], stored[4:, 0])
        else:
            assert torch.equal(got[:, :3], stored[:3].transpose(0, 1))
            assert torch.equal(cache.read(layer, 1)[part], stored[4:].transpose(0, 1))
        assert bool(got[..., 3, :].isnan().all())
        assert bool(cache.read(layer, 0)[part].isnan().all())
    assert set(cache.read(0, 0)) == {"k", "v"}

    def page(of: KVCache, number: int) -> list[torch.Tensor]:
        parts = [of.read(layer, number) for layer in range(3)]
        return [x.nan_to_num(nan=-7.0) for layer in parts for x in layer.values()]

    def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    before = {number: page(cache, number) for number in range(5)}
    cache.copy_pages([1, 3], [3, 0])  # 3 is source and target: what is copied is what it was
    assert same(page(cache, 3), before[1])
    assert same(page(cache, 0), before[3])
    assert same(page(cache, 1), before[1])
    exported = cache.export([0, 1])
    assert exported.count == 2
    cache.poison([0, 1])
    assert all(bool((x == -7).all()) for x in page(cache, 1))
    assert same(page(cache, 3), before[1]), "poison reaches the named pages only"
    other = session.kv_layout(spec).allocate(9)
    other.import_(exported, [8, 2])
    assert same(page(other, 8), before[3])
    assert same(page(other, 2), before[1])
    assert cache.export([]).count == 0


def test_only_pages_of_the_same_layout_are_imported(session: Session) -> None:
    cache, _ = written(session, SPEC, 5)
    exported = cache.export([1, 3])
    assert exported.layout_id.startswith("m31-numpy:v1:")
    foreign = dataclasses.replace(exported, layout_id=SPEC.name("m31-reference", 2))
    short = {name: t[:1] for name, t in exported.tensors.items()}
    narrow = {name: t[:, 1:] for name, t in exported.tensors.items()}
    for bad, places in (
        (foreign, [0, 2]),
        (exported, [0]),
        (exported, [2, 2]),
        (dataclasses.replace(exported, tensors=short), [0, 2]),
        (dataclasses.replace(exported, tensors=narrow), [0, 2]),
        (dataclasses.replace(exported, tensors={}), [0, 2]),
    ):
        with pytest.raises(LayoutMismatch, match="KV import"):
            cache.import_(bad, places)
    for number in (0, 2):
        assert bool(cache.read(1, number)["k"].isnan().all()), "nothing was written"
    for change in ({"kv_format": "nvfp4"}, {"index_format": "int8"}):
        with pytest.raises(BackendRefused, match=r"backend numpy.*float32 or bfloat16"):
            session.kv_layout(dataclasses.replace(SPEC, **change))  # type: ignore[arg-type]


# --- weights ---------------------------------------------------------------------------------


def test_weights_are_decoded_as_the_formats_say(session: Session) -> None:
    """Own decoding of the stored parts against `m31.formats`, bit for bit; float32 stays where it is."""
    graph = trace(tiny.quantisable())
    values = tiny.quantised(graph, tiny.weights(graph, seed=3))
    seen = set()
    for call in graph.calls:
        if call.op.weights is None:
            continue
        slots = {s: tiny.held(t.name, values[t.name]) for s, t in call.op.weights.slots.items()}
        handle = session.prepare(call.op, slots, WHOLE)
        for slot, tensor in slots.items():
            seen.add(tensor.format)
            want = tensor.load()
            got = handle.dequantise()[slot]
            assert torch.equal(got, want)
            assert (slot in handle.in_place) == (tensor.format == "plain") == (got.data_ptr() == want.data_ptr())
        need = sum(4 * t.value.numel() for t in (values[s.name] for s in slots.values()) if not torch.is_tensor(t))
        assert session.weight_bytes(call.op, slots) == need
        assert not handle.losses
    assert seen == {"plain", "mxfp8", "nvfp4"}
    op = OpInstance("op", ops.linear, {}, (), ())
    bf16 = torch.tensor([[1.5, -0.0, 3e38, 1e-40]], dtype=torch.bfloat16)
    handle = session.prepare(op, {"weight": tiny.Held("w", bf16)}, WHOLE)
    assert torch.equal(handle.dequantise()["weight"], bf16.float())
    assert handle.in_place == frozenset()
    assert session.weight_bytes(op, {"weight": tiny.Held("w", bf16)}) == 16


def test_damaged_weights_are_refused_by_name(session: Session) -> None:
    graph = trace(tiny.quantisable())
    values = tiny.quantised(graph, tiny.weights(graph, seed=3))
    op = OpInstance("op", ops.linear, {}, (), ())
    nv = next(v for v in values.values() if getattr(v, "format", "") == "nvfp4")
    mx = next(v for v in values.values() if getattr(v, "format", "") == "mxfp8")
    for source, role, byte in ((nv, "scale", 0x7F), (nv, "scale", 0x81), (mx, "scale", 255), (mx, "codes", 0x7F)):
        stored = {name: t.clone() for name, t in source.stored.items()}  # type: ignore[union-attr]
        stored[role].view(torch.uint8)[1, 1] = byte
        damaged = tiny.Quantised(source.format, source.value, stored)  # type: ignore[union-attr]
        with pytest.raises(NonFiniteWeight, match=r"tensor 'bad\.weight'"):
            session.prepare(op, {"weight": tiny.held("bad.weight", damaged)}, WHOLE)
    with pytest.raises(NonFiniteWeight):
        session.prepare(op, {"weight": tiny.Held("bad.weight", torch.tensor([[torch.inf]]))}, WHOLE)


# --- the whole model -------------------------------------------------------------------------


def compiled(session: Session, text: Text, values: Mapping[str, Any]) -> Compiler:
    serving = Serving("numpy", session)
    weights = whole(serving, lambda name: tiny.held(name, values[name]))  # type: ignore[arg-type, return-value]
    return Compiler(serving, trace(text), weights)


def engine(session: Session, text: Text, values: Mapping[str, Any], chunk: int, form: Any = "float32") -> Engine:
    cache = session.kv_layout(KVSpec.of(text, form, form)).allocate(64)
    cache.poison(range(64))
    return Engine(compiler=compiled(session, text, values), cache=cache, page_tokens=4, chunk_tokens=chunk)


def logits(made: Engine, prompts: list[list[int]]) -> list[np.ndarray]:
    sequences = [
        Sequence(prompt=tuple(p), params=None, seed=0, request=i, stop_ids=frozenset()) for i, p in enumerate(prompts)
    ]
    for sequence in sequences:
        made.add(sequence)
    while made.busy:
        made.step()
    return [s.logits().numpy() for s in sequences]


@pytest.mark.parametrize("chunk", [5, 64])
@pytest.mark.parametrize("mixed", [False, True], ids=["all-sparse", "dense-first"])
def test_the_whole_model_equals_its_naive_definition(session: Session, chunk: int, mixed: bool) -> None:
    """In chunks and at once, three sequences in company, against the graph run in float64 by `naive`."""
    text = tiny.quantisable(**({"attention": ("dense", "sparse", "sparse", "sparse")} if mixed else {}))
    values = tiny.quantised(trace(text), tiny.weights(trace(text), seed=1))
    prompts = [[(7 * i + s) % 61 for i in range(n)] for s, n in enumerate((30, 1, 17))]
    got = logits(engine(session, text, values, chunk), prompts)
    for ids, mine in zip(prompts, got, strict=True):
        want = tiny.naive_logits(text, tiny.dequantised(values), ids)
        np.testing.assert_allclose(mine, want, rtol=0, atol=2e-4 * np.abs(want).max())


def test_bfloat16_pages_round_what_they_hold(session: Session) -> None:
    """Against `naive` with pages of the same format, and far from it with exact ones."""
    text = tiny.quantisable()
    values = tiny.weights(trace(text), seed=1)
    ids = [(7 * i) % 61 for i in range(11)]  # three blocks: all are selected, so that no tie decides
    (got,) = logits(engine(session, text, values, 64, "bfloat16"), [ids])
    want = tiny.naive_logits(text, values, ids, kv="bfloat16", index="bfloat16")
    exact = tiny.naive_logits(text, values, ids)
    assert np.abs(got - want).max() < 0.2 * np.abs(got - exact).max()


def filled(batch: StepBatch, seed: int, lengths: list[int]) -> None:
    rng = np.random.default_rng(seed)
    order = rng.permutation(16)
    tables = [order[4 * s : 4 * s + -(-n // 4)].tolist() for s, n in enumerate(lengths)]
    positions = [p for n in lengths for p in range(n)]
    batch.fill(
        tokens=rng.integers(0, 61, len(positions)).tolist(),
        positions=positions,
        q_lens=lengths,
        seq_lens=lengths,
        slot_map=[table[p // 4] * 4 + p % 4 for table, n in zip(tables, lengths, strict=True) for p in range(n)],
        page_table=tables,
        out_rows=[int(end) - 1 for end in np.cumsum(lengths)],
    )


def test_a_plan_is_replayed_over_the_same_memory(session: Session) -> None:
    """Changed contents and sizes, the same buffers; and the same bits as the core's own plan over the same kernels."""
    text = tiny.text()
    bound = compiled(session, text, tiny.weights(trace(text), seed=2)).bind(STEP)
    plan = session.compile(bound, STEP)
    other = DefaultPlan(bound, STEP, session.dtypes, session.device)
    batch = StepBatch.allocate(STEP, session.device)
    mine, theirs = (session.kv_layout(KVSpec.of(text, "float32", "float32")).allocate(16) for _ in range(2))
    addresses, results = set(), []
    for seed, lengths in ((1, [9, 7]), (2, [9, 7]), (3, [1, 3, 2]), (1, [9, 7])):
        filled(batch, seed, lengths)
        for cache in (mine, theirs):
            cache.poison(range(16))
        got = plan.run(batch, mine)
        assert got.shape == (len(lengths), 61)
        assert torch.equal(got, other.run(batch, theirs))
        addresses.add(got.data_ptr())
        results.append(got.clone())
    assert len(addresses) == 1, "the logits lie where they lay"
    assert torch.equal(results[0], results[3])
    assert not torch.equal(results[0], results[1])


# --- what is refused, and what it may know ---------------------------------------------------


@pytest.mark.parametrize(
    "asked",
    [
        {"device": "meta"},
        {"dtype": "float64"},
        {"dtype": "bfloat16"},
        {"world": 2},
        {"arithmetic": "w4a4-megamoe"},
        {"weight_cache_bytes": 0},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_is_not_served_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(BackendRefused, match=r"backend numpy: .* is not served; expected"):
        NumpyBackend(MANIFEST).open(**{**OPEN, **asked})


def test_what_is_served_can_be_named() -> None:
    opened = NumpyBackend(MANIFEST).open(**{**OPEN, "device": "cpu", "arithmetic": "Exact"})
    assert opened.numerics.exact
    limits = opened.limits(config.parse(config.published("m3.1-flash"), where="published"))
    assert (limits.kv_formats, limits.index_formats) == (MANIFEST.formats.kv, MANIFEST.formats.index)
    assert limits.max_context == MANIFEST.limits.context_tokens
    assert MANIFEST.arithmetic == (opened.numerics.name,)
    assert 0 < opened.memory_free() < 1 << 50


def test_it_knows_only_the_sdk_and_keeps_torch_at_the_door() -> None:
    public = frozenset(graph_room.__all__)
    sources = list(files(EXAMPLE))
    assert len(sources) > 5
    faults = []
    with_torch = set()
    for path, module, is_package in sources:
        text = path.read_text()
        faults += backend_faults(text, module, is_package=is_package, graph_public=public)
        if "import torch" in text:
            with_torch.add(path.name)
    assert faults == []
    assert with_torch <= {"session.py", "pages.py", "plan.py", "weights.py"}
    assert not any("naive" in path.read_text() for path, _, _ in sources)


# --- installed -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of a fresh environment with m31 and the example installed; what they need is borrowed from here."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    # Paths in a .pth file are added after the environment's own and their .pth files are not read, so that neither this
    # environment's m31 nor its editable checkout can take the place of the one that is installed now.
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "borrowed.pth").write_text("\n".join(sorted(borrowed)) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "--no-input"]
    run(
        [
            *pip,
            "install",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "--no-compile",
            str(ROOT),
            str(EXAMPLE),
        ]
    )
    where = run([str(python), "-c", "import m31, m31_numpy; print(m31.__file__); print(m31_numpy.__file__)"])
    assert all(line.startswith(str(folder)) for line in where.split())
    return folder / "bin"


def run(command: list[str]) -> str:
    env = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# One process, since each one that computes takes seconds to start: makes a checkpoint of each kind, and has both
# backends continue the prompt on both.
_BOTH = """
import contextlib, json, sys
import m31
from m31.cli.main import main
demo, quantised, prompt = sys.argv[1:]
with contextlib.redirect_stdout(sys.stderr):
    assert main(["demo", demo]) == 0
    assert main(["convert", demo, quantised, "--format", "m31"]) == 0
said = []
for folder, form in ((demo, None), (quantised, "bfloat16")):
    for backend in ("numpy", "reference"):
        model = m31.load(folder, backend=backend, max_context=2048, kv_dtype=form, index_dtype=form)
        generation = model.generate(prompt, max_tokens=24, temperature=0, ignore_eos=True)
        list(generation.events())
        said.append((backend, model.formats["weights"], model.formats["kv"], generation.token_ids))
print(json.dumps(said))
"""


def test_installed_it_runs_beside_the_reference(environment: Path, tmp_path: Path) -> None:
    m31, python = str(environment / "m31"), str(environment / "python")
    listed = json.loads(run([m31, "backends", "--json"]))
    (mine,) = [b for b in listed["backends"] if b["name"] == "numpy"]
    assert (mine["distribution"], mine["version"], mine["builtin"]) == ("m31-numpy-backend", "0.1.0", False)
    assert listed["chosen"] == "reference", "an example is never chosen unasked"

    demo, prompt = str(tmp_path / "demo"), "The Andromeda galaxy is"
    said = json.loads(run([python, "-c", _BOTH, demo, str(tmp_path / "quantised"), prompt]))
    assert [backend for backend, *_ in said] == ["numpy", "reference"] * 2
    for (_, *mine_said), (_, *reference_said) in (said[:2], said[2:]):
        assert mine_said == reference_said
        assert len(mine_said[-1]) == 24
    assert set(said[2][1].split("+")) == {"mxfp8", "nvfp4", "bfloat16", "float32"}
    assert said[0][3] != said[2][3], "quantised weights speak otherwise"

    greedy = ["--temperature", "0", "--max-tokens", "24", "--ignore-eos", "--max-context", "2048"]
    out = run([m31, "run", demo, prompt, "--raw", "--backend", "numpy", "--json", *greedy])
    start, *events = [json.loads(line) for line in out.splitlines()]
    assert start["backend"] == {"name": "numpy", "reason": "asked for by argument"}
    assert [i for e in events if e["event"] == "token" for i in e["token_ids"]] == said[0][3]
