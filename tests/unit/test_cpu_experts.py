"""The native experts against the naive definition, on weights decoded by somebody else.

The bound is derived: a dot product of K float32 terms is within `4 sqrt(K) u` of the sum of its terms' magnitudes, and
the activation passes errors of gate and up on with its slopes (|d(g sigmoid(alpha g))| <= 1.1, sigmoid <= 1).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.expert_files import ExpertFile, write_experts

from m31 import ops
from m31.errors import NonFiniteWeight, OpRefused
from m31.graph import OpInstance, StepClass
from m31.ops import TensorDecl, TensorType, WeightDecl
from m31.sdk import this_machine
from m31_cpu.experts import experts_kernel
from m31_cpu.isa import choose
from m31_cpu.threads import Pool
from m31_cpu.weights import expert_weights

ATTRS = {"alpha": 1.702, "beta": 1.0, "limit": 7.0, "routed_scaling_factor": 2.0}
ODD = {"alpha": 1.25, "beta": 0.5, "limit": 3.0, "routed_scaling_factor": 0.75}
NATIVE = choose(this_machine().cpu.flags, {})[0]
ISAS = sorted({"portable", NATIVE})
ROUNDOFF = 2.0**-24
NVFP4 = {"w1": "nvfp4", "w3": "nvfp4", "w2": "nvfp4"}
BF16 = {"w1": "bfloat16", "w3": "bfloat16", "w2": "bfloat16"}
MIXED = {"w1": "nvfp4", "w3": "nvfp4", "w2": "bfloat16"}
COUNT = 6


def instance(file: ExpertFile, topk: int, attrs: dict[str, Any]) -> OpInstance:
    """The op as a graph would hold it."""
    width = file.values["w1.0"].shape[1]
    slots = {s: TensorDecl(t.name, t.shape, (None, None)) for s, t in file.slots.items()}
    inputs = (
        TensorType(("T", width), "T,C", "model"),
        TensorType(("T", topk), "T,K", "int64"),
        TensorType(("T", topk), "T,K", "accum"),
        WeightDecl("experts", slots),
    )
    attrs = {**attrs, "experts": len(slots) // 3}
    return OpInstance("experts", ops.experts, attrs, inputs, ops.experts.types(attrs, inputs))


def run(
    file: ExpertFile,
    formats: dict[str, str],
    given: tuple[Any, Any, Any],
    *,
    isa: str = NATIVE,
    threads: int = 2,
    attrs: dict[str, Any] = ATTRS,
    capacity: int = 64,
) -> np.ndarray:
    """The kernel's output; workspace and output are full of NaN before."""
    h, ids, weights = (torch.as_tensor(x) for x in given)
    op = instance(file, ids.shape[1], attrs)
    step = StepClass(kind="mixed", q_len=0, tokens=capacity, seqs=1, rows=1, pages=1)
    stored: Any = (formats["w1"], formats["w2"])
    kernel = experts_kernel(op, step, stored, isa, "test", Pool(threads))  # type: ignore[arg-type]
    out = torch.full(h.shape, torch.nan)
    workspace = torch.full((kernel.workspace_bytes,), 255, dtype=torch.uint8)
    kernel.run([out], [h.float(), ids, weights.float()], expert_weights(file.slots, stored), workspace)
    return out.double().numpy()


