"""Experts on the CPU backend as the core runs them, against the naive definition on weights decoded by somebody else.

Both ways of computing them are shown: for few tokens and for many. The bound is derived: a dot product of K float32
terms is within `4 sqrt(K) u` of the sum of its terms' magnitudes, and the activation passes errors of gate and up on
with its slopes (|d(g sigmoid(alpha g))| <= 1.1, sigmoid <= 1).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.cpu_pages import guarded, session
from tests.support.expert_files import ExpertFile, write_experts

from m31 import ops
from m31.errors import NonFiniteWeight, OpRefused
from m31.graph import OpInstance, Shard, StepClass
from m31.ops import TensorDecl, TensorType, WeightDecl
from m31.sdk import this_machine
from m31_cpu.isa import choose
from m31_cpu.kernels.dots import MOST
from m31_cpu.session import CpuSession

ATTRS = {"alpha": 1.702, "beta": 1.0, "limit": 7.0, "routed_scaling_factor": 2.0}
ODD = {"alpha": 1.25, "beta": 0.5, "limit": 3.0, "routed_scaling_factor": 0.75}
ISAS = sorted({"portable", choose(this_machine().cpu.flags, {})[0].name})
NVFP4 = dict.fromkeys(("w1", "w3", "w2"), "nvfp4")
BF16 = dict.fromkeys(("w1", "w3", "w2"), "bfloat16")
MIXED = {"w1": "nvfp4", "w3": "nvfp4", "w2": "bfloat16"}
COUNT = 6
FEW, MANY = MOST, 4 * MOST  # capacities of a step on either side of where the kernels change

each_isa = pytest.mark.parametrize("isa", ISAS)
each_way = pytest.mark.parametrize("capacity", [FEW, MANY], ids=["few", "many"])


def instance(file: ExpertFile, formats: dict[str, str], topk: int, attrs: dict[str, Any]) -> OpInstance:
    """The op as a graph holds it."""
    width = file.values["w1.0"].shape[1]
    slots = {
        s: TensorDecl(t.name, t.shape, (None, None), stored=formats[s.partition(".")[0]]) for s, t in file.slots.items()
    }
    inputs = (
        TensorType(("T", width), "T,C", "model"),
        TensorType(("T", topk), "T,K", "int64"),
        TensorType(("T", topk), "T,K", "accum"),
        WeightDecl("experts", slots),
    )
    attrs = {**attrs, "experts": len(slots) // 3}
    return OpInstance("experts_1", ops.experts, attrs, inputs, ops.experts.types(attrs, inputs))


class Layer:
    """The experts of a file on a session, prepared."""

    def __init__(
        self, cpu: CpuSession, file: ExpertFile, formats: dict[str, str], *, topk: int = 2, attrs: Any = ATTRS
    ) -> None:
        self.cpu, self.op = cpu, instance(file, formats, topk, attrs)
        self.handle = cpu.prepare(self.op, file.slots, Shard(0, 1))

    def kernel(self, capacity: int) -> Any:
        step = StepClass(kind="mixed", q_len=0, tokens=capacity, seqs=1, rows=1, pages=1)
        return self.cpu.kernel(self.op, step)

    def __call__(self, given: Any, *, capacity: int = FEW) -> np.ndarray:
        """The output; everything lies where a page begins that nobody may touch; buffers are full of NaN before."""
        h, ids, weights = (guarded(torch.as_tensor(x)) for x in given)
        kernel = self.kernel(capacity)
        out = guarded(torch.full(h.shape, torch.nan))
        workspace = guarded(torch.full((kernel.workspace_bytes,), 255, dtype=torch.uint8))
        kernel.run([out], [h, ids, weights], self.handle, workspace)
        return out.double().numpy()


def inputs(tokens: int, width: int, *, topk: int = 2, seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    h = (rng.standard_normal((tokens, width)) * 2).astype(np.float32)
    ids = np.array([rng.permutation(COUNT)[:topk] for _ in range(tokens)], np.int64).reshape(tokens, topk)
    return h, ids, rng.uniform(0.1, 1, (tokens, topk)).astype(np.float32)


def expected(values: dict[str, np.ndarray], given: Any, attrs: dict[str, Any] = ATTRS) -> tuple[np.ndarray, np.ndarray]:
    """(naive, bound of a float32 kernel's error), both [T,H]."""
    h, ids, weights = (np.asarray(x) for x in given)
    h, weights, roundoff = h.astype(np.float64), weights.astype(np.float64), 2.0**-24
    (want,) = ops.experts.naive(attrs, h, ids, weights, values)
    bound = np.zeros_like(want)
    for t in range(len(h)):
        for e, p in zip(ids[t], weights[t], strict=True):
            w1, w3, w2 = (values[f"{m}.{e}"] for m in ("w1", "w3", "w2"))
            unit = 4 * roundoff * np.sqrt(w1.shape[1])
            gate, up = w1 @ h[t], w3 @ h[t]
            act = ops.moe.activation(gate, up, attrs)
            off_gate, off_up = (unit * (np.abs(w) @ np.abs(h[t])) for w in (w1, w3))
            off_gate[gate > attrs["limit"] + off_gate] = 0  # beyond a clamp errors do not matter
            off_up[np.abs(up) > attrs["limit"] + off_up] = 0
            g, u = np.minimum(gate, attrs["limit"]), np.clip(up, -attrs["limit"], attrs["limit"])
            off = (np.abs(u) + attrs["beta"]) * 1.1 * off_gate + np.abs(g) * off_up
            off += 8 * roundoff * (1 + np.abs(attrs["alpha"] * g)) * np.abs(act)  # the exponential
            unit = 4 * roundoff * np.sqrt(w2.shape[1])
            bound[t] += attrs["routed_scaling_factor"] * p * (np.abs(w2) @ (off + unit * np.abs(act)))
    return want, bound + 4 * roundoff * np.abs(want)


def check(layer: Layer, file: ExpertFile, given: Any, capacity: int) -> None:
    """A kernel that rounds its operands to bfloat16, as AVX-512 may, has 2^-8 for each where others have 4 u."""
    want, bound = expected(file.values, given, dict(layer.op.attrs))
    pairs = layer.kernel(capacity).arithmetic.operands == "bfloat16"
    bound *= 2.0**14 if pairs else 1
    got = layer(given, capacity=capacity)
    assert np.isfinite(got).all()
    assert (np.abs(got - want) <= bound).all(), float((np.abs(got - want) / bound).max())
    # The bound means something: what is off by a hundredth is outside it nearly everywhere.
    assert pairs or want.size == 0 or (np.abs(want) * 0.01 > bound).mean() > 0.7


@pytest.fixture(params=[NVFP4, BF16, MIXED], ids=["nvfp4", "bf16", "mixed"])
def formats(request: pytest.FixtureRequest) -> dict[str, str]:
    return request.param  # type: ignore[no-any-return]


# --- what they compute ---


@each_isa
@pytest.mark.parametrize(("width", "inner"), [(16, 16), (48, 80), (80, 144), (128, 64), (208, 336)])
def test_equals_naive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, formats: dict[str, str], width: int, inner: int, isa: str
) -> None:
    """Widths with every remainder of a block scale's columns; steps that are not full."""
    file = write_experts(tmp_path / "w", formats, COUNT, width, inner)
    layer = Layer(session(monkeypatch, isa), file, formats)
    for tokens, capacity in ((0, FEW), (1, FEW), (2, FEW), (7, FEW), (16, FEW), (0, MANY), (7, MANY), (64, MANY)):
        check(layer, file, inputs(tokens, width), capacity)


