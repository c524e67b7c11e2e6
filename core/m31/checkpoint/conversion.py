"""`convert`: one checkpoint to another format, tensor by tensor, in constant memory; resumable and atomic.

Quantised weights are decoded exactly and rounded once by the target's rule; a weight that has the target's format
already is copied. bf16 -> m31 -> bf16 therefore gives the values that the m31 folder decodes to, rounded to BF16.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from m31.checkpoint.adapter import Adapter
from m31.checkpoint.draft import FOLDER
from m31.checkpoint.encoding import Piece, Source, Unit, check_input_scales, default_input_scales, encode, units
from m31.checkpoint.folder import INDEX_NAME, is_partial, listed
from m31.checkpoint.inventory import ITEMSIZE, expected, numel
from m31.checkpoint.layout import ShardLayout, plan_shards
from m31.checkpoint.merging import NOTHING, MergeLoss, Summed, changes, merge
from m31.checkpoint.reader import Checkpoint
from m31.checkpoint.target import TargetFormat, target_config
from m31.checkpoint.workfolder import STATE, WorkFolder, copy_file, fingerprint, locked, write_file
from m31.checkpoint.writer import check_destination
from m31.config.jsonfile import read_object
from m31.config.loading import VISION_LANGUAGE
from m31.config.modelopt import MODELOPT_FILE
from m31.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Step:
    """How far a conversion is: bytes `finished` of `total`, of which `reused` come from an earlier run; and at what."""

    finished: int
    reused: int
    total: int
    what: str


Progress = Callable[[Step], None]

_RELEASE_BYTES = 256 * 2**20  # source bytes after which the maps are dropped, so that they do not count as ours
_RESERVE = 64 * 2**20  # bytes left free on the disk
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    target: TargetFormat,
    max_shard_bytes: int,
    input_scales: Mapping[str, float],
    joint_gate_up: bool = False,
    input_scales_from: str = "input_scales",
    adapter: str | Path | None = None,
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
) -> Checkpoint:
    """Convert a checkpoint folder. The destination appears complete or not at all.

    A run that was interrupted in any way continues where it stopped when it is started again with the same arguments
    and unchanged weights; finished shards are verified by size and hash first. Files that go along are copied anew.

    Args:
        source: folder of any format that m31 reads.
        destination: absent, or an empty folder; links are followed.
        target: `m31` (MXFP8 linears, NVFP4 experts), `m3-mxfp8` (MXFP8 throughout) or `bf16`.
        max_shard_bytes: tensor data per shard; one larger weight gets a shard of its own.
        input_scales: calibrated encode scales of expert inputs by logical name, for `m31`. Scales that the source has
            are carried over; otherwise see `m31.checkpoint.encoding.default_input_scale`.
        joint_gate_up: for `m31`: one global scale for gate and up (w1 and w3) of an expert, as some kernels need. By
            default each matrix has its own, which quantises the smaller one finer.
        input_scales_from: where `input_scales` come from, for messages, such as the name of a file.
        adapter: folder of a low-rank adapter to merge: its matrices are W + B A, rounded once by the target's rule.
        progress: called after every piece.
        note: called with each sentence that a person should read: before the work begins oddities of the source
            (`Checkpoint.notes`) and what the destination will lack; after it what merging an adapter cost.

    Returns:
        The destination, opened and thereby validated.

    Raises:
        DestinationBusy: another process writes this destination.
        NonFiniteWeight: a weight is NaN or infinite; named with its index.
        OpRefused: neither is calibration given nor do the activation's limits allow a default.
        CheckpointError, ConfigError: the source or the adapter is not valid, the destination is not empty, lies inside
            the source or has too little space, or an unfinished conversion there is of another job.
    """
    folder, goal = Path(source), _real(Path(destination))
    checkpoint = Checkpoint.open(folder)
    if max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes is {max_shard_bytes}", expected="a positive number of bytes")
    if goal.is_relative_to(folder.resolve()):
        raise CheckpointError("lies inside the source", where=str(goal), fix="choose a destination outside of it")
    mapping, model = target_config(read_object(folder / "config.json"), checkpoint.config, target)
    plan = {unit.name: unit for unit in units(expected(model))}
    calibrated = check_input_scales(plan, input_scales, where=input_scales_from)
    fresh = (unit for unit in plan.values() if checkpoint.tensor(unit.name).format != unit.format)
    defaults = default_input_scales(model.text, fresh, calibrated)
    if joint_gate_up:
        _check_joint(checkpoint, plan)
    merging = None if adapter is None else Adapter.open(adapter, checkpoint.config)
    official = model.architecture == VISION_LANGUAGE
    shards = plan_shards(plan.values(), max_shard_bytes=max_shard_bytes, official=official)
    extras = _extras(checkpoint)
    if note is not None:
        told = () if merging is None else (f"merging adapter {merging}", *merging.notes)
        for text in (*_remarks(checkpoint, extras), *_uncalibrated(plan, defaults), *told):
            note(text)
    job = fingerprint(
        {
            "source": str(folder.resolve()),
            "shards": [[f.path.name, f.size, f.path.stat().st_mtime_ns] for f in checkpoint.files],
            "config": mapping,
            "input_scales": calibrated,
            "max_shard_bytes": max_shard_bytes,
            "joint_gate_up": joint_gate_up,
        }
        | ({} if merging is None else {"adapter": merging.digest})
    )
    try:
        goal.parent.mkdir(parents=True, exist_ok=True)
        with locked(goal):
            check_destination(goal)
            # Only shards are in the fingerprint: whatever goes along unchanged is copied anew, as it is now.
            work = WorkFolder(goal, job, reusable={shard.file for shard in shards})
            try:
                _check_space(work, shards, extras)
                loss = _fill(work, checkpoint, shards, calibrated | defaults, joint_gate_up, merging, progress)
                if note is not None and loss.matrices:
                    note(str(loss))
                _companions(work, extras, shards, mapping)
                # What could not be read back must not be published. Companions may have changed since they were listed.
                _ = Checkpoint.open(work.path).draft
                work.publish(goal)
            finally:
                work.discard_if_empty()
    except OSError as exc:
        raise CheckpointError(f"cannot be written ({exc})", where=str(goal), fix="check space and permissions") from exc
    return Checkpoint.open(goal)


def _real(destination: Path) -> Path:
    """The destination without links, so that lock, working folder and the last rename all happen beside the real one.

    Raises:
        CheckpointError: it goes in circles, or it is a folder that the last rename could not or should not replace.
    """
    try:
        goal, here = destination.resolve(), Path.cwd()
    except (OSError, RuntimeError) as exc:  # RuntimeError: a loop of links, before Python 3.13
        raise CheckpointError(
            f"cannot be resolved ({exc})", where=str(destination), expected="a path whose links end somewhere"
        ) from exc
    what = "the current directory" if goal == here else "a mount point" if os.path.ismount(goal) else None
    if what is not None:
        raise CheckpointError(
            f"is {what}, which a finished conversion cannot replace",
            where=str(goal),
            expected="a folder that is absent, or empty and not in use",
            fix="choose a new folder inside it",
        )
    return goal


def _extras(checkpoint: Checkpoint) -> dict[str, Path]:
    """Files that go along unchanged: everything beside the weights, and a valid draft head."""
    skipped = {"config.json", INDEX_NAME, MODELOPT_FILE, STATE}
    found = {
        path.name: path
        for path in sorted(checkpoint.folder.iterdir())
        if path.is_file()
        and path.name not in skipped
        and not path.name.startswith(".")
        and path.suffix not in _WEIGHTS
        and not path.name.endswith(".index.json")
        and not is_partial(path)
    }
    draft = checkpoint.draft
    if draft is not None:
        names = {"config.json", *(file.path.name for file in draft.files)}
        if (draft.folder / INDEX_NAME).exists():
            names.add(INDEX_NAME)
        found |= {f"{FOLDER}/{name}": draft.folder / name for name in sorted(names)}
    return found


def _remarks(checkpoint: Checkpoint, extras: Mapping[str, Path]) -> Iterator[str]:
    """What the source's headers made somebody notice, and the files that stay behind."""
    yield from checkpoint.notes
    folders = [checkpoint.folder]
    if checkpoint.draft is not None:
        yield from (f"draft head: {text}" for text in checkpoint.draft.notes)
        folders.append(checkpoint.draft.folder)
    known = {*extras.values(), *(file.path for file in checkpoint.files), *folders}
    known |= {checkpoint.folder / name for name in ("config.json", INDEX_NAME)}  # written anew
    behind = [
        path.relative_to(checkpoint.folder).as_posix() + "/" * path.is_dir()
        for folder in folders
        for path in sorted(folder.iterdir())
        if path not in known
    ]
    if behind:
        yield f"not carried over: {listed(behind)}"


