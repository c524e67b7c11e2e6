"""Few tokens on stored weights: codecs, dot products, handles and experts of the CPU backend."""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import ml_dtypes
import numpy as np
import pytest
import torch
from tests.support.expert_files import ExpertFile, nvfp4_values, write_experts

import m31_cpu
from m31 import ops
from m31.errors import OpRefused
from m31.formats.arithmetic import NAMED
from m31.graph import OpInstance, Shard, StepClass
from m31.ops import TensorDecl, TensorType, WeightDecl
from m31.sdk import this_machine
from m31.sdk.manifest import read_manifest
from m31_cpu.codecs import CHUNK, CODECS, DAMAGED, INFINITE, TABLE_ROW, Codec
from m31_cpu.crew import Crew, Program
from m31_cpu.isa import ALL, Isa, choose, portable
from m31_cpu.kernels.dots import MOST, Layout
from m31_cpu.kernels.linear import few_native
from m31_cpu.native import Library, module_of, optimised, packed
from m31_cpu.program import Sizes

FLAGS = this_machine().cpu.flags
ISAS = {isa.name: isa for isa in (choose(FLAGS, {})[0], choose(FLAGS, {"M31_CPU_ISA": "portable"})[0])}
MANIFEST = read_manifest(Path(m31_cpu.__file__).parent / "backend.toml")
STEP = StepClass(kind="mixed", q_len=0, tokens=16, seqs=1, rows=16, pages=1)
WHOLE = Shard(0, 1)
each_isa = pytest.mark.parametrize("isa", ISAS.values(), ids=ISAS.keys())
each_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Library]:
    """Each kernel is compiled once for all tests here."""
    folder = tmp_path_factory.mktemp("code")
    return {name: Library(isa, folder) for name, isa in ISAS.items()}


