"""What a backend implements (DESIGN.md §3). All state lives in the objects below; there are no module globals.

The contract is docs/sdk.md; decision 016 records what changed it before it was frozen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal, Protocol

from m31.errors import BackendRefused

if TYPE_CHECKING:
    import torch

    from m31.config import Draft, Model, Text
    from m31.formats.arithmetic import ArithmeticSpec
    from m31.formats.layout import ScaleOrder
    from m31.graph import BoundGraph, Kernel, OpInstance, Plan, Refusal, StepClass, WeightHandle
    from m31.parallel import Shard
    from m31.sdk.manifest import Manifest

KVFormat = Literal["float64", "float32", "bfloat16", "fp8", "nvfp4"]
IndexFormat = Literal["float64", "float32", "bfloat16", "fp8", "nvfp4", "int8"]
_PLAIN_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "fp8": 1}
_NVFP4_GROUP = 16


def vector_bytes(name: str, dim: int) -> int:
    """Bytes of one stored key or value vector of `dim` elements: MODEL.md §3.3.

    NVFP4 is half a byte per element and one scale byte per 16; int8 is a byte per element and a float32 scale per key.
    FP8 pages have no scale: K and V are stored at unit scale (§3.5, BUG-8).
    """
    if name == "nvfp4":
        return dim // 2 + dim // _NVFP4_GROUP
    return dim + 4 if name == "int8" else dim * _PLAIN_BYTES[name]


class LazyTensor(Protocol):
    """A logical weight tensor that has not been read yet."""

    @property
    def name(self) -> str:
        """Canonical checkpoint name."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape."""

    @property
    def dtype(self) -> torch.dtype:
        """What `load` returns."""

    @property
    def format(self) -> str:
        """How it is stored: `plain`, `mxfp8` or `nvfp4`."""

    def load(self) -> torch.Tensor:
        """The values: plain ones mapped from the file where the storage allows it and never written to, quantised
        ones decoded to float32."""

    def parts(self) -> Mapping[str, StoredPart]:
        """The stored tensors by role, mapped from the file: a plain weight has itself as `weight`; mxfp8 has `codes`
        float8_e4m3fn [N, K] and `scale` uint8 [N, K/32]; nvfp4 has `packed` uint8 [N, K/2], `scale` float8_e4m3fn
        [N, K/16], `global_scale` and `input_global_scale`, encode scales, float32 [1]. Whatever the file's dialect."""


class StoredPart(Protocol):
    """One stored tensor of a quantised weight. Block scales are checked by `m31.formats.scales.check_scale`."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape as stored."""

    @property
    def dtype(self) -> torch.dtype:
        """What `load` returns."""

    @property
    def path(self) -> object:
        """Its file, for messages."""

    def load(self) -> torch.Tensor:
        """Its elements as stored."""


def stored_as(tensor: LazyTensor) -> str:
    """How a tensor is stored, in the words of `TensorDecl.stored`."""
    return tensor.format if tensor.format != "plain" else str(tensor.dtype).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True)