def _uncalibrated(plan: Mapping[str, Unit], defaults: Mapping[str, float]) -> Iterator[str]:
    """A sentence about input scales that follow from the activation alone. Those of w1 and w3 are used by nobody."""
    every = [name for name, unit in plan.items() if unit.format == "nvfp4" and name.endswith(".w2.weight")]
    missing = [name for name in every if name in defaults]
    if missing:
        yield (
            f"input_global_scale of the experts' second matrix (w2) is not calibrated for {len(missing):,} of "
            f"{len(every):,}: 2688 / ((limit + |beta|) * limit) = {defaults[missing[0]]:g} is written, under which "
            "nothing saturates; --input-scales FILE takes calibrated ones"
        )


def _check_space(work: WorkFolder, shards: tuple[ShardLayout, ...], extras: Mapping[str, Path]) -> None:
    need = sum(shard.size for shard in shards if shard.file not in work.done)
    need += sum(path.stat().st_size for path in extras.values())
    free = shutil.disk_usage(work.path).free
    if need + _RESERVE > free:
        raise CheckpointError(
            f"needs {need / 1e9:,.2f} GB, and {free / 1e9:,.2f} GB are free",
            where=str(work.path.parent),
            expected="room for the whole conversion",
            fix="free some space, or choose a destination on another disk",
        )


