"""`m31.load`: from a folder to a model that runs."""

from __future__ import annotations

import math
from pathlib import Path

from m31.checkpoint import bundled
from m31.engine.compiler import bucket
from m31.engine.drafting import DraftHead
from m31.engine.engine import Engine
from m31.engine.model import Cap, Model
from m31.engine.opening import Opened, OpenedDraft, fallback_note, open_model
from m31.engine.seals import PLAIN
from m31.errors import ContractViolation, MemoryBudgetExceeded, RequestError
from m31.graph import ModelGraph, StepClass
from m31.sdk.backend import Backend, KVCache, KVLayout, KVSpec, Session
from m31.sdk.serving import Serving
from m31.text.template import ChatTemplate
from m31.text.tokenizer import Tokenizer

CHUNK_TOKENS = 2048
STEPS = (  # one of each kind that the engine runs
    StepClass(kind="decode", q_len=1, tokens=1, seqs=1, rows=1, pages=16),
    StepClass(kind="mixed", q_len=0, tokens=CHUNK_TOKENS, seqs=1, rows=1, pages=16),
)
_KV_SHARE = 0.5  # of the memory that is free; the rest is for activations and for mapped weights
_POOL_TOKENS = 65_536  # the default pool, where one sequence at the cap does not need more


def load(
    path: str | Path | None = None,
    *,
    backend: str | Backend | None = None,
    device: str | None = None,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    index_dtype: str | None = None,
    v_scale_order: str | None = None,
    arithmetic: str | None = None,
    max_context: int | None = None,
    weight_cache_bytes: int | None = None,
    draft: int | None = None,
    adapter: str | Path | None = None,
    adapter_mode: str | None = None,
) -> Model:
    """Load a checkpoint folder.

    Args:
        path: the folder; everything in it is validated before anything is computed. None is the bundled nano, a small
            model that continues Python code (`m31.checkpoint.bundled`).
        backend: a backend's name, or a `m31.sdk.Backend` that the caller made; None chooses (see `m31 backends`).
        device: passed to the backend; None is its own choice.
        dtype: compute dtype; None is the first that the backend lists. The reference has `float32` and `float64`.
        kv_dtype: format of K and V in the pages; None is `nvfp4` with an arithmetic that reads keys and values as E4M3,
            `bfloat16` with one that rounds queries to BF16, else the first of the backend's list.
        index_dtype: format of the index keys; likewise.
        v_scale_order: order of the V scales inside NVFP4 pages, `linear` (None) or `token_quad` (MODEL.md §3.4). Both
            decode to the same values; pages that are exchanged must agree.
        arithmetic: what else is quantised, a name of `m31.formats.arithmetic`; None is the backend's own. On the
            reference that is nothing, and other names imitate what a kernel with that arithmetic computes.
        max_context: most tokens of a sequence; None is what model, backend and memory allow.
        weight_cache_bytes: bytes of decoded weights kept in memory, for a backend that decodes quantised weights while
            it runs; None is its own choice.
        draft: tokens that the checkpoint's draft head proposes for each step, from 1 to its block size; what the model
            does not confirm is dropped, so that texts are distributed as without (MODEL.md §5). None is no drafting.

    Raises:
        BackendError: no such backend, or it cannot be used here.
        ConfigError, CheckpointError, TokenizerError, TemplateError: the folder, or the adapter's, is not right.
        MemoryBudgetExceeded: `max_context` does not fit the memory.
    """
    _check_arguments(
        {
            "device": device,
            "dtype": dtype,
            "kv_dtype": kv_dtype,
            "index_dtype": index_dtype,
            "v_scale_order": v_scale_order,
            "arithmetic": arithmetic,
            "adapter_mode": adapter_mode,
        },
        {"max_context": (max_context, 1), "weight_cache_bytes": (weight_cache_bytes, 0), "draft": (draft, 1)},
    )
    merge = _merges(adapter, adapter_mode)
    folder = bundled.folder() if path is None else Path(path)
    opened = open_model(
        folder,
        backend=backend,
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        index_dtype=index_dtype,
        v_scale_order=v_scale_order,
        arithmetic=arithmetic,
        draft=draft,
        adapter=None if adapter is None else Path(adapter),
        merge_adapter=merge,
        options={} if weight_cache_bytes is None else {"weight_cache_bytes": weight_cache_bytes},
    )
    checkpoint, compiler, spec = opened.checkpoint, opened.compiler, opened.spec
    config, session = checkpoint.config, opened.serving.session
    text, name = config.text, opened.manifest.name
    tokenizer = None
    if (folder / "tokenizer.json").exists():
        tokenizer = Tokenizer.load(folder, vocab_size=text.vocab_size, bos=text.bos_token_id, eos=text.eos_token_ids)
    template = ChatTemplate.find(folder)
    steps = STEPS if draft is None else (*STEPS, _verifying(draft))
    assigned = list(compiler.assigned(steps))
    layouts = [opened.serving.kv_layout(spec, assigned)]
    if opened.draft is not None:
        own = opened.draft.compilers.assigned()
        layouts.append(opened.serving.kv_layout(opened.draft.spec, own))
        assigned += own
    cap = _cap(opened, max_context)
    held = compiler.weights.bytes_needed(assigned) + (0 if opened.adapter is None else opened.adapter.nbytes)
    cap, caches = _allocate(session, spec, layouts, cap, held, name, exact=max_context is not None)
    for step in steps:  # a fault of the weights shows now, not in the middle of a text
        compiler.bind(step)
    if opened.draft is not None:
        opened.draft.compilers.bind()
    compiler.weights.seal()
    engine = Engine(
        compiler=compiler,
        cache=caches[0],
        page_tokens=spec.page_tokens,
        chunk_tokens=CHUNK_TOKENS,
        prefix_cache=False,
        drafter=None if opened.draft is None else _head(opened.draft, caches[1]),
    )
    return Model(
        config=config,
        decision=opened.decision,
        formats={
            "weights": _weight_format(compiler.graph),
            "kv": spec.kv_format,
            "index": spec.index_format,
            "compute": str(session.dtypes["model"]).removeprefix("torch."),
            "arithmetic": session.numerics.name,
            **({} if opened.adapter is None else {"adapter": opened.adapter.how}),
        },
        engine=engine,
        cap=cap,
        tokenizer=tokenizer,
        template=template,
        notes=(
            *checkpoint.notes,
            *(() if opened.adapter is None else opened.adapter.notes(drafts=draft is not None)),
            *fallback_note(name, assigned),
            *_session_notes(opened.serving),
        ),
        context=PLAIN if opened.adapter is None else opened.adapter.context,
    )


