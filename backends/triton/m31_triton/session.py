"""The portable backend: Triton kernels where there are some, the reference for the rest, on the reference's pages.

On a processor the kernels are interpreted, which proves them and serves nobody; on an accelerator they are launched.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from m31.errors import BackendRefused
from m31.formats.arithmetic import ArithmeticSpec
from m31.graph import Arithmetic, BoundGraph, Kernel, OpInstance, Refusal, Shard, StepClass
from m31.ops import StateType
from m31.sdk import Backend, KVLayout, KVSpec, LazyTensor, Session, host_memory_free
from m31_triton.calls import attend, insert
from m31_triton.launch import ROWS, Runner, decode_splits, interpreted, on_device, workspace_size
from m31_triton.plan import CapturedPlan, Launched
from m31_triton.weights import EXACT, MATRICES, ProjectionWeights, bytes_of

_FORMATS = ("bfloat16", "nvfp4")
_MAKER = "m31-reference:v2:"  # docs/sdk.md has the components of this layout, which the kernels read and write


class TritonSession(Session):
    """Serves `sparse_attention`, and `qkv_insert` where the graph is fused; bfloat16 operands, pages read exactly.

    Args:
        device: a processor, where kernels are interpreted, or an accelerator of this torch build.
        numerics: an arithmetic with bfloat16 queries, exact reads and probabilities that are not rounded.
        run: what executes a launch; None is what the device needs.
        units: programs that the device runs at once; None asks it.
    """

    def __init__(
        self, device: torch.device, numerics: ArithmeticSpec, *, run: Runner | None = None, units: int | None = None
    ) -> None:
        self.device, self.numerics = device, numerics
        self.dtypes = {"model": torch.float32, "accum": torch.float32, "int64": torch.int64}
        self._run = run or (interpreted if device.type == "cpu" else on_device)
        self._units = units or _units(device)

    @property
    def notes(self) -> tuple[str, ...]:
        """See `Session.notes`."""
        if self.device.type != "cpu":
            return ()
        return ("backend triton interprets its kernels on the processor: right, and slower than any other backend",)

    def fusions(self) -> tuple[str, ...]:
        """See `Session.fusions`."""
        return ("qkv_insert",)

    def kernel(self, op: OpInstance, step: StepClass) -> Kernel | Refusal:
        """At every step class, if sizes, formats and roundings are those of the kernels."""
        if op.spec.name not in ("sparse_attention", "qkv_insert"):
            return Refusal("no portable Triton kernel for it")
        state = next(value for value in op.inputs if isinstance(value, StateType))
        if state.kv_format not in ("", *_FORMATS):
            return Refusal(f"pages are {state.kv_format}, the kernels read and write {' and '.join(_FORMATS)}")
        return self._attention(op, step) if op.spec.name == "sparse_attention" else self._insert(op, step, state)

    @property
    def _how(self) -> str:
        return "interpreted on the processor" if self.device.type == "cpu" else f"compiled for {self.device}"

    def _attention(self, op: OpInstance, step: StepClass) -> Kernel | Refusal:
        _, heads, dim = op.inputs[0].shape  # type: ignore[union-attr]
        topk, kv_heads = int(op.inputs[2].shape[2]), op.attrs["kv_heads"]  # type: ignore[union-attr]
        if heads // kv_heads > ROWS:
            return Refusal(f"{heads // kv_heads} query heads share a KV head, the kernel takes {ROWS}")
        if not isinstance(dim, int) or not _fits(dim):
            return Refusal(f"heads of {dim} channels, the kernel takes powers of two from 16")
        splits = decode_splits(step.tokens * kv_heads, topk, self._units)
        return Kernel(
            name="m31_triton.sparse_decode",
            run=Launched(self._run, attend(op.attrs["layer"], op.attrs["scale"], step, splits)),
            arithmetic=Arithmetic("bfloat16*float32", "float32", "float32"),
            workspace_bytes=4 * workspace_size(step.tokens, kv_heads, dim, splits),
            why=f"{splits} program{'s' * (splits > 1)} per token and KV head, {self._how}",
        )

    def _insert(self, op: OpInstance, step: StepClass, state: StateType) -> Kernel | Refusal:
        shapes = {slot: decl.shape for slot, decl in op.slots.items()}
        sizes = (shapes["q_norm.weight"][0], shapes["iq_norm.weight"][0])
        loose = [f"{name}.weight" for name in MATRICES if op.slots[f"{name}.weight"].stored not in EXACT]
        if loose:
            return Refusal(f"{', '.join(loose)} would be rounded to bfloat16, the kernel is for {' and '.join(EXACT)}")
        if self.numerics.linear_activation != "bfloat16":
            return Refusal(f"arithmetic '{self.numerics.name}' projects other inputs than bfloat16")
        # Pages in bfloat16 round what is written to them, so that the graph does not.
        kv = op.attrs["round_kv"] or state.kv_format == "bfloat16"
        index = op.attrs["round_index"] or state.index_format == "bfloat16"
        if not (op.attrs["round_query"] and kv and index):
            return Refusal("the kernel rounds queries, keys and values to bfloat16, this graph does not")
        if state.index_format not in _FORMATS:
            return Refusal(f"index keys are {state.index_format}, the kernel writes {' and '.join(_FORMATS)}")
        if not all(map(_fits, sizes)):
            return Refusal(f"heads of {sizes[0]} and {sizes[1]} channels, the kernel takes powers of two from 16")
        width = sum(shapes[f"{name}.weight"][0] for name in MATRICES)
        return Kernel(
            name="m31_triton.qkv_insert",
            run=Launched(self._run, insert(op.attrs["layer"], op.attrs["eps"], step, width)),
            arithmetic=Arithmetic("bfloat16", "float32", "bfloat16"),
            workspace_bytes=2 * step.tokens * width,
            why=f"a projection of all branches, then norm, rotation and insert in one launch, {self._how}",
        )

    def prepare(self, op: OpInstance, slots: Mapping[str, LazyTensor], shard: Shard) -> ProjectionWeights:
        """The matrices of `qkv_insert` as one."""
        if op.spec.name != "qkv_insert":
            raise BackendRefused(f"serves no {op.spec.name}, so it prepares no weights of it", where="backend triton")
        return ProjectionWeights.of(slots, self.device)

    def kv_layout(self, spec: KVSpec) -> KVLayout:
        """Refused: pages are the reference's (`shares_pages`)."""
        raise BackendRefused(
            "has no pages of its own",
            where="backend triton",
            expected="that some op on the cache falls back on the reference, as the manifest declares",
        )

    def shares_pages(self, layout: KVLayout) -> bool:
        """The reference's, in bfloat16 or NVFP4, of sizes that the kernels take."""
        if not layout.layout_id.startswith(_MAKER):
            return False
        parts = layout.allocate(1).components()
        first = parts.get("0.k.values", parts.get("0.k.packed"))
        if first is None or first.dtype not in (torch.bfloat16, torch.uint8):
            return False
        page, width = first.shape[2:]
        return _fits(page) and _fits(width if first.dtype == torch.bfloat16 else 2 * width)

    def compile(self, graph: BoundGraph, step: StepClass) -> CapturedPlan:
        """A plan that records its launches in the first run and replays them."""
        return CapturedPlan(graph, step, self.dtypes, self.device, self._run)

    def memory_free(self) -> int:
        """What the device, or the host within its control group, has free."""
        if self.device.type == "cpu":
            return host_memory_free()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def weight_bytes(self, op: OpInstance, slots: Mapping[str, LazyTensor]) -> int:
        """See `Session.weight_bytes`."""
        return bytes_of(slots)


def _fits(size: int) -> bool:
    return size >= 16 and not size & (size - 1)


def _units(device: torch.device) -> int:
    """Programs that a device runs at once; the interpreter runs one."""
    return 1 if device.type == "cpu" else int(torch.cuda.get_device_properties(device).multi_processor_count)


class TritonBackend(Backend):
    """See the module docstring; what it serves is in backend.toml."""

    def open(
        self,
        *,
        device: str | None,
        dtype: str,
        rank: int,
        world: int,
        arithmetic: ArithmeticSpec,
        options: Mapping[str, int],
    ) -> TritonSession:
        """See `Backend.open`."""
        if world != 1:
            raise BackendRefused(f"a world of {world} ranks is not served", where="backend triton", expected="1")
        try:
            target = torch.device(device or "cpu")
            torch.ones(1, device=target).item()  # the meta device has no values
        except (RuntimeError, AssertionError) as error:
            raise BackendRefused(
                f"device '{device}' cannot be used: {str(error).splitlines()[0]}",
                where="backend triton",
                fix="use --device cpu, or a device of this torch build",
            ) from error
        return TritonSession(target, arithmetic)