@each_way
def test_other_parameters_than_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, formats: dict[str, str], capacity: int
) -> None:
    """BUG-2: none of them is a constant somewhere."""
    file = write_experts(tmp_path / "w", formats, COUNT, 48, 80)
    layer = Layer(session(monkeypatch, ISAS[0]), file, formats, topk=3, attrs=ODD)
    check(layer, file, inputs(9, 48, topk=3), capacity)


@each_isa
@each_way
def test_the_case_beyond_the_clamps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isa: str, capacity: int) -> None:
    file = write_experts(tmp_path / "w", BF16, COUNT, 64, 32)
    h, ids, weights = inputs(5, 64)
    given = (h * 40, ids, weights)
    gates = np.stack([file.values[f"w1.{e}"] @ x for x, row in zip(given[0], ids, strict=True) for e in row])
    assert gates.max() > 7
    assert gates.min() < -7
    check(Layer(session(monkeypatch, isa), file, BF16), file, given, capacity)


@each_way
@pytest.mark.parametrize(
    "ids",
    [
        pytest.param([[3, 5]] * 9, id="hit-by-all"),
        pytest.param([[2, 2]] * 12, id="twice-by-one-token"),  # more places of an expert than tokens at once
        pytest.param([[0, 1], [5, 0], [0, 5], [4, 4]], id="some-by-none"),
    ],
)
def test_who_goes_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, formats: dict[str, str], ids: list[list[int]], capacity: int
) -> None:
    file = write_experts(tmp_path / "w", formats, COUNT, 80, 48)
    h, _, weights = inputs(len(ids), 80)
    check(Layer(session(monkeypatch, ISAS[0]), file, formats), file, (h, np.array(ids), weights), capacity)