def _head(opened: OpenedDraft, cache: KVCache) -> DraftHead:
    return DraftHead(opened.compilers, cache, page_tokens=opened.spec.page_tokens, noise=opened.config.noise_token_id)


def _session_notes(serving: Serving) -> list[str]:
    """What the sessions have to say, once each."""
    told: dict[str, None] = {}
    for name, session in serving.sessions.items():
        notes = session.notes
        if isinstance(notes, str) or not all(isinstance(note, str) for note in notes):
            raise ContractViolation(
                "opened", f"has notes {notes!r}", where=f"backend {name}", expected="a sequence of sentences"
            )
        told.update(dict.fromkeys(notes))
    return list(told)


def _check_arguments(names: dict[str, object], numbers: dict[str, tuple[object, int]]) -> None:
    """Refuse what is of another type, before anything is opened."""
    for argument, value in names.items():
        if value is not None and not isinstance(value, str):
            raise RequestError(f"{argument} is {value!r}", expected="a name, or None")
    for argument, (number, least) in numbers.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < least):
            raise RequestError(f"{argument} is {number!r}", expected=f"a whole number from {least} on, or None")


def _merges(adapter: object, mode: str | None) -> bool:
    """Whether the adapter is merged."""
    if adapter is not None and not isinstance(adapter, str | Path):
        raise RequestError(f"adapter is {adapter!r}", expected="a folder, or None")
    if mode not in (None, "apply", "merge"):
        raise RequestError(f"adapter_mode is '{mode}'", expected="'apply' or 'merge'")
    if mode is not None and adapter is None:
        raise RequestError(f"adapter_mode is '{mode}' without an adapter", fix="give adapter, or leave it out")
    return mode == "merge"


