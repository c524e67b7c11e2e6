"""A simulated graph capture: one step recorded, replayed with other contents, and nothing but contents may change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.triton_helpers import FORMATS, Step, make_step, pages_of, store
from torch import Tensor

from m31.formats.layout import ScaleOrder
from m31.graph import StepClass
from m31_reference.cache import Store
from m31_reference.kernels import KERNELS
from m31_triton.capture import Capture
from m31_triton.errors import CaptureMismatch
from m31_triton.launch import (
    IndexBranch,
    Launch,
    Runner,
    interpreted,
    launch_projection,
    launch_qkv_insert,
    launch_sparse_decode,
    on_device,
    workspace_size,
)

HQ, HKV, HIQ, DIM, PAGE, HIDDEN, PAGES, CAPACITY, SPLITS = 4, 2, 2, 32, 16, 32, 12, 4, 2
ROW = (HQ + 2 * HKV + HIQ + 1) * DIM


class Decode:
    """One decode step's buffers at capacity: projection, insert and attention. `run` launches, and decides nothing."""

    def __init__(self, fmt: str, order: ScaleOrder) -> None:
        g = torch.Generator().manual_seed(0)
        self.order = order
        self.w = (torch.randn(ROW, HIDDEN, generator=g) / 4).bfloat16()
        self.norms = [torch.randn(DIM, generator=g) * 0.3 for _ in range(4)]
        self.step = StepClass(kind="decode", q_len=1, tokens=CAPACITY, seqs=CAPACITY, rows=CAPACITY, pages=4)
        self.x = torch.empty(CAPACITY, HIDDEN, dtype=torch.bfloat16)
        self.cos, self.sin = torch.empty(CAPACITY, 8), torch.empty(CAPACITY, 8)
        self.slots, self.positions = (torch.empty(CAPACITY, dtype=torch.int64) for _ in range(2))
        self.cu_q = torch.empty(CAPACITY + 1, dtype=torch.int64)
        self.table = torch.empty(CAPACITY, 4, dtype=torch.int64)
        self.blocks = torch.empty(CAPACITY, HKV, 2, dtype=torch.int64)
        self.rows = torch.empty(CAPACITY, ROW)
        self.q = torch.empty(CAPACITY, HQ, DIM, dtype=torch.bfloat16)
        self.iq = torch.empty(CAPACITY, HIQ, DIM, dtype=torch.bfloat16)
        self.out = torch.empty(CAPACITY, HQ * DIM)
        self.workspace = torch.empty(workspace_size(CAPACITY, HKV, DIM, SPLITS))
        self.stores = [
            store(fmt, o, PAGES, heads, PAGE, DIM) for o, heads in (("linear", HKV), (order, HKV), ("linear", 1))
        ]
        for s in self.stores:  # what earlier steps left
            for page in range(PAGES):
                at = torch.full((PAGE,), page), torch.arange(PAGE)
                s.write(*at, torch.randn(PAGE, s.heads, DIM, generator=g).bfloat16().float())

    def fill(self, seed: int, s: Step) -> None:
        """Contents of one step; addresses stay."""
        g = torch.Generator().manual_seed(seed)
        self.x.copy_(torch.randn(CAPACITY, HIDDEN, generator=g))
        self.x[s.used :] = torch.nan
        KERNELS["rope_table"]({"theta": 1e4, "rotary_dim": 16})([self.cos, self.sin], [s.positions], None, None)
        for mine, given in (
            *((self.slots, s.slot_map), (self.positions, s.positions), (self.cu_q, s.cu_q)),
            *((self.table, s.page_table), (self.blocks, s.blocks)),
        ):
            mine.copy_(given)

    def run(self, run: Runner, *, scale: float = DIM**-0.5, step: StepClass | None = None) -> None:
        step = step or self.step
        k, v, index = self.stores
        launch_projection(run, step, x=self.x, w=self.w, slot_map=self.slots, y=self.rows)
        launch_qkv_insert(
            run,
            step,
            rows=self.rows,
            q_norm=self.norms[0],
            k_norm=self.norms[1],
            table=(self.cos, self.sin),
            slot_map=self.slots,
            q_out=self.q,
            k=pages_of(k, "linear", DIM),
            v=pages_of(v, self.order, DIM),
            index=IndexBranch(
                q_norm=self.norms[2], k_norm=self.norms[3], q_out=self.iq, pages=pages_of(index, "linear", DIM)
            ),
            eps=1e-6,
        )
        launch_sparse_decode(
            run,
            step,
            q=self.q,
            k=pages_of(k, "linear", DIM),
            v=pages_of(v, self.order, DIM),
            blocks=self.blocks,
            positions=self.positions,
            cu_q=self.cu_q,
            page_table=self.table,
            out=self.out,
            scale=scale,
            splits=SPLITS,
            workspace=self.workspace,
        )

    def result(self) -> dict[str, bytes]:
        """Outputs of the rows in use, and every byte of the pages."""
        used = int(self.cu_q[-1])
        seen: dict[str, Tensor] = {"q": self.q[:used], "iq": self.iq[:used], "out": self.out[:used]}
        for name, s in zip(("k", "v", "index"), self.stores, strict=True):
            seen |= {f"{name}.{part}": tensor for part, tensor in s.parts.items()}
        return {name: t.contiguous().view(torch.uint8).numpy().tobytes() for name, t in seen.items()}