class _Meter:
    """Adds up what is finished, and lets go of the source's maps now and then."""

    def __init__(self, checkpoint: Checkpoint, total: int, progress: Progress | None) -> None:
        self.checkpoint, self.total, self.progress = checkpoint, total, progress
        self.finished = self.reused = self._held = 0

    def reuse(self, count: int, what: str) -> None:
        self.reused += count
        self.add(count, what)

    def add(self, count: int, what: str) -> None:
        self.finished += count
        self._held += count
        if self._held >= _RELEASE_BYTES:
            self.checkpoint.release()
            self._held = 0
        if self.progress is not None:
            self.progress(Step(self.finished, self.reused, self.total, what))


def _fill(
    work: WorkFolder,
    checkpoint: Checkpoint,
    shards: tuple[ShardLayout, ...],
    input_scales: Mapping[str, float],
    joint: bool,
    adapter: Adapter | None,
    progress: Progress | None,
) -> MergeLoss:
    """Write what is missing; what merging cost in the shards that were written now."""
    loss = NOTHING
    meter = _Meter(checkpoint, sum(shard.size for shard in shards), progress)
    for shard in shards:
        if shard.file in work.done:
            meter.reuse(shard.size, shard.file)
            continue
        with work.draft(shard.file).open("wb") as handle:
            loss += _write_shard(handle.fileno(), shard, checkpoint, input_scales, joint, adapter, meter)
            os.fsync(handle.fileno())
        work.finish(shard.file)
    checkpoint.release()
    return loss