def test_blocks_of_zeros_and_outliers_are_in_the_data(tmp_path: Path) -> None:
    file = write_experts(tmp_path / "w", NVFP4, COUNT, 208, 336)
    for value in file.values.values():
        groups = np.abs(value).reshape(len(value), -1, 16).max(-1)
        assert (groups == 0).any()
        assert groups.max() > 50 * np.median(groups)


@each_isa
@each_way
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_token_that_is_not_finite_stays_so_and_keeps_it_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, formats: dict[str, str], value: float, capacity: int, isa: str
) -> None:
    file = write_experts(tmp_path / "w", formats, COUNT, 80, 144)
    layer = Layer(session(monkeypatch, isa), file, formats)
    h, ids, weights = inputs(6, 80)
    ids[:] = [4, 1]
    clean = layer((h, ids, weights), capacity=capacity)
    h[2, 7] = value
    got = layer((h, ids, weights), capacity=capacity)
    with np.errstate(invalid="ignore"):
        want, _ = expected(file.values, (h[2:3], ids[2:3], weights[2:3]))
    assert np.isnan(want).any()
    np.testing.assert_array_equal(np.isnan(got[2]), np.isnan(want[0]))
    np.testing.assert_array_equal(np.delete(got, 2, 0), np.delete(clean, 2, 0))


@each_way
def test_strided_inputs_and_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capacity: int) -> None:
    file = write_experts(tmp_path / "w", NVFP4, COUNT, 48, 80)
    layer = Layer(session(monkeypatch, ISAS[0]), file, NVFP4)
    h, ids, weights = inputs(5, 48)
    wide = torch.full((5, 3 * 48), torch.nan)
    wide[:, ::3] = torch.as_tensor(h)
    given = (wide[:, ::3], torch.as_tensor(ids).t().contiguous().t(), torch.as_tensor(weights).t().contiguous().t())
    kernel, out = layer.kernel(capacity), torch.full((5, 2 * 48), -7.0)
    kernel.run([out[:, 1::2]], list(given), layer.handle, torch.empty(kernel.workspace_bytes, dtype=torch.uint8))
    np.testing.assert_array_equal(out[:, 1::2].double().numpy(), layer((h, ids, weights), capacity=capacity))
    assert (out[:, ::2] == -7).all()


# --- what they read ---