class Guarded:
    """Arrays that end where a page begins that nobody may touch."""

    def __init__(self) -> None:
        self._maps: list[Any] = []

    def put(self, value: np.ndarray) -> np.ndarray:
        """A copy."""
        page = mmap.PAGESIZE
        size = -(-max(value.nbytes, 1) // page) * page
        area = mmap.mmap(-1, size + page)
        self._maps.append(area)
        whole = np.frombuffer(area, np.uint8)
        libc = __import__("ctypes").CDLL(None, use_errno=True)
        pointer = __import__("ctypes").c_void_p(whole.ctypes.data + size)
        assert libc.mprotect(pointer, __import__("ctypes").c_size_t(page), 0) == 0
        made = whole[size - value.nbytes : size].view(value.dtype).reshape(value.shape)
        made[...] = value
        return made


def stored(codec: Codec, rows: int, columns: int, seed: int) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Codes, scales and values in float64 by another reader."""
    rng = np.random.default_rng(seed)
    if codec.name == "nvfp4":
        codes = rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
        scales = rng.integers(0, 0x50, (rows, columns // 16), dtype=np.uint8)
        return codes, scales, nvfp4_values(codes, scales, 1.0)
    if codec.name == "mxfp8":
        codes = rng.integers(0, 256, (rows, columns), dtype=np.uint8)
        codes[(codes & 127) == 127] = 3  # NaN
        scales = rng.integers(118, 130, (rows, columns // 32), dtype=np.uint8)
        powers = 2.0 ** (scales.astype(np.float64) - 127)
        return codes, scales, codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * np.repeat(powers, 32, axis=1)
    kind = ml_dtypes.bfloat16 if codec.name == "bfloat16" else np.float32
    value = rng.standard_normal((rows, columns)).astype(kind)
    return value.view(np.uint16) if codec.name == "bfloat16" else value, None, value.astype(np.float64)


class Matrix:
    """A stored matrix between guard pages, as kernels find it."""

    def __init__(self, codec: Codec, isa: Isa, rows: int, columns: int, seed: int = 0) -> None:
        guard = self.guard = Guarded()
        codes, scales, self.values = stored(codec, rows, columns, seed)
        self.codes, self.scales = guard.put(codes), None if scales is None else guard.put(scales)
        self.flag = np.zeros(1, np.int64)
        self.table = np.zeros(TABLE_ROW // 8, np.int64)
        self.table[:2] = self.codes.ctypes.data, self.codes.strides[0]
        if self.scales is not None:
            self.table[2:4] = self.scales.ctypes.data, self.scales.strides[0]
        self.table[4:5].view(np.float32)[0] = 2.0 ** codec.shift(isa)
        self.table[5] = self.flag.ctypes.data


def multiply(
    library: Library, codec: Codec, m: Matrix, x: np.ndarray, *, threads: int = 1, span: int = 8
) -> np.ndarray:
    """What the kernel of `linear` makes of x; outputs were NaN before and lie before a guard page as well."""
    rows, guard, sizes = len(m.values), Guarded(), Sizes()
    sizes.set({"T": len(x)})
    given, out = guard.put(x), guard.put(np.full((len(x), rows), np.nan, np.float32))
    size = Layout(codec, library.isa).room(x.shape[1]) + MOST * 8
    size = -(-size // 64) * 64
    room = np.full(threads * size + 64, 255, np.uint8)
    native = few_native(codec)
    values = {
        "table": m.table.ctypes.data,
        "x": given.ctypes.data,
        "y": out.ctypes.data,
        "rows": sizes.at("T"),
        "room": -(-room.ctypes.data // 64) * 64,
        "columns": x.shape[1],
        "outputs": rows,
        "span": span,
        "room_bytes": size,
    }
    Crew(threads, library).run(Program.of([(library.address(native), packed(native, values), True)]))
    return out.copy()


def inputs(tokens: int, columns: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, columns)).astype(np.float32)


# --- dot products ---


@each_codec
@each_isa
@pytest.mark.parametrize("columns", [32, 128, 160, 1120, 33])
def test_products_are_right_and_the_same_for_any_number_of_tokens(
    libraries: dict[str, Library], isa: Isa, codec: Codec, columns: int
) -> None:
    """Within 2 sqrt(K) u of the magnitudes (operands of pairs round to bfloat16); guard pages lie behind everything."""
    columns -= columns % codec.group if codec.group else 0
    for rows in (1, 13):
        m = Matrix(codec, isa, rows, columns, seed=rows)
        x = inputs(MOST, columns)
        whole = multiply(libraries[isa.name], codec, m, x)
        want, magnitude = x.astype(np.float64) @ m.values.T, np.abs(x.astype(np.float64)) @ np.abs(m.values).T
        unit = 2.0**-8 if codec.pairs(isa) else 2 * 2.0**-24 * max(columns, 4) ** 0.5
        assert (np.abs(whole - want) <= unit * magnitude).all()
        assert (np.abs(want) > 100 * unit * magnitude).any()
        for tokens in range(1, MOST):
            np.testing.assert_array_equal(multiply(libraries[isa.name], codec, m, x[:tokens]), whole[:tokens])
        assert m.flag[0] == 0


@each_codec
@each_isa
def test_neither_threads_nor_tasks_change_a_bit(libraries: dict[str, Library], isa: Isa, codec: Codec) -> None:
    m, x = Matrix(codec, isa, 100, 288), inputs(7, 288)
    one = multiply(libraries[isa.name], codec, m, x)
    for threads, span in ((2, 8), (3, 16), (1, 104)):
        np.testing.assert_array_equal(multiply(libraries[isa.name], codec, m, x, threads=threads, span=span), one)


@each_codec
@each_isa
@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_damage_in_any_column_is_noted(libraries: dict[str, Library], isa: Isa, codec: Codec, tokens: int) -> None:
    m, x = Matrix(codec, isa, 9, 160), inputs(tokens, 160)
    places, bad = {
        "nvfp4": (m.scales, 0x80),
        "mxfp8": (m.codes, 0xFF),
        "bfloat16": (m.codes, 0x7F80),
        "float32": (m.codes, np.float32("nan")),
    }[codec.name]
    assert places is not None
    for column in range(0, places.shape[1], 1 if codec.group == 16 else 13):
        kept = places[4, column]
        places[4, column] = bad
        multiply(libraries[isa.name], codec, m, x)
        assert m.flag[0] & (DAMAGED | INFINITE), column
        places[4, column], m.flag[0] = kept, 0
    multiply(libraries[isa.name], codec, m, x)
    assert m.flag[0] == 0


@each_codec
def test_every_column_has_its_place(codec: Codec) -> None:
    for isa in ALL:
        assert sorted(codec.order(isa)) == list(range(CHUNK))


@pytest.mark.parametrize(
    ("isa", "name", "wanted"),
    [
        ("avx512", "nvfp4", ("vpmultishiftqb", "vpermw", "vdpbf16ps")),
        ("avx512", "mxfp8", ("vpermt2b", "vdpbf16ps")),
        ("avx512", "float32", ("vfmadd",)),
        ("avx2", "nvfp4", ("vpshufb", "vcvtph2ps", "vfmadd")),
        ("avx2", "mxfp8", ("vcvtph2ps", "vfmadd")),
        ("neon", "nvfp4", ("tbl", "fcvtl", "fml")),
        ("neon", "mxfp8", ("fcvtl", "fml")),
        ("portable", "nvfp4", ("mulps",)),
    ],
)
def test_what_is_compiled_for_others(isa: str, name: str, wanted: tuple[str, ...]) -> None:
    """The instructions that were meant, no call to a runtime library, nothing spilled in the loop of one token."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    found = portable("x86_64") if isa == "portable" else next(i for i in ALL if i.name == isa)
    triple = "aarch64-unknown-linux-gnu" if isa == "neon" else "x86_64-unknown-linux-gnu"
    target = llvm.Target.from_triple(triple)
    machine = target.create_target_machine(
        cpu=found.cpu, features=found.features, opt=2, reloc="pic", codemodel="default"
    )
    native = few_native(CODECS[name])
    module = module_of(native.name, lambda module, _: native.write(module, found), found, triple)
    text = machine.emit_assembly(optimised(module, machine))
    for instruction in wanted:
        assert instruction in text, instruction
    called = set(re.findall(r"^\s+(?:callq?|bl)\s+\"?([\w.]+)", text, re.M))
    allowed = re.compile(r"memset|memcpy|m31_|\.?Lm31_")
    assert all(allowed.match(call) for call in called), called
    if isa in ("avx2", "avx512"):
        dots = text[text.index(f"m31_dots_{name}:") :]
        blocks = re.split(r"^\.LBB\w+:", dots, flags=re.M)
        loops = [b for b in blocks if b.count("prefetch") and ("vfmadd" in b or "vdpbf16ps" in b)]
        assert not re.search(r"mm\d+, -?\d*\(%rsp\)", loops[0])


# --- ops ---


def session(monkeypatch: pytest.MonkeyPatch, isa: str, threads: int = 2) -> Any:
    monkeypatch.setenv("M31_CPU_ISA", isa)
    monkeypatch.setenv("M31_NUM_THREADS", str(threads))
    return m31_cpu.CpuBackend(MANIFEST).open(
        device=None, dtype="float32", rank=0, world=1, arithmetic=NAMED["exact"], options={}
    )


def instance(file: ExpertFile, formats: dict[str, str], topk: int = 2) -> OpInstance:
    width = file.values["w1.0"].shape[1]
    slots = {
        s: TensorDecl(t.name, t.shape, (None, None), stored=formats[s.partition(".")[0]]) for s, t in file.slots.items()
    }
    attrs = {"alpha": 1.702, "beta": 1.0, "limit": 7.0, "routed_scaling_factor": 2.0, "experts": len(slots) // 3}
    given = (
        TensorType(("T", width), "T,C", "model"),
        TensorType(("T", topk), "T,K", "int64"),
        TensorType(("T", topk), "T,K", "accum"),
        WeightDecl("layer.experts", slots),
    )
    return OpInstance("experts_1", ops.experts, attrs, given, ops.experts.types(attrs, given))


FORMATS = {
    "nvfp4": {"w1": "nvfp4", "w3": "nvfp4", "w2": "nvfp4"},
    "bf16": {"w1": "bfloat16", "w3": "bfloat16", "w2": "bfloat16"},
    "mixed": {"w1": "nvfp4", "w3": "nvfp4", "w2": "mxfp8"},
}


def run(made: Any, op: OpInstance, handle: Any, h: np.ndarray, ids: Any, weights: np.ndarray) -> np.ndarray:
    kernel = made.kernel(op, STEP)
    out = torch.full(h.shape, torch.nan)
    space = torch.full((kernel.workspace_bytes,), 255, dtype=torch.uint8)
    kernel.run([out], [torch.tensor(h), torch.tensor(ids), torch.tensor(weights)], handle, space)
    return out.numpy()


def choices(tokens: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    ids = np.array([rng.permutation(6)[:2] for _ in range(tokens)], np.int64).reshape(tokens, 2)
    ids[tokens // 2] = 4  # twice
    return inputs(tokens, width), ids, rng.uniform(0.1, 1, (tokens, 2)).astype(np.float32)


@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS.keys())
@pytest.mark.parametrize("isa", ISAS)
def test_experts_are_those_of_the_definition_alone_and_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isa: str, formats: dict[str, str]
) -> None:
    file = write_experts(tmp_path / "w", formats, 6, 96, 160)
    made, op = session(monkeypatch, isa), instance(file, formats)
    handle = made.prepare(op, file.slots, WHOLE)
    given = choices(16, 96)
    got = run(made, op, handle, *given)
    (want,) = ops.experts.naive(
        op.attrs, *(x.astype(np.float64) if x.dtype != np.int64 else x for x in given), file.values
    )
    assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max()
    for tokens in (1, 2, 5):
        np.testing.assert_array_equal(run(made, op, handle, *(x[:tokens] for x in given)), got[:tokens])
    alone = session(monkeypatch, isa, threads=1)
    np.testing.assert_array_equal(run(alone, op, alone.prepare(op, file.slots, WHOLE), *given), got)


@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS.keys())
def test_weights_are_the_files_own_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, formats: dict[str, str]
) -> None:
    file = write_experts(tmp_path / "experts.bin", formats, 3, 64, 32)
    made, op = session(monkeypatch, "portable"), instance(file, formats)
    assert made.weight_bytes(op, file.slots) == 0
    handle = made.prepare(op, file.slots, WHOLE)
    assert handle.in_place == frozenset(file.slots)
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(file.path) in line]
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    addresses = [int(row[i]) for row in handle.table for i in (0, 2) if row[i]]
    assert all(any(low <= address < high for low, high in ranges) for address in addresses)
    for slot, value in handle.dequantise().items():
        np.testing.assert_array_equal(value.double().numpy(), file.values[slot])


