"""`m31.load`: from a folder to a model that runs."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from m31 import sdk
from m31.checkpoint import Checkpoint
from m31.config import Model as ModelConfig
from m31.engine.compiler import Compiler, whole
from m31.engine.engine import Engine
from m31.engine.model import Cap, Model
from m31.engine.opening import open_serving
from m31.errors import BackendRefused, MemoryBudgetExceeded, RequestError
from m31.formats.layout import ScaleOrder
from m31.graph import NO_ROUNDING, Assigned, ModelGraph, OpInstance, Rounding, StepClass, trace
from m31.sdk.backend import KVCache, KVLayout, KVSpec, LazyTensor, Session
from m31.sdk.manifest import Manifest
from m31.text.template import ChatTemplate
from m31.text.tokenizer import Tokenizer

CHUNK_TOKENS = 2048
STEPS = (  # one of each kind that the engine runs
    StepClass(kind="decode", q_len=1, tokens=1, seqs=1, rows=1, pages=16),
    StepClass(kind="mixed", q_len=0, tokens=CHUNK_TOKENS, seqs=1, rows=1, pages=16),
)
_SHORT = {"bf16": "bfloat16", "fp32": "float32", "f32": "float32", "fp64": "float64", "fp4": "nvfp4", "e4m3": "fp8"}
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
    v_scale_order: str | None = None,
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
        v_scale_order: order of the V scales inside NVFP4 pages, `linear` (None) or `token_quad` (MODEL.md §3.4). Both
            decode to the same values; pages that are exchanged must agree.
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
    checkpoint = Checkpoint.open(path)
    config = checkpoint.config
    text = config.text
    folder = Path(path)
    tokenizer = None
    if (folder / "tokenizer.json").exists():
        tokenizer = Tokenizer.load(folder, vocab_size=text.vocab_size, bos=text.bos_token_id, eos=text.eos_token_ids)
    template = ChatTemplate.find(folder)
    serving = open_serving(
        decision, device=device, dtype=dtype, arithmetic=arithmetic, weight_cache_bytes=weight_cache_bytes
    )
    session = serving.session
    limits = session.limits(config)
    if kv_dtype is None and session.numerics.kv_read != "exact" and "nvfp4" in limits.kv_formats:
        kv_dtype = (
            "nvfp4"  # what an arithmetic that reads E4M3 is made for; the backend's default may be unreadable to it
        )
    kv_format = _choose("KV", kv_dtype, limits.kv_formats, name)
    index_format = _choose("index key", index_dtype, limits.index_formats, name)
    spec = KVSpec.of(text, kv_format, index_format, _order(v_scale_order, kv_format))
    graph = trace(text, _rounding(session, spec), lambda tensor: stored_as(checkpoint.tensor(tensor)))
    compiler = Compiler(serving, graph, whole(serving, checkpoint.tensor))
    assigned = list(compiler.assigned(STEPS))
    layout = serving.kv_layout(spec, assigned)
    cap = _cap(session, config, manifest, max_context)
    cap, cache = _allocate(
        session, spec, layout, cap, compiler.weights.bytes_needed(assigned), name, exact=max_context is not None
    )
    for step in STEPS:  # a fault of the weights shows now, not in the middle of a text
        compiler.bind(step)
    engine = Engine(compiler=compiler, cache=cache, page_tokens=spec.page_tokens, chunk_tokens=CHUNK_TOKENS)
    return Model(
        config=config,
        decision=decision,
        formats={
            "weights": _weight_format(graph),
            "kv": kv_format,
            "index": index_format,
            "compute": dtype,
            "arithmetic": session.numerics.name,
        },
        engine=engine,
        cap=cap,
        tokenizer=tokenizer,
        template=template,
        notes=(
            *checkpoint.notes,
            *_fallback_note(name, assigned),
            *dict.fromkeys(note for s in serving.sessions.values() for note in s.notes),
        ),
    )


F = TypeVar("F", bound=str)


def _fallback_note(name: str, assigned: list[tuple[OpInstance, Assigned]]) -> Iterator[str]:
    """What the backend leaves to another one, if it leaves anything."""
    elsewhere: dict[str, set[str]] = {}
    for op, found in assigned:
        if found.fallback is not None:
            elsewhere.setdefault(found.by, set()).add(op.spec.name)
    for other, ops in elsewhere.items():
        yield f"backend {name} leaves these ops to {other}, as its manifest declares: {', '.join(sorted(ops))}"


def _choose(what: str, name: str | None, served: tuple[F, ...], who: str) -> F:
    """The format asked for if it is served; without a wish the first, which is the backend's default."""
    if name is None:
        return served[0]
    for known in served:
        if known == name:
            return known
    meant = _SHORT.get(name) or next(iter(difflib.get_close_matches(name, served, n=1)), None)
    raise BackendRefused(
        f"{what} format '{name}' is not served",
        where=f"backend {who}",
        expected=" or ".join(served),
        fix=f"did you mean '{meant}'?" if meant in served else None,
    )


def _order(name: str | None, kv_format: str) -> ScaleOrder:
    if name is None or name == "linear":
        return "linear"
    if name != "token_quad":
        raise RequestError(f"v_scale_order is {name!r}", expected="'linear' or 'token_quad'")
    if kv_format != "nvfp4":
        raise RequestError(
            f"v_scale_order is '{name}' with {kv_format} pages", expected="nvfp4 pages: others have no V scales"
        )
    return "token_quad"


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
    session: Session, spec: KVSpec, layout: KVLayout, cap: Cap, weight_bytes: int, who: str, *, exact: bool
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


def stored_as(tensor: LazyTensor) -> str:
    """`TensorDecl.stored` of a checkpoint's tensor."""
    return tensor.format if tensor.format != "plain" else str(tensor.dtype).removeprefix("torch.")


def _weight_format(graph: ModelGraph) -> str:
    """The storage formats of the text model's weights, most elements first."""
    sizes: dict[str, int] = {}
    for tensor in graph.tensors():
        assert tensor.stored is not None
        sizes[tensor.stored] = sizes.get(tensor.stored, 0) + math.prod(tensor.shape)
    return "+".join(sorted(sizes, key=lambda name: -sizes[name]))