class _Flush:
    """A stored part that ends where memory that nobody may touch begins, or begins where such memory ends."""

    def __init__(self, part: Any, front: bool) -> None:
        value = part.load()
        self._value = guarded(value.view(torch.uint8), front=front).view(value.dtype)

    def load(self) -> torch.Tensor:
        return self._value


class _Walled:
    def __init__(self, tensor: Any, front: bool) -> None:
        self.name, self.shape, self.dtype, self.format = tensor.name, tensor.shape, tensor.dtype, tensor.format
        self._parts = {r: p if "global" in r else _Flush(p, front) for r, p in tensor.parts().items()}

    def parts(self) -> dict[str, Any]:
        return self._parts


@each_isa
def test_nothing_beside_the_stored_bytes_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, formats: dict[str, str], isa: str
) -> None:
    """Every matrix lies beside pages without access; a load that goes too far ends this process."""
    cpu = session(monkeypatch, isa)
    for width, inner in ((80, 144), (64, 128), (16, 16)):
        file = write_experts(tmp_path / f"{width}", formats, COUNT, width, inner)
        whole = Layer(cpu, file, formats)
        for front in (False, True):
            walls = replace(file, slots={slot: _Walled(t, front) for slot, t in file.slots.items()})
            layer = Layer(cpu, walls, formats)
            assert layer.handle.in_place == frozenset(file.slots)
            for tokens, capacity in ((1, FEW), (5, FEW), (5, MANY)):
                given = inputs(tokens, width)
                np.testing.assert_array_equal(layer(given, capacity=capacity), whole(given, capacity=capacity))


@each_isa
@each_way
@pytest.mark.parametrize("w2", ["nvfp4", "bfloat16", "mxfp8"])
def test_parts_of_tensors_are_read_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, w2: str, capacity: int, isa: str
) -> None:
    """Rows of w1 and w3 and columns of w2, as a rank of a world takes them; w2's rows then have gaps."""
    formats = {**(BF16 if w2 == "bfloat16" else NVFP4), "w2": w2}
    whole = write_experts(tmp_path / "w", formats, COUNT, 96, 160)
    low, high = (32, 128) if w2 == "mxfp8" else (48, 112)
    slots = {s: t.slice(1 if s.startswith("w2") else 0, low, high) for s, t in whole.slots.items()}
    values = {s: v[:, low:high] if s.startswith("w2") else v[low:high] for s, v in whole.values.items()}
    part = ExpertFile(whole.path, slots, values)
    layer = Layer(session(monkeypatch, isa), part, formats)
    check(layer, part, inputs(7, 96), capacity)
    assert layer.handle.in_place == frozenset(slots)


# --- what they refuse ---


@each_isa
@each_way
@pytest.mark.parametrize("matrix", ["w1", "w3", "w2"])
@pytest.mark.parametrize(
    ("formats", "role", "damage", "text"),
    [
        (NVFP4, "scale", b"\x7f", "at flat index 22"),
        (NVFP4, "scale", b"\xff", "at flat index 22"),
        (NVFP4, "scale", b"\x80", "at flat index 22"),
        (NVFP4, "scale", b"\xb8", "without a sign"),
        (BF16, "weight", b"\x80\x7f", "at flat index 22"),  # infinity
        (BF16, "weight", b"\xc0\xff", "at flat index 22"),  # NaN
    ],
)
def test_damaged_weights_are_refused_where_they_are_needed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    formats: dict[str, str],
    role: str,
    damage: bytes,
    text: str,
    matrix: str,
    capacity: int,
    isa: str,
) -> None:
    """Decision 011: with the tensor's name; an expert that no token reaches does no harm, before and afterwards."""
    clean = write_experts(tmp_path / "w", formats, COUNT, 80, 144)
    data = bytearray(clean.path.read_bytes())
    at = clean.offsets[f"{matrix}.3/{role}"] + 22 * len(damage)
    data[at : at + len(damage)] = damage
    file = write_experts(tmp_path / "again", formats, COUNT, 80, 144)  # the same once more, unmapped yet
    file.path.write_bytes(data)
    layer = Layer(session(monkeypatch, isa), file, formats)
    h, ids, weights = inputs(9, 80)
    ids[:] = [0, 2]
    sound = layer((h, ids, weights), capacity=capacity)
    assert np.isfinite(sound).all()
    ids[-1] = [0, 3]
    for _ in range(2):  # refused once is not looked at and forgotten
        with pytest.raises(NonFiniteWeight, match=text) as caught:
            layer((h, ids, weights), capacity=capacity)
        assert f"{matrix}.3" in str(caught.value)
    ids[-1] = [0, 2]
    np.testing.assert_array_equal(layer((h, ids, weights), capacity=capacity), sound)