def sequences(seed: int, ctx: list[int]) -> Step:
    return make_step(
        seed,
        [1] * len(ctx),
        ctx,
        page=PAGE,
        kv_heads=HKV,
        topk=2,
        capacity=CAPACITY,
        seqs=CAPACITY,
        width=4,
        pages=PAGES,
    )


FULL, SHORT, LONG = sequences(1, [40, 17, 33, 5]), sequences(2, [9, 50]), sequences(3, [64, 33, 16])


@pytest.mark.parametrize(("fmt", "order"), [FORMATS[0], FORMATS[2]])
def test_replays_are_fresh_runs(fmt: str, order: ScaleOrder) -> None:
    """Other tokens, positions, slots, page tables and fewer sequences: replaying equals launching anew, bit for bit."""
    recorded, fresh = Decode(fmt, order), Decode(fmt, order)
    plan = Capture(interpreted)
    recorded.fill(1, FULL)
    fresh.fill(1, FULL)
    with plan.record() as run:
        recorded.run(run)
    fresh.run(interpreted)
    assert recorded.result() == fresh.result()
    previous = recorded.result()
    for seed, step in ((2, SHORT), (3, LONG)):
        recorded.fill(seed, step)
        fresh.fill(seed, step)
        plan.replay()
        fresh.run(interpreted)
        assert recorded.result() == fresh.result()
        assert recorded.result()["out"] != previous["out"]
        previous = recorded.result()
    assert [launch.name for launch in plan.launches] == [*("projection", "qkv_insert", "sparse_decode", "merge_splits")]


def captured() -> tuple[Decode, Capture]:
    decode, plan = Decode("bfloat16", "linear"), Capture(lambda launch: None)
    with plan.record() as run:
        decode.run(run)
    return decode, plan


def test_grids_depend_on_capacities_only() -> None:
    """Recorded with one step's contents or another's, or none at all, the launches are the same."""
    decode, plan = captured()
    for seed, step in ((1, FULL), (2, SHORT)):
        decode.fill(seed, step)
        with plan.check() as run:
            decode.run(run)
    assert [launch.grid for launch in plan.launches] == [(1, 6), (4, 5), (4, 2, 2), (4, 2)]


def test_replaying_needs_no_decision_of_the_step() -> None:
    """A replay launches what was recorded even if the code that recorded it is gone."""
    ran: list[Launch] = []
    decode, plan = Decode("bfloat16", "linear"), Capture(ran.append)
    with plan.record() as run:
        decode.run(run)
    first = list(ran)
    del decode
    plan.replay()
    assert ran == first + first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: setattr(d, "out", torch.empty_like(d.out)),
            r"launch 2 of sparse_decode: argument 'out' is .* at 0x",
        ),
        (lambda d: setattr(d, "slots", d.slots.clone()), "launch 0 of projection: argument 'slot_map' is"),
        (lambda d: setattr(d, "q", d.q.float()), "launch 1 of qkv_insert: argument 'q_out' is torch.float32"),
        (lambda d: d.stores.insert(0, d.stores.pop(1)), "launch 1 of qkv_insert: argument '[kv]_pages' is"),
    ],
    ids=["address", "address-of-an-input", "dtype", "pages"],
)
def test_another_buffer_is_named(change: Any, message: str) -> None:
    decode, plan = captured()
    change(decode)
    with pytest.raises(CaptureMismatch, match=message) as caught, plan.check() as run:
        decode.run(run)
    assert "expected" in str(caught.value)