def inputs(tokens: int, width: int, *, topk: int = 2, seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    h = (rng.standard_normal((tokens, width)) * 2).astype(np.float32)
    ids = np.array([rng.permutation(COUNT)[:topk] for _ in range(tokens)], np.int64).reshape(tokens, topk)
    return h, ids, rng.uniform(0.1, 1, (tokens, topk)).astype(np.float32)


def expected(
    values: dict[str, np.ndarray], given: tuple[Any, Any, Any], attrs: dict[str, Any] = ATTRS
) -> tuple[np.ndarray, np.ndarray]:
    """(naive, bound of a float32 kernel's error), both [T,H]."""
    h, ids, weights = (np.asarray(x) for x in given)
    h, weights = h.astype(np.float64), weights.astype(np.float64)
    (want,) = ops.experts.naive(attrs, h, ids, weights, values)
    bound = np.zeros_like(want)
    for t in range(len(h)):
        for e, p in zip(ids[t], weights[t], strict=True):
            w1, w3, w2 = (values[f"{m}.{e}"] for m in ("w1", "w3", "w2"))
            unit = 4 * ROUNDOFF * np.sqrt(w1.shape[1])
            gate, up = w1 @ h[t], w3 @ h[t]
            act = ops.moe.activation(gate, up, attrs)
            off_gate, off_up = (unit * (np.abs(w) @ np.abs(h[t])) for w in (w1, w3))
            off_gate[gate > attrs["limit"] + off_gate] = 0  # beyond a clamp errors do not matter
            off_up[np.abs(up) > attrs["limit"] + off_up] = 0
            g, u = np.minimum(gate, attrs["limit"]), np.clip(up, -attrs["limit"], attrs["limit"])
            off = (np.abs(u) + attrs["beta"]) * 1.1 * off_gate + np.abs(g) * off_up
            off += 8 * ROUNDOFF * (1 + np.abs(attrs["alpha"] * g)) * np.abs(act)  # the exponential
            unit = 4 * ROUNDOFF * np.sqrt(w2.shape[1])
            bound[t] += attrs["routed_scaling_factor"] * p * (np.abs(w2) @ (off + unit * np.abs(act)))
    return want, bound + 4 * ROUNDOFF * np.abs(want)


def check(file: ExpertFile, formats: dict[str, str], given: tuple[Any, Any, Any], **options: Any) -> None:
    want, bound = expected(file.values, given, options.get("attrs", ATTRS))
    got = run(file, formats, given, **options)
    assert np.isfinite(got).all()
    assert (np.abs(got - want) <= bound).all(), float((np.abs(got - want) / bound).max())
    # The bound means something: what is off by a hundredth is outside it nearly everywhere.
    outside = np.abs(want) * 0.01 > bound
    assert want.size == 0 or outside.mean() > 0.7


@pytest.fixture(params=[NVFP4, BF16, MIXED], ids=["nvfp4", "bf16", "mixed"])
def formats(request: pytest.FixtureRequest) -> dict[str, str]:
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("width", "inner"), [(16, 16), (48, 80), (80, 144), (128, 64), (208, 336)])
def test_equals_naive(tmp_path: Path, formats: dict[str, str], width: int, inner: int, isa: str) -> None:
    """Widths with every remainder of a chunk: 16, 32, 48 and none."""
    file = write_experts(tmp_path / "w", formats, COUNT, width, inner)
    for tokens in (0, 1, 2, 7, 64):
        check(file, formats, inputs(tokens, width), isa=isa)


def test_other_parameters_than_usual(tmp_path: Path, formats: dict[str, str]) -> None:
    """BUG-2: none of them is a constant somewhere."""
    file = write_experts(tmp_path / "w", formats, COUNT, 48, 80)
    check(file, formats, inputs(9, 48, topk=3), attrs=ODD)


def test_the_case_beyond_the_clamps(tmp_path: Path) -> None:
    file = write_experts(tmp_path / "w", BF16, COUNT, 64, 32)
    h, ids, weights = inputs(5, 64)
    given = (h * 40, ids, weights)
    gates = np.stack([file.values[f"w1.{e}"] @ x for x, row in zip(given[0], ids, strict=True) for e in row])
    assert gates.max() > 7
    assert gates.min() < -7
    check(file, BF16, given)


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param([[3, 5]] * 9, id="hit-by-all"),
        pytest.param([[2, 2]] * 4, id="twice-by-one-token"),
        pytest.param([[0, 1], [5, 0], [0, 5], [4, 4]], id="some-by-none"),
    ],
)
def test_who_goes_where(tmp_path: Path, formats: dict[str, str], ids: list[list[int]]) -> None:
    file = write_experts(tmp_path / "w", formats, COUNT, 80, 48)
    h, _, weights = inputs(len(ids), 80)
    check(file, formats, (h, np.array(ids), weights))


