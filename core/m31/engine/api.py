"""`m31.load`: from a folder to a model that runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from m31 import sdk
from m31.checkpoint import Checkpoint
from m31.config import Model as ModelConfig
from m31.engine.engine import Engine
from m31.engine.model import Cap, Model
from m31.errors import BackendRefused, MemoryBudgetExceeded, RequestError
from m31.graph import NO_ROUNDING, ModelGraph, OpInstance, Rounding, trace
from m31.ops import WeightDecl
from m31.sdk.backend import KVCache, KVSpec, LazyTensor, Session
from m31.sdk.manifest import Manifest
from m31.text.template import ChatTemplate
from m31.text.tokenizer import Tokenizer

CHUNK_TOKENS = 2048
_KV_SHARE = 0.5  # of the memory that is free; the rest is for activations and for mapped weights
_POOL_TOKENS = 65_536  # the default pool, where one sequence at the cap does not need more


def load(
    path: str | Path,
    *,
    backend: str | None = None,
    device: str | None = None,
    dtype: str = "float32",
    kv_dtype: str | None = None,
    index_dtype: str | None = None,
    arithmetic: str | None = None,
    max_context: int | None = None,
    weight_cache_bytes: int | None = None,
) -> Model:
    """Load a checkpoint folder.

    Args:
        path: the folder; everything in it is validated before anything is computed.
        backend: a backend's name; None chooses (see `m31 backends`).
        device: passed to the backend; None is its own choice.
        dtype: compute dtype, `float32` or `float64` on the reference.
        kv_dtype: format of K and V in the pages; None is the backend's default, the first of its list, or `nvfp4` with
            an arithmetic that reads keys and values as E4M3.
        index_dtype: format of the index keys; likewise.
        arithmetic: what else is quantised, a name of `m31.formats.arithmetic`; None is the backend's own. On the
            reference that is nothing, and other names imitate what a kernel with that arithmetic computes.
        max_context: most tokens of a sequence; None is what model, backend and memory allow.
        weight_cache_bytes: bytes of decoded weights kept in memory, for a backend that decodes quantised weights while
            it runs; None is its own choice.

    Raises:
        BackendError: no such backend, or it cannot be used here.
        ConfigError, CheckpointError, TokenizerError, TemplateError: the folder is not right.
        MemoryBudgetExceeded: `max_context` does not fit the memory.
    """
    if max_context is not None and max_context < 1:
        raise RequestError(f"max_context is {max_context!r}", expected="a positive number of tokens")
    decision = sdk.decide(backend)
    manifest = decision.require().manifest
    assert manifest is not None, "a backend without a manifest is never chosen"
    name = manifest.name
    if manifest.fallback:
        raise BackendRefused(
            f"declares fallbacks ({', '.join(manifest.fallback)}), which this version of m31 does not run",
            where=f"backend {name}",
            fix="choose another backend with --backend",
        )
    checkpoint = Checkpoint.open(path)
    config = checkpoint.config
    text = config.text
    folder = Path(path)
    tokenizer = None
    if (folder / "tokenizer.json").exists():
        tokenizer = Tokenizer.load(folder, vocab_size=text.vocab_size, bos=text.bos_token_id, eos=text.eos_token_ids)
    template = ChatTemplate.find(folder)
    session = sdk.open_backend(decision).open(
        device=device, dtype=dtype, rank=0, world=1, arithmetic=arithmetic, weight_cache_bytes=weight_cache_bytes
    )
    limits = session.limits(config)
    if kv_dtype is None and session.numerics.kv_read == "e4m3" and "nvfp4" in limits.kv_formats:
        kv_dtype = (
            "nvfp4"  # what an arithmetic that reads E4M3 is made for; the backend's default may be unreadable to it
        )
    kv_format = _choose("KV", kv_dtype, limits.kv_formats, name)
    index_format = _choose("index key", index_dtype, limits.index_formats, name)
    spec = KVSpec.of(text, kv_format, index_format)
    graph = trace(text, _rounding(session, spec))
    cap = _cap(session, config, manifest, max_context)
    need = sum(session.weight_bytes(op, slots) for op, _, slots in _slots(graph, checkpoint))
    cap, cache = _allocate(session, spec, cap, need, name, exact=max_context is not None)
    handles = {decl.name: session.prepare(op, slots) for op, decl, slots in _slots(graph, checkpoint)}
    engine = Engine(
        session=session,
        who=name,
        graph=graph,
        handles=handles,
        cache=cache,
        page_tokens=spec.page_tokens,
        chunk_tokens=CHUNK_TOKENS,
        prefix_cache=False,
    )
    return Model(
        config=config,
        decision=decision,
        formats={
            "weights": _weight_format(graph, checkpoint),
            "kv": kv_format,
            "index": index_format,
            "compute": dtype,
            "arithmetic": session.numerics.name,
        },
        engine=engine,
        cap=cap,
        tokenizer=tokenizer,
        template=template,
        notes=checkpoint.notes,
    )


F = TypeVar("F", bound=str)


def _choose(what: str, name: str | None, served: tuple[F, ...], who: str) -> F:
    """The format asked for if it is served; without a wish the first, which is the backend's default."""
    if name is None:
        return served[0]
    for known in served:
        if known == name:
            return known
    raise BackendRefused(f"{what} format '{name}' is not served", where=f"backend {who}", expected=" or ".join(served))