def test_another_number_is_named() -> None:
    decode, plan = captured()
    with (
        pytest.raises(
            CaptureMismatch, match=r"sparse_decode: argument 'scale_log2' is 0\.5.*expected as recorded: 0\.25"
        ),
        plan.check() as run,
    ):
        decode.run(run, scale=0.3535)


def _all(run: Runner, launches: list[Launch]) -> None:
    for launch in launches:
        run(launch)


def test_other_sequences_of_launches_are_named() -> None:
    _, plan = captured()
    with pytest.raises(CaptureMismatch, match="launch 0 of projection is missing"), plan.check():
        pass
    twice = [*plan.launches, *plan.launches]
    with pytest.raises(CaptureMismatch, match=r"launch 4 of projection; expected none"), plan.check() as run:
        _all(run, twice)
    with pytest.raises(CaptureMismatch, match=r"launch 0 of projection: is sparse_decode"), plan.check() as run:
        run(plan.launches[2])
    other = Launch(plan.launches[0].kernel, (2, 6), plan.launches[0].arguments, plan.launches[0].options)
    with pytest.raises(CaptureMismatch, match=r"the grid: \(2, 6\); expected \(1, 6\)"), plan.check() as run:
        run(other)


def test_memory_that_moved_under_a_recorded_tensor_is_refused() -> None:
    decode, plan = captured()
    decode.rows.set_(torch.empty_like(decode.rows))
    with pytest.raises(CaptureMismatch, match=r"argument 'y' is .*expected as recorded"):
        plan.replay()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda d: d.x + 1, r"aten::add.Tensor between launches is not captured.*compute in kernels"),
        (lambda d: d.x.float(), "aten::_to_copy between launches"),
        (lambda d: torch.empty(3), r"aten::empty.memory_format between launches is not captured.*allocate before"),
        (lambda d: d.slots.tolist(), r"read on the host \(tolist\).*let the kernel read it"),
        (lambda d: int(d.cu_q[-1]), r"read on the host \(__int__\)"),
        (lambda d: bool(d.slots[0]), r"read on the host \(__bool__\)"),
        (lambda d: d.slots.numpy(), r"read on the host \(numpy\)"),
    ],
)
def test_what_a_replay_would_leave_out_is_refused(what: Any, message: str) -> None:
    decode, plan = Decode("bfloat16", "linear"), Capture(lambda launch: None)
    with pytest.raises(CaptureMismatch, match=message), plan.record():
        what(decode)
    with pytest.raises(CaptureMismatch, match="nothing is recorded"):  # and nothing was
        plan.replay()
    with plan.record() as run:
        decode.run(run)
    plan.replay()


def test_a_capture_is_recorded_once() -> None:
    decode, plan = captured()
    with pytest.raises(CaptureMismatch, match=r"recorded already.*another one"), plan.record() as run:
        decode.run(run)


def test_pages_of_the_reference_are_used_in_place() -> None:
    """No copy: the launch's arguments are the cache's own memory."""
    decode, plan = captured()
    arguments = plan.launches[1].arguments
    stores: list[Store] = decode.stores
    assert [arguments[n].data_ptr() for n in ("k_pages", "v_pages", "ik_pages")] == [
        s.parts["values"].data_ptr() for s in stores
    ]


def test_on_a_device_a_launch_is_the_kernel_over_its_grid_with_arguments_and_options() -> None:
    seen: list[Any] = []

    class Compiled:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda **given: seen.append((grid, given))

    on_device(Launch(Compiled(), (3, 2), {"x": 1}, {"num_warps": 4}))
    assert seen == [((3, 2), {"x": 1, "num_warps": 4})]