def test_blocks_of_zeros_and_outliers_are_in_the_data(tmp_path: Path) -> None:
    file = write_experts(tmp_path / "w", NVFP4, COUNT, 208, 336)
    for value in file.values.values():
        groups = np.abs(value).reshape(len(value), -1, 16).max(-1)
        assert (groups == 0).any()
        assert groups.max() > 50 * np.median(groups)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_the_number_of_threads_changes_nothing(tmp_path: Path, formats: dict[str, str], tokens: int, isa: str) -> None:
    file = write_experts(tmp_path / "w", formats, COUNT, 80, 144)
    given = inputs(tokens, 80)
    one, two, five = (run(file, formats, given, threads=n, isa=isa) for n in (1, 2, 5))
    np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(one, five)


@pytest.mark.parametrize("isa", ISAS)
def test_a_token_does_not_notice_its_company(tmp_path: Path, formats: dict[str, str], isa: str) -> None:
    """Bit for bit: what a token gets does not depend on how many others take the same expert."""
    file = write_experts(tmp_path / "w", formats, COUNT, 80, 144)
    h, ids, weights = inputs(23, 80)
    ids[:] = [4, 1]
    together = run(file, formats, (h, ids, weights), isa=isa)
    for size in (1, 2, 3, 4, 5):
        alone = run(file, formats, (h[:size], ids[:size], weights[:size]), isa=isa)
        np.testing.assert_array_equal(alone, together[:size])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_token_that_is_not_finite_stays_so_and_keeps_it_to_itself(
    tmp_path: Path, formats: dict[str, str], value: float
) -> None:
    file = write_experts(tmp_path / "w", formats, COUNT, 80, 144)
    h, ids, weights = inputs(6, 80)
    ids[:] = [4, 1]
    clean = run(file, formats, (h, ids, weights))
    h[2, 7] = value
    got = run(file, formats, (h, ids, weights))
    with np.errstate(invalid="ignore"):
        want, _ = expected(file.values, (h[2:3], ids[2:3], weights[2:3]))
    assert np.isnan(want).any()
    np.testing.assert_array_equal(np.isnan(got[2]), np.isnan(want[0]))
    np.testing.assert_array_equal(np.delete(got, 2, 0), np.delete(clean, 2, 0))


def test_dequantise_gives_what_the_file_holds(tmp_path: Path, formats: dict[str, str]) -> None:
    file = write_experts(tmp_path / "w", formats, COUNT, 48, 80)
    stored: Any = (formats["w1"], formats["w2"])
    for slot, value in expert_weights(file.slots, stored).dequantise().items():
        np.testing.assert_array_equal(value.double().numpy(), file.values[slot])


def test_strided_inputs_and_output(tmp_path: Path) -> None:
    file = write_experts(tmp_path / "w", NVFP4, COUNT, 48, 80)
    h, ids, weights = inputs(5, 48)
    wide = torch.full((5, 3 * 48), torch.nan)
    wide[:, ::3] = torch.as_tensor(h)
    given = (wide[:, ::3], torch.as_tensor(ids).t().contiguous().t(), torch.as_tensor(weights).t().contiguous().t())
    kernel = experts_kernel(
        instance(file, 2, ATTRS),
        StepClass(kind="mixed", q_len=0, tokens=5, seqs=1, rows=1, pages=1),
        ("nvfp4", "nvfp4"),
        NATIVE,
        "test",
        Pool(2),
    )
    out = torch.full((5, 2 * 48), -7.0)
    workspace = torch.empty(kernel.workspace_bytes, dtype=torch.uint8)
    kernel.run([out[:, 1::2]], list(given), expert_weights(file.slots, ("nvfp4", "nvfp4")), workspace)
    np.testing.assert_array_equal(out[:, 1::2].double().numpy(), run(file, NVFP4, (h, ids, weights)))
    assert (out[:, ::2] == -7).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("matrix", ["w1", "w3", "w2"])