@each_isa
@pytest.mark.parametrize(("tokens", "capacity"), [(1, FEW), (9, FEW), (9, MANY)])
@pytest.mark.parametrize("matrix", ["w1", "w2"])
@pytest.mark.parametrize(("formats", "role"), [(NVFP4, "scale"), (BF16, "weight")], ids=["nvfp4", "bf16"])
def test_damage_is_found_in_every_column(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    formats: dict[str, str],
    role: str,
    matrix: str,
    tokens: int,
    capacity: int,
    isa: str,
) -> None:
    file = write_experts(tmp_path / "w", formats, COUNT, 80, 144)
    layer = Layer(session(monkeypatch, isa, threads=1), file, formats)
    h, _, weights = inputs(tokens, 80)
    given = h, np.full((tokens, 2), 3), weights
    stored = file.slots[f"{matrix}.3"].parts()[role].load()  # a private map: what is written reaches the kernel only
    stored = stored.view(torch.uint8) if role == "scale" else stored
    for column in range(0, stored.shape[1], 1 if role == "scale" else 3):
        kept = stored[2, column].item()
        stored[2, column] = 0x7F if role == "scale" else -torch.inf
        with pytest.raises(NonFiniteWeight, match=f"at flat index {2 * stored.shape[1] + column}"):
            layer(given, capacity=capacity)
        stored[2, column] = kept
    assert np.isfinite(layer(given, capacity=capacity)).all()


@each_isa
@each_way
def test_what_was_sound_is_not_trusted_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isa: str, capacity: int
) -> None:
    """A token that is not finite has the weights looked at; scales that are damaged later are seen all the same,
    with or without such a token."""
    file = write_experts(tmp_path / "w", NVFP4, COUNT, 80, 144)
    layer = Layer(session(monkeypatch, isa), file, NVFP4)
    h, ids, weights = inputs(3, 80)
    ids[:] = [4, 1]
    h[1, 5] = np.nan
    assert np.isnan(layer((h, ids, weights), capacity=capacity)[1]).all()
    file.slots["w3.4"].parts()["scale"].load().view(torch.uint8)[7, 2] = 0x7F
    for given in (h, np.nan_to_num(h)):
        with pytest.raises(NonFiniteWeight, match=r"w3\.4"):
            layer((given, ids, weights), capacity=capacity)


@each_way
@pytest.mark.parametrize("wrong", [-1, COUNT, 2**40])
def test_an_expert_that_does_not_exist_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: int, capacity: int
) -> None:
    """And leaves nothing behind."""
    file = write_experts(tmp_path / "w", NVFP4, COUNT, 48, 80)
    layer = Layer(session(monkeypatch, ISAS[0]), file, NVFP4)
    h, ids, weights = inputs(3, 48)
    sound = layer((h, ids, weights), capacity=capacity)
    bad = ids.copy()
    bad[1, 1] = wrong
    with pytest.raises(OpRefused, match="from 0 to 5"):
        layer((h, bad, weights), capacity=capacity)
    np.testing.assert_array_equal(layer((h, ids, weights), capacity=capacity), sound)