class KVSpec:
    """What a KV layout must hold.

    Args:
        indexed: per layer, whether it also stores an index key.
        kv_heads, head_dim, index_dim: sizes per token.
        page_tokens: tokens of a page; equals the sparse block size.
        kv_format, index_format: storage formats.
        v_scale_order: order of the V scales inside an NVFP4 page (MODEL.md §3.4): the two decode to the same values
            and are different layouts. K scales are linear in both. It has no meaning for other formats.
        head_shard: (index, count): which part of the model's KV heads this is.
        draft: these are the pages of a draft head, read as they are stored whatever the arithmetic (MODEL.md §5.1).
    """

    indexed: tuple[bool, ...]
    kv_heads: int
    head_dim: int
    index_dim: int
    page_tokens: int
    kv_format: KVFormat
    index_format: IndexFormat
    v_scale_order: ScaleOrder = "linear"
    head_shard: tuple[int, int] = (0, 1)
    draft: bool = False

    @property
    def main_bytes(self) -> int:
        """Bytes of K and V of one token over all layers, MODEL.md §3.3."""
        return 2 * self.kv_heads * vector_bytes(self.kv_format, self.head_dim) * len(self.indexed)

    @property
    def index_bytes(self) -> int:
        """Bytes of the index keys of one token over all layers that have one."""
        return vector_bytes(self.index_format, self.index_dim) * sum(self.indexed)

    def name(self, maker: str, version: int) -> str:
        """A layout id: KV format x index format x head shard x version, and the geometry that the bytes depend on.

        Args:
            maker: who orders the bytes; pages of two makers are not interchangeable (MODEL.md §3.4).
            version: of that order.
        """
        order = f"/v-scales-{self.v_scale_order}" if self.kv_format == "nvfp4" else ""
        index = "".join("i" if has else "-" for has in self.indexed)
        return (
            f"{maker}:v{version}:kv={self.kv_format}{order}:index={self.index_format}"
            f":heads={self.kv_heads}x{self.head_dim},shard{self.head_shard[0]}of{self.head_shard[1]}"
            f":page={self.page_tokens}:index_dim={self.index_dim}:layers={_runs(index)}"
        )

    @classmethod
    def of(
        cls, text: Text, kv_format: KVFormat, index_format: IndexFormat, v_scale_order: ScaleOrder = "linear"
    ) -> KVSpec:
        """The spec of a text model."""
        return cls(
            indexed=tuple(kind == "sparse" for kind in text.attention),
            kv_heads=text.num_kv_heads,
            head_dim=text.head_dim,
            index_dim=text.sparse.index_dim if text.sparse else 0,
            page_tokens=text.sparse.block_size if text.sparse else DENSE_PAGE_TOKENS,
            kv_format=kv_format,
            index_format=index_format,
            v_scale_order=v_scale_order,
        )

    @classmethod
    def of_draft(cls, draft: Draft, target: KVSpec, kv_format: KVFormat) -> KVSpec:
        """The spec of a draft head: K and V of its layers for the same tokens as the target's page."""
        return cls(
            indexed=(False,) * draft.num_layers,
            kv_heads=draft.num_kv_heads,
            head_dim=draft.head_dim,
            index_dim=0,
            page_tokens=target.page_tokens,
            kv_format=kv_format,
            index_format=target.index_format,
            draft=True,
        )


def _runs(kinds: str) -> str:
    """`iii--` as `3i2-`: sixty layers stay readable."""
    return "".join(f"{len(list(group))}{kind}" for kind, group in groupby(kinds))


DENSE_PAGE_TOKENS = 128  # page size of a model without a sparse layer, where no block size says it


class KVLayout(ABC):
    """A page layout: how many bytes, under which name, and how to allocate it."""

    layout_id: str  # KV format x index format x head shard x version; anything exported carries it
    page_bytes: int  # bytes of one page over all layers

    @abstractmethod
    def allocate(self, pages: int) -> KVCache:
        """A cache of `pages` pages, contents undefined."""


@dataclass(frozen=True, eq=False)
class ExportedPages:
    """Whole pages outside a cache: the stored bytes, under the name of their layout (BUG-71).

    Args:
        layout_id: of the cache that they come from.
        count: pages.
        tensors: component name -> tensor whose first dimension is `count`; stored codes, nothing decoded.
    """

    layout_id: str
    count: int
    tensors: Mapping[str, torch.Tensor]


class KVCache(ABC):
    """Allocated pages."""

    layout: KVLayout
    pages: int

    @abstractmethod
    def poison(self, pages: Sequence[int]) -> None:
        """Make every token of these pages read as NaN, so that reading one that was never written shows (BUG-5)."""

    @abstractmethod
    def read(self, layer: int, page: int) -> dict[str, torch.Tensor]:
        """One page of one layer, decoded exactly: `k` and `v` [kv_heads, page_tokens, head_dim], `index`
        [page_tokens, D]; in the storage dtype where that is a plain one, else float32."""

    def components(self) -> Mapping[str, torch.Tensor]:
        """The stored tensors of all pages, by name: `<layer>.k.<part>`, `<layer>.v.<part>`, `<layer>.index.<part>`, the
        first dimension the page; parts and shapes belong to the layout id. For kernels of another backend that works
        on these pages (`Session.shares_pages`). Views: what is written there is in the cache.

        Raises:
            BackendRefused: the default: pages that nobody else works on.
        """
        raise BackendRefused("gives no access to its pages", where=self.layout.layout_id)

    @abstractmethod
    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole pages of all layers, source[i] to target[i]."""

    @abstractmethod
    def export(self, pages: Sequence[int]) -> ExportedPages:
        """Copies of whole pages of all layers, as stored, with the layout id."""

    @abstractmethod
    def import_(self, exported: ExportedPages, pages: Sequence[int]) -> None:
        """Write exported pages over `pages`, in order.

        Raises:
            LayoutMismatch: the id is not this cache's, or the tensors are not what that id says; nothing was written.
        """


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a session serves for a model; the core enforces it with named errors. The first format of each list is the
    default, as in the manifest."""

    max_context: int  # tokens
    kv_formats: tuple[KVFormat, ...]
    index_formats: tuple[IndexFormat, ...]
    draft_tokens: int
    image: bool
    video: bool

    @classmethod
    def declared(cls, manifest: Manifest, model: Model) -> Limits:
        """What a manifest allows for a model."""
        limits = manifest.limits
        return cls(
            max_context=min(limits.context_tokens, model.text.max_position),
            kv_formats=manifest.formats.kv,
            index_formats=manifest.formats.index,
            draft_tokens=limits.draft_tokens,
            image=limits.image,
            video=limits.video,
        )

    def within(self, other: Limits) -> bool:
        """Nothing here is more than there."""
        return (
            self.max_context <= other.max_context
            and set(self.kv_formats) <= set(other.kv_formats)
            and set(self.index_formats) <= set(other.index_formats)
            and self.draft_tokens <= other.draft_tokens
            and self.image <= other.image
            and self.video <= other.video
        )


