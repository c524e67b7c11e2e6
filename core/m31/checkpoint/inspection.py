"""What `m31 inspect CKPT` shows: the model, its size, its cache cost, and everything suspicious."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from m31.checkpoint.counting import KvBytes, kv_bytes_per_token, summarise
from m31.checkpoint.inventory import GROUPS, text_layer_kinds
from m31.checkpoint.reader import Checkpoint
from m31.checkpoint.suspicion import suspicions


@dataclass(frozen=True, kw_only=True)
class GroupSize:
    """One group of tensors: logical weights, bytes and tensors as stored here."""

    logical: int
    bytes: int
    tensors: int


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Everything that `m31 inspect` prints.

    Attributes:
        config_dialect, name_dialect: spelling of config.json and of the tensor names.
        layers: layer kinds in one line.
        weights: `plain`, or the formats of linears and experts.
        dtypes: stored dtype -> number of tensors; a slice of a stacked tensor counts as one.
        logical, active, active_with_head: parameters, as `m31.checkpoint.counts` defines them.
        hub_elements: elements as a model hub counts them.
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
    quantization = config.quantization
    return Inspection(
        path=str(checkpoint.folder),
        architecture=config.architecture,
        config_dialect=config.dialect,
        name_dialect=checkpoint.dialect,
        layers=text_layer_kinds(text),
        weights=f"{quantization.linears} linears, {quantization.experts} experts" if quantization else "plain",
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
        "",
        f"  {'group':<16}{'parameters':>20}{'stored':>16}{'tensors':>10}",
    ]
    lines += [f"  {name:<16}{g.logical:>20,}{_size(g.bytes):>16}{g.tensors:>10,}" for name, g in it.groups.items()]
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
