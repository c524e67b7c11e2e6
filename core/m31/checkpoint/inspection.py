"""What `m31 inspect CKPT` shows: the model, its size, its cache cost, and everything suspicious."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from m31.checkpoint.counting import KvBytes, kv_bytes_per_token, summarise
from m31.checkpoint.inventory import GROUPS, text_layer_kinds
from m31.checkpoint.reader import Checkpoint, TensorFolder
from m31.checkpoint.suspicion import suspicions
from m31.config.model import Quantization
from m31.errors import M31Error


@dataclass(frozen=True, kw_only=True)
class GroupSize:
    """One group of tensors: logical weights, bytes and tensors as stored here."""

    logical: int
    bytes: int
    tensors: int


@dataclass(frozen=True, kw_only=True)
class DraftHead:
    """The draft head in `dspark/`, MODEL.md §1.5."""

    layers: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    tensors: int
    stored_bytes: int
    quantization: Mapping[str, Mapping[str, int]]
    modules: Mapping[str, Mapping[str, Mapping[str, int]]]


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Everything that `m31 inspect` prints.

    Attributes:
        config_dialect, name_dialect: spelling of config.json and of the tensor names.
        layers: layer kinds in one line.
        weights: `plain`, or the formats of linears and experts, and whose dialect.
        quantization: group -> format -> number of weights; `plain` stands for BF16 and F32.
        modules: group -> kind of module -> format -> number of weights. A kind is a canonical name in which `*` stands
            for the numbers of layers and experts; of plain weights the format is the stored dtype. Biases aside.
        draft: the draft head, None where there is none or it is unusable (which is then among `suspicious`).
        dtypes: stored dtype -> number of tensors; a slice of a stacked tensor counts as one.
        logical, active, active_with_head: parameters, as `m31.checkpoint.counts` defines them.
        hub_elements: elements as a model hub counts them: packed bytes once, scales not at all.
        stored_bytes: bytes of all tensors of the model in this folder.
        groups: rows in the order of MODEL.md §3.7.
        kv_bytes_per_token: cache cost of one token over all layers.
        files: shard -> bytes.
        deep: whether the weights themselves were scanned.
    """

    path: str
    architecture: str
    config_dialect: str
    name_dialect: str
    layers: str
    weights: str
    quantization: Mapping[str, Mapping[str, int]]
    modules: Mapping[str, Mapping[str, Mapping[str, int]]]
    draft: DraftHead | None
    vision: bool
    context: int
    dtypes: Mapping[str, int]
    logical: int
    active: int
    active_with_head: int
    hub_elements: int
    stored_bytes: int
    tensors: int
    groups: Mapping[str, GroupSize]
    kv_bytes_per_token: tuple[KvBytes, ...]
    files: Mapping[str, int]
    notes: tuple[str, ...]
    suspicious: tuple[str, ...]
    deep: bool

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; the cache rows gain their `total`."""
        out = asdict(self)
        out["kv_bytes_per_token"] = [{**asdict(row), "total": row.total} for row in self.kv_bytes_per_token]
        out["notes"], out["suspicious"] = list(self.notes), list(self.suspicious)
        return out


def inspect(folder: str | Path, *, deep: bool = False) -> Inspection:
    """Open a checkpoint folder and describe it.

    Args:
        folder: the checkpoint.
        deep: also read every weight, to report non-finite, constant and implausible ones.

    Raises:
        CheckpointError, ConfigError: the folder is not a valid checkpoint; see `Checkpoint.open`.
    """
    checkpoint = Checkpoint.open(folder)
    config, text = checkpoint.config, checkpoint.config.text
    count = summarise(config, checkpoint.declared)
    stored: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    for name, decl in checkpoint.declared.items():
        tensor = checkpoint.stored(name)
        stored[decl.group] += tensor.nbytes
        dtypes[tensor.stored_dtype] += 1
    return Inspection(
        path=str(checkpoint.folder),
        architecture=config.architecture,
        config_dialect=config.dialect,
        name_dialect=checkpoint.dialect,
        layers=text_layer_kinds(text),
        weights=_weights(config.quantization),
        quantization=_formats(checkpoint),
        modules=_modules(checkpoint),
        draft=_draft(checkpoint),
        vision=config.vision is not None,
        context=text.max_position,
        dtypes=dict(sorted(dtypes.items())),
        logical=count.logical,
        active=count.active,
        active_with_head=count.active_with_head,
        hub_elements=count.hub_elements,
        stored_bytes=checkpoint.total_bytes,
        tensors=len(checkpoint.declared),
        groups={
            group: GroupSize(logical=row.logical, bytes=stored[group], tensors=row.tensors)
            for group in GROUPS
            if (row := count.groups.get(group)) is not None
        },
        kv_bytes_per_token=kv_bytes_per_token(config),
        files={file.path.name: file.size for file in checkpoint.files},
        notes=checkpoint.notes,
        suspicious=suspicions(checkpoint, deep=deep),
        deep=deep,
    )


def _weights(quantization: Quantization | None) -> str:
    if quantization is None:
        return "plain"
    dialect = " (ModelOpt's names and scales)" if quantization.dialect == "modelopt" else ""
    return f"{quantization.linears} linears, {quantization.experts} experts{dialect}"


_NAMES = {"plain": "plain", "fp8": "mxfp8", "fp4_packed": "nvfp4"}


def _formats(folder: TensorFolder) -> dict[str, dict[str, int]]:
    found: dict[str, Counter[str]] = {}
    for decl in folder.declared.values():
        if decl.storage in _NAMES:
            found.setdefault(decl.group, Counter())[_NAMES[decl.storage]] += 1
    return {group: dict(sorted(found[group].items())) for group in GROUPS if group in found}


_NUMBER = re.compile(r"\.\d+(?=\.)")


def _kind(name: str) -> str:
    """The kind of module to which a stored weight belongs, such as `model.layers.*.self_attn.q_proj`."""
    return _NUMBER.sub(".*", name).removesuffix("_packed").removesuffix(".weight")


def _modules(folder: TensorFolder) -> dict[str, dict[str, dict[str, int]]]:
    found: dict[str, dict[str, Counter[str]]] = {}
    for name, decl in folder.declared.items():
        if decl.storage in _NAMES and not name.endswith(".bias"):
            fmt = folder.stored(name).stored_dtype if decl.storage == "plain" else _NAMES[decl.storage]
            found.setdefault(decl.group, {}).setdefault(_kind(name), Counter())[fmt] += 1
    return {
        group: {kind: dict(sorted(formats.items())) for kind, formats in found[group].items()}
        for group in GROUPS
        if group in found
    }


def _draft(checkpoint: Checkpoint) -> DraftHead | None:
    try:
        draft = checkpoint.draft
    except M31Error:
        return None  # `suspicions` says why
    if draft is None:
        return None
    return DraftHead(
        layers=draft.config.num_layers,
        block_size=draft.config.block_size,
        target_layer_ids=draft.config.target_layer_ids,
        tensors=len(draft.declared),
        stored_bytes=draft.total_bytes,
        quantization=_formats(draft),
        modules=_modules(draft),
    )


def _amount(count: int) -> str:
    """1,234 with a rounded form for large counts."""
    for unit, name in ((10**9, "B"), (10**6, "M")):
        if count >= unit:
            return f"{count:,} ({count / unit:.2f} {name})"
    return f"{count:,}"


def _size(count: int) -> str:
    """Bytes in decimal units, as MODEL.md uses them."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:,.3f} {name}"
    return f"{count} B"