def _verifying(draft: int) -> StepClass:
    tokens = bucket(draft + 1)
    return StepClass(kind="verify", q_len=draft + 1, tokens=tokens, seqs=1, rows=tokens, pages=16)


def _cap(opened: Opened, max_context: int | None) -> Cap:
    """The context cap before memory is looked at: the least of model, manifest, session and the caller's wish."""
    cap = Cap(opened.checkpoint.config.text.max_position, "this model")
    if opened.limits.max_context < cap.tokens:
        cap = Cap(opened.limits.max_context, f"backend {opened.manifest.name}")
    if max_context is None:
        return cap
    if max_context > cap.tokens:
        raise RequestError(
            f"max_context is {max_context:,}", expected=f"at most {cap.tokens:,}, the limit of {cap.who}"
        )
    return Cap(max_context, "max_context")


def _allocate(
    session: Session, spec: KVSpec, layouts: list[KVLayout], cap: Cap, weight_bytes: int, who: str, *, exact: bool
) -> tuple[Cap, list[KVCache]]:
    """The pages for the cap; nothing is allocated that does not fit.

    Args:
        layouts: of the caches that share page ids: the model's, and its draft head's if there is one.
        weight_bytes: what the weights are about to allocate.
        exact: the cap was asked for and may not shrink.
    """
    free = session.memory_free()
    page_bytes = sum(layout.page_bytes for layout in layouts)
    if min(layout.page_bytes for layout in layouts) < 1 or weight_bytes < 0:
        raise ContractViolation(
            "opened",
            f"says {page_bytes} bytes a page and {weight_bytes} bytes of weights",
            where=f"backend {who}",
            expected="a positive number of bytes a page, and none or more for weights",
        )
    if weight_bytes > free:
        raise MemoryBudgetExceeded(
            f"weights need {weight_bytes / 1e9:.2f} GB beside their files",
            where=f"backend {who}",
            expected=f"at most {free / 1e9:.2f} GB, what is free on this device now",
            fix="free memory, or use a machine or a backend that holds them as they are stored",
        )
    budget = int((free - weight_bytes) * _KV_SHARE)
    affordable = budget // page_bytes
    wanted = -(-cap.tokens // spec.page_tokens)
    if affordable < (wanted if exact else 1):
        raise MemoryBudgetExceeded(
            f"KV pages need {(wanted if exact else 1) * page_bytes / 1e9:.2f} GB",
            where=f"backend {who}",
            expected=f"at most {budget / 1e9:.2f} GB, the budget on this device now",
            fix="lower max_context, or free memory",
        )
    if wanted > affordable:
        cap = Cap(affordable * spec.page_tokens, "the memory budget of this machine")
    pages = min(affordable, max(wanted, -(-_POOL_TOKENS // spec.page_tokens)))
    return cap, [layout.allocate(pages) for layout in layouts]


def _weight_format(graph: ModelGraph) -> str:
    """The storage formats of the text model's weights, most elements first."""
    sizes: dict[str, int] = {}
    for tensor in graph.tensors():
        assert tensor.stored is not None
        sizes[tensor.stored] = sizes.get(tensor.stored, 0) + math.prod(tensor.shape)
    return "+".join(sorted(sizes, key=lambda name: -sizes[name]))