def test_what_lies_misaligned_is_copied_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_experts(tmp_path / "w", FORMATS["bf16"], 2, 64, 32, shift=1)
    made, op = session(monkeypatch, "portable"), instance(file, FORMATS["bf16"])
    assert made.weight_bytes(op, file.slots) == 2 * 3 * 64 * 32 * 2
    handle = made.prepare(op, file.slots, WHOLE)
    assert handle.in_place == frozenset()
    for slot, value in handle.dequantise().items():
        np.testing.assert_array_equal(value.double().numpy(), file.values[slot])


def test_a_token_that_the_table_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from m31.conformance.weights import Held

    made = session(monkeypatch, "portable")
    decl = WeightDecl("e", {"weight": TensorDecl("e", (5, 8), (None, None), stored="float32")})
    given = (TensorType(("T",), "T", "int64"), decl)
    op = OpInstance("embedding_1", ops.embedding, {}, given, ops.embedding.types({}, given))
    table = torch.arange(40.0).reshape(5, 8)
    handle = made.prepare(op, {"weight": Held("e", table)}, WHOLE)
    kernel, out = made.kernel(op, STEP), torch.full((2, 8), torch.nan)
    kernel.run([out], [torch.tensor([4, 0])], handle, None)
    assert torch.equal(out, table[[4, 0]])
    for wrong in (-1, 5):
        with pytest.raises(OpRefused, match="0 to 4"):
            kernel.run([out], [torch.tensor([0, wrong])], handle, None)
