"""What a backend implements (DESIGN.md §3). All state lives in the objects below; there are no module globals.

The contract is a draft until API version 1.0; `docs/decisions/` records what changed it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch

    from m31.config import Model, Text
    from m31.graph import BoundGraph, Kernel, OpInstance, Plan, Refusal, StepClass, WeightHandle
    from m31.sdk.manifest import Manifest

KVFormat = Literal["float64", "float32", "bfloat16"]
KV_BYTES: dict[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2}


class LazyTensor(Protocol):
    """A logical weight tensor that has not been read yet."""

    @property
    def name(self) -> str:
        """Canonical checkpoint name."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape."""

    def load(self) -> torch.Tensor:
        """The values, mapped from the file where the storage allows it; never written to."""


@dataclass(frozen=True, kw_only=True)
class KVSpec:
    """What a KV layout must hold.

    Args:
        indexed: per layer, whether it also stores an index key.
        kv_heads, head_dim, index_dim: sizes per token.
        page_tokens: tokens of a page; equals the sparse block size.
        kv_format, index_format: storage formats.
    """

    indexed: tuple[bool, ...]
    kv_heads: int
    head_dim: int
    index_dim: int
    page_tokens: int
    kv_format: KVFormat
    index_format: KVFormat

    @classmethod
    def of(cls, text: Text, kv_format: KVFormat, index_format: KVFormat) -> KVSpec:
        """The spec of a text model."""
        return cls(
            indexed=tuple(kind == "sparse" for kind in text.attention),
            kv_heads=text.num_kv_heads,
            head_dim=text.head_dim,
            index_dim=text.sparse.index_dim if text.sparse else 0,
            page_tokens=text.sparse.block_size if text.sparse else DENSE_PAGE_TOKENS,
            kv_format=kv_format,
            index_format=index_format,
        )


DENSE_PAGE_TOKENS = 128  # page size of a model without a sparse layer, where no block size says it


class KVLayout(ABC):
    """A page layout: how many bytes, under which name, and how to allocate it."""

    layout_id: str  # KV format x index format x head shard x version; anything exported carries it
    page_bytes: int  # bytes of one page over all layers

    @abstractmethod
    def allocate(self, pages: int) -> KVCache:
        """A cache of `pages` pages, contents undefined."""


class KVCache(ABC):
    """Allocated pages."""

    layout: KVLayout
    pages: int

    @abstractmethod
    def poison(self, pages: Sequence[int]) -> None:
        """Fill pages with NaN, so that reading a token that was never written shows (BUG-5)."""

    @abstractmethod
    def read(self, layer: int, page: int) -> dict[str, torch.Tensor]:
        """Copies of one page of one layer: `k` and `v` [kv_heads, page_tokens, head_dim], `index` [page_tokens, D]."""

    @abstractmethod
    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole pages of all layers, source[i] to target[i]."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a session serves for a model; the core enforces it with named errors."""

    max_context: int  # tokens
    kv_formats: tuple[KVFormat, ...]
    draft_tokens: int
    image: bool
    video: bool


class Session(ABC):
    """A backend opened on one device (one rank of a world)."""

    device: torch.device
    dtypes: Mapping[str, torch.dtype]  # what the op dtypes `model`, `accum` and `int64` are here

    @abstractmethod
    def limits(self, model: Model) -> Limits:
        """What this session serves for `model`."""

    @abstractmethod
    def kernel(self, op: OpInstance, step: StepClass) -> Kernel | Refusal:
        """A kernel for an op instance, decided when the graph is bound; per call nothing is dispatched."""

    @abstractmethod
    def prepare(self, op: OpInstance, slots: Mapping[str, LazyTensor]) -> WeightHandle:
        """Bring the weights of one op into this backend's layout, all slots at once."""

    @abstractmethod
    def kv_layout(self, spec: KVSpec) -> KVLayout:
        """The page layout for a spec."""

    @abstractmethod
    def memory_budget(self) -> int:
        """Bytes that the core may allocate for KV pages on this device now."""

    def compile(self, graph: BoundGraph, step: StepClass) -> Plan:
        """A plan for a bound graph. The default is the straight line; capture overrides this hook."""
        from m31.graph import DefaultPlan

        return DefaultPlan(graph, step, self.dtypes, self.device)


class Backend(ABC):
    """The object behind an entry point of the group `m31.backends`."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    @abstractmethod
    def open(self, *, device: str | None, dtype: str, rank: int, world: int) -> Session:
        """Open the backend. `device` None means the backend's own choice; `dtype` is the compute dtype.

        Raises:
            BackendRefused: this device, dtype or topology is not served here; says why.
        """