def _draft_lines(draft: DraftHead | None) -> list[str]:
    if draft is None:
        return []
    total: Counter[str] = Counter()
    for formats in draft.quantization.values():
        total.update(formats)
    return [
        f"  draft head    {draft.layers} layers, {draft.block_size} tokens a block, reads the target's layers "
        f"{', '.join(map(str, draft.target_layer_ids))}",
        f"                {_size(draft.stored_bytes)} in {draft.tensors} tensors: {_listed(total)}",
    ]


def _listed(formats: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in formats.items())


def _module_lines(modules: Mapping[str, Mapping[str, Mapping[str, int]]]) -> Iterator[str]:
    """Per group and format the modules that are stored so, by the shortest name that is unique in the group."""
    for group, kinds in modules.items():
        last = Counter(kind.rpartition(".")[2] for kind in kinds)
        shown: dict[str, list[str]] = {}
        for kind, formats in kinds.items():
            outer, _, name = kind.rpartition(".")
            if last[name] > 1:
                name = f"{outer.rpartition('.')[2]}.{name}"
            for fmt, count in formats.items():
                of = f" ({count:,} of {sum(formats.values()):,})" if len(formats) > 1 else ""
                shown.setdefault(fmt, []).append(name + of)
        for number, (fmt, names) in enumerate(sorted(shown.items())):
            yield f"  {'' if number else group:<16}{fmt}: {', '.join(names)}"


def render(inspection: Inspection) -> str:
    """Plain text for a terminal, without a trailing newline."""
    it = inspection
    lines = [
        f"{it.path}",
        f"  architecture  {it.architecture} ({it.config_dialect} config, {it.name_dialect} tensor names)",
        f"  layers        {it.layers}" + ("; vision tower and projector" if it.vision else ""),
        f"  weights       {it.weights}; " + ", ".join(f"{n} x {dtype}" for dtype, n in it.dtypes.items()),
        f"  context       {it.context:,} tokens",
        f"  parameters    {_amount(it.logical)} logical",
        f"                {_amount(it.active)} active per token, {_amount(it.active_with_head)} with the output head",
        f"                {_amount(it.hub_elements)} stored elements without scales",
        f"  stored        {_size(it.stored_bytes)} in {it.tensors:,} tensors, {len(it.files)} file(s)",
        *_draft_lines(it.draft),
        "",
        f"  {'group':<16}{'parameters':>20}{'stored':>16}{'tensors':>10}  formats",
    ]
    lines += [
        f"  {name:<16}{g.logical:>20,}{_size(g.bytes):>16}{g.tensors:>10,}  {_listed(it.quantization[name])}"
        for name, g in it.groups.items()
    ]
    lines += ["", f"  {'group':<16}formats of modules", *_module_lines(it.modules)]
    lines += ["", f"  {'KV bytes per token':<22}{'K and V':>12}{'index':>12}{'total':>12}"]
    lines += [
        f"  {row.main_format + ' + ' + row.index_format + ' index':<22}{row.main:>12,}{row.index:>12,}{row.total:>12,}"
        for row in it.kv_bytes_per_token
    ]
    for title, entries in (("notes", it.notes), ("suspicious", it.suspicious)):
        if entries:
            lines += ["", f"  {title}:", *(f"    - {entry}" for entry in entries)]
    if not it.suspicious:
        scope = "config, headers and weights" if it.deep else "config and headers (--deep also reads the weights)"
        lines += ["", f"  nothing suspicious in {scope}"]
    return "\n".join(lines)