def _rounding(session: Session, spec: KVSpec) -> Rounding:
    """What the graph rounds to BF16 before it is quantised; nothing where activations are BF16 already."""
    if str(session.dtypes["model"]) == "torch.bfloat16":
        return NO_ROUNDING
    return Rounding.of(session.numerics, spec.kv_format, spec.index_format)


def _cap(session: Session, config: ModelConfig, manifest: Manifest, max_context: int | None) -> Cap:
    """The context cap before memory is looked at: the least of model, manifest, session and the caller's wish."""
    cap = Cap(config.text.max_position, "this model")
    for served in (manifest.limits.context_tokens, session.limits(config).max_context):
        if served < cap.tokens:
            cap = Cap(served, f"backend {manifest.name}")
    if max_context is None:
        return cap
    if max_context > cap.tokens:
        raise RequestError(
            f"max_context is {max_context:,}", expected=f"at most {cap.tokens:,}, the limit of {cap.who}"
        )
    return Cap(max_context, "max_context")


def _allocate(
    session: Session, spec: KVSpec, cap: Cap, weight_bytes: int, who: str, *, exact: bool
) -> tuple[Cap, KVCache]:
    """The pages for the cap; nothing is allocated that does not fit.

    Args:
        weight_bytes: what the weights are about to allocate.
        exact: the cap was asked for and may not shrink.
    """
    free = session.memory_free()
    if weight_bytes > free:
        raise MemoryBudgetExceeded(
            f"weights need {weight_bytes / 1e9:.2f} GB beside their files",
            where=f"backend {who}",
            expected=f"at most {free / 1e9:.2f} GB, what is free on this device now",
            fix="free memory, or use a machine or a backend that holds them as they are stored",
        )
    layout = session.kv_layout(spec)
    budget = int((free - weight_bytes) * _KV_SHARE)
    affordable = budget // layout.page_bytes
    wanted = -(-cap.tokens // spec.page_tokens)
    if affordable < (wanted if exact else 1):
        raise MemoryBudgetExceeded(
            f"KV pages need {(wanted if exact else 1) * layout.page_bytes / 1e9:.2f} GB",
            where=f"backend {who}",
            expected=f"at most {budget / 1e9:.2f} GB, the budget on this device now",
            fix="lower max_context, or free memory",
        )
    if wanted > affordable:
        cap = Cap(affordable * spec.page_tokens, "the memory budget of this machine")
    pages = min(affordable, max(wanted, -(-_POOL_TOKENS // spec.page_tokens)))
    return cap, layout.allocate(pages)


def _slots(graph: ModelGraph, checkpoint: Checkpoint) -> Iterator[tuple[OpInstance, WeightDecl, dict[str, LazyTensor]]]:
    """Every op with weights, and its tensors."""
    for call in graph.calls:
        decl = call.op.weights
        if decl is not None:
            yield call.op, decl, {slot: checkpoint.tensor(tensor.name) for slot, tensor in decl.slots.items()}


def _weight_format(graph: ModelGraph, checkpoint: Checkpoint) -> str:
    """The storage formats of the text model's weights, most elements first."""
    sizes: dict[str, int] = {}
    for tensor in graph.tensors():
        source = checkpoint.tensor(tensor.name)
        stored = source.format if source.format != "plain" else str(source.dtype).removeprefix("torch.")
        sizes[stored] = sizes.get(stored, 0) + math.prod(tensor.shape)
    return "+".join(sorted(sizes, key=lambda name: -sizes[name]))