@pytest.mark.parametrize(
    ("formats", "role", "byte", "text"),
    [
        (NVFP4, "scale", 0x7F, "at flat index 22"),
        (NVFP4, "scale", 0xFF, "at flat index 22"),
        (NVFP4, "scale", 0x80, "at flat index 22"),
        (NVFP4, "scale", 0xB8, "without a sign"),
        (BF16, "weight", 0x7F, "at flat index 22"),
    ],
)
def test_damaged_weights_are_refused_where_they_are_needed(
    tmp_path: Path, formats: dict[str, str], role: str, byte: int, text: str, matrix: str, tokens: int, isa: str
) -> None:
    """Decision 011: with the tensor's name; an expert that no token reaches does no harm."""
    clean = write_experts(tmp_path / "w", formats, COUNT, 80, 144)
    data = bytearray(clean.path.read_bytes())
    at = clean.offsets[f"{matrix}.3/{role}"] + 22 * (1 if role == "scale" else 2)
    if role == "scale":
        data[at] = byte
    else:
        data[at : at + 2] = b"\x80\x7f"  # infinity
    file = write_experts(tmp_path / "again", formats, COUNT, 80, 144)  # the same once more, unmapped yet
    file.path.write_bytes(data)
    h, ids, weights = inputs(tokens, 80)
    ids[:] = [0, 2]
    assert np.isfinite(run(file, formats, (h, ids, weights), isa=isa)).all()
    ids[-1] = [0, 3]
    with pytest.raises(NonFiniteWeight, match=text) as caught:
        run(file, formats, (h, ids, weights), isa=isa)
    assert f"{matrix}.3" in str(caught.value)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize(("formats", "role"), [(NVFP4, "scale"), (BF16, "weight")], ids=["nvfp4", "bf16"])
def test_damage_is_found_in_every_column(
    tmp_path: Path, formats: dict[str, str], role: str, tokens: int, isa: str
) -> None:
    file = write_experts(tmp_path / "w", formats, COUNT, 80, 144)
    h, _, weights = inputs(tokens, 80)
    given = h, np.full((tokens, 2), 3), weights
    stored = file.slots["w2.3"].parts()[role].load()  # a private map: what is written here reaches the kernel, no file
    stored = stored.view(torch.uint8) if role == "scale" else stored
    for column in range(stored.shape[1]):
        kept = stored[2, column].item()
        stored[2, column] = 0x7F if role == "scale" else -torch.inf
        with pytest.raises(NonFiniteWeight, match=f"at flat index {2 * stored.shape[1] + column}"):
            run(file, formats, given, isa=isa)
        stored[2, column] = kept
    assert np.isfinite(run(file, formats, given, isa=isa)).all()


@pytest.mark.parametrize("wrong", [-1, COUNT])
def test_an_expert_that_does_not_exist_is_refused(tmp_path: Path, wrong: int) -> None:
    file = write_experts(tmp_path / "w", NVFP4, COUNT, 48, 80)
    h, ids, weights = inputs(3, 48)
    ids[1, 1] = wrong
    with pytest.raises(OpRefused, match="from 0 to 5"):
        run(file, NVFP4, (h, ids, weights))


def test_parts_of_tensors_are_read_where_they_are(tmp_path: Path, formats: dict[str, str]) -> None:
    """Rows of w1 and w3 and columns of w2, as a rank of a world takes them; w2's rows then have gaps."""
    whole = write_experts(tmp_path / "w", formats, COUNT, 80, 144)
    low, high = 48, 112
    slots = {s: t.slice(1 if s.startswith("w2") else 0, low, high) for s, t in whole.slots.items()}
    values = {s: v[:, low:high] if s.startswith("w2") else v[low:high] for s, v in whole.values.items()}
    part = ExpertFile(whole.path, slots, values)
    check(part, formats, inputs(7, 80))
    stored: Any = (formats["w1"], formats["w2"])
    assert expert_weights(slots, stored).in_place == frozenset(slots)