class Session(ABC):
    """A backend opened on one device (one rank of a world)."""

    device: torch.device
    dtypes: Mapping[str, torch.dtype]  # what the op dtypes `model`, `accum` and `int64` are here
    numerics: ArithmeticSpec  # what is quantised besides stored weights and pages; kernels declare it one by one

    @property
    def notes(self) -> Sequence[str]:
        """What a user should know about how this session computes; asked for when the weights are prepared."""
        return ()

    def limits(self, model: Model, declared: Limits) -> Limits:
        """What this session serves for `model`.

        Args:
            model: the description of the checkpoint.
            declared: what the manifest allows for it. The default returns it; a session may narrow it or reorder the
                formats, and must not widen it.
        """
        return declared

    def fusions(self) -> tuple[str, ...]:
        """Names of `m31.ops.fused.FUSED` that the core shall look for in the graph, in order; none by default. `kernel`
        is then asked for each place, and the parts stay where it refuses."""
        return ()

    @abstractmethod
    def kernel(self, op: OpInstance, step: StepClass) -> Kernel | Refusal:
        """A kernel for an op instance, decided when the graph is bound; per call nothing is dispatched."""

    @abstractmethod
    def prepare(self, op: OpInstance, slots: Mapping[str, LazyTensor], shard: Shard) -> WeightHandle:
        """Bring the weights of one op into this backend's layout, all slots at once.

        Args:
            op: the instance that the handle is for.
            slots: its tensors by slot (`OpInstance.slots`), already narrowed to this rank's part.
            shard: which rank that is.

        Whatever is not read in place (`WeightHandle.in_place`) must be released when this returns.
        """

    def kv_layout(self, spec: KVSpec) -> KVLayout:
        """The page layout for a spec; asked only of a backend that serves every op on the cache.

        Raises:
            BackendRefused: a format that is not served; the default, for a backend without pages of its own.
        """
        raise BackendRefused("has no pages of its own", where=f"{type(self).__name__}")

    @abstractmethod
    def memory_free(self) -> int:
        """Bytes that can be allocated on this device now, weights and KV pages together."""

    @abstractmethod
    def weight_bytes(self, op: OpInstance, slots: Mapping[str, LazyTensor]) -> int:
        """Bytes that `prepare` of these slots will allocate; what stays in the mapped file does not count."""

    def shares_pages(self, layout: KVLayout) -> bool:
        """Whether this session's kernels work on another backend's pages; asked if some ops on the cache fall back
        to that backend and others do not."""
        return False

    def compile(self, graph: BoundGraph, step: StepClass) -> Plan:
        """A plan for a bound graph. The default is the straight line; capture overrides this hook."""
        from m31.graph import DefaultPlan

        return DefaultPlan(graph, step, self.dtypes, self.device)


class Backend(ABC):
    """The object behind an entry point of the group `m31.backends`."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    @abstractmethod
    def open(
        self,
        *,
        device: str | None,
        dtype: str,
        rank: int,
        world: int,
        arithmetic: ArithmeticSpec,
        options: Mapping[str, int],
    ) -> Session:
        """Open the backend.

        What the manifest rules out never gets here: the core refuses another dtype, arithmetic or option.

        Args:
            device: a torch device name; None means the backend's own choice.
            dtype: the compute dtype, one of the manifest's `formats.compute`.
            rank, world: which device of how many.
            arithmetic: what is rounded while the model runs, one of the manifest's.
            options: those of the manifest's `options` that the user gave. `weight_cache_bytes`: bytes of decoded
                weights to keep at most, for a backend that decodes quantised weights while it runs.

        Raises:
            BackendRefused: this device or a combination is not served here; says why.
        """