def _write_shard(
    handle: int,
    shard: ShardLayout,
    checkpoint: Checkpoint,
    input_scales: Mapping[str, float],
    joint: bool,
    adapter: Adapter | None,
    meter: _Meter,
) -> MergeLoss:
    import torch

    loss = NOTHING
    _pwrite(handle, shard.header, 0)
    meter.add(len(shard.header), shard.file)
    for unit in shard.units:
        rows = {name: numel(decl.shape[1:]) * ITEMSIZE[decl.dtypes[0]] for _, name, decl in unit.parts}
        source, scale = checkpoint.tensor(unit.name), input_scales.get(unit.name)
        other = _gate_up_partner(unit.name) if joint else None
        partner = None if other is None else _source(checkpoint, adapter, other)
        pair = None if adapter is None else adapter.modules.get(unit.name.removesuffix(".weight"))
        if pair is not None and changes(pair):
            merged = merge(unit, source, pair, input_scale=scale, partner=partner)
            loss += merged.loss
            pieces: Iterator[Piece] = (Piece(name, 0, value) for name, value in merged.stored.items())
        else:
            pieces = encode(unit, source, scale, partner=partner)
        for piece in pieces:
            raw = piece.value.contiguous().reshape(-1).view(torch.uint8)
            _pwrite(handle, raw.numpy().data, shard.offsets[piece.name] + piece.row * rows[piece.name])
            meter.add(raw.numel(), unit.name)
    return loss


def _source(checkpoint: Checkpoint, adapter: Adapter | None, name: str) -> Source:
    """A weight as it will be quantised, with its adapter if it has one."""
    pair = None if adapter is None else adapter.modules.get(name.removesuffix(".weight"))
    source = checkpoint.tensor(name)
    return source if pair is None else Summed.of(source, pair)


def _gate_up_partner(name: str) -> str | None:
    """The up matrix of an expert's gate, and the other way round; None for any other weight."""
    stem, dot, matrix = name.removesuffix(".weight").rpartition(".")
    other = {"w1": "w3", "w3": "w1"}.get(matrix)
    return f"{stem}{dot}{other}.weight" if other else None


def _check_joint(checkpoint: Checkpoint, plan: Mapping[str, Unit]) -> None:
    """Refuse a wish for joint scales where experts are not quantised here."""
    experts = [unit for unit in plan.values() if _gate_up_partner(unit.name)]
    if not experts:
        why, fix = "this model has no routed experts", "leave --joint-gate-up out"
    elif experts[0].format != "nvfp4":
        why = f"the target format stores experts as {experts[0].format}"
        fix = "leave --joint-gate-up out, or give --format m31"
    elif checkpoint.tensor(experts[0].name).format == "nvfp4":
        why = "the source's are NVFP4 already and are copied as they are"
        fix = "leave --joint-gate-up out, or convert from the BF16 or MXFP8 folder that the source was made of"
    else:
        return
    raise CheckpointError(
        f"one global scale for gate and up is asked for, and no expert is quantised to NVFP4 here: {why}",
        where=str(checkpoint.folder),
        expected="the target format m31, and a source whose experts are not NVFP4 yet",
        fix=fix,
    )


def _pwrite(handle: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data).cast("B")
    while view:
        count = os.pwrite(handle, view, offset)
        view, offset = view[count:], offset + count


def _companions(
    work: WorkFolder, extras: Mapping[str, Path], shards: tuple[ShardLayout, ...], mapping: Mapping[str, object]
) -> None:
    for name, path in extras.items():
        copy_file(path, work.draft(name))
        work.finish(name)
    weight_map = {name: shard.file for shard in shards for name in shard.stored_names}
    total = sum(shard.size - len(shard.header) for shard in shards)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    for name, value in ((INDEX_NAME, index), ("config.json", mapping)):
        write_file(work.draft(name), (json.dumps(value, indent=2) + "\n").encode())
        work.finish(name)
