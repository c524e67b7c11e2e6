"""A deterministic fuzzer of checkpoint folders: mutated headers, indexes and configs.

Case `n` is the same for everybody. It damages one file of a small folder and opens the folder. What may happen is an
error of m31, or a load that is right; an independent reader (`truth`) says what right is. What may not happen: another
exception, a crash, a hang, or a load that differs from what the files say.

    python -m tests.support.fuzz --first 0 --count 100000     exits with 1 and prints the cases that failed
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tests.support.quantised import (
    bf16_config,
    stored_tensors,
    to_modelopt,
    write_bf16,
    write_draft,
    write_modelopt,
    write_quantised,
)

from m31.checkpoint import Checkpoint
from m31.config import Draft, Model
from m31.errors import M31Error

LIMIT_S = 20  # no case takes more than a fraction of a second
INDEX = "model.safetensors.index.json"

# Keys that m31 checks and otherwise does not need, so that several values mean the same, absence included. What stands
# below them is as inert. Of ModelOpt's section the tensors decide, not the lists (m31.config.modelopt).
INERT = frozenset(
    {
        *("use_qk_norm", "qk_norm_type", "attention_output_gate", "tie_word_embeddings", "model_type", "hidden_act"),
        *("partial_rotary_factor", "rotary_dim", "swiglu_beta", "sparse_disable_index_value"),
        *("kv_cache_quant_algo", "attention_quant_algo", "index_k_quant_type"),
        "ignored_layers",  # a leading `model.` and repetitions mean nothing
        *("producer", "ignore", "kv_cache_scheme", "quantized_layers", "quant_algo", "quant_method"),
        *("dspark_ffn_hidden_size", "dspark_use_dense_ffn", "dspark_hybrid_context_fusion", "moe_layer_freq"),
        *("sparse_attention_config", "target_layer_ids", "dspark_target_layer_ids"),
    }
)


class Hang(Exception):
    """A case took longer than `LIMIT_S`."""


@dataclass(frozen=True)
class Template:
    """A healthy folder, the files of it that are damaged, and what it loads as."""

    name: str
    folder: Path
    targets: tuple[str, ...]
    config: Model | Draft


def templates(root: Path) -> tuple[Template, ...]:
    """BF16 in shards, M3.1-Flash in shards with a draft head, ModelOpt in one file."""
    plain = write_bf16(root / "plain", bf16_config(), shard=150_000)
    flash = write_quantised(root / "flash", bf16_config(), "m31", shard=40_000)
    write_draft(root / "flash" / "dspark")
    draft = flash.draft
    assert draft is not None
    tensors = to_modelopt(stored_tensors(flash))
    write_modelopt(root / "modelopt", bf16_config(), tensors)
    shards = {name: sorted(p.name for p in (root / name).glob("*.safetensors")) for name in ("plain", "flash")}
    return (
        Template("plain", root / "plain", ("config.json", INDEX, *shards["plain"][:2]), plain.config),
        Template("flash", root / "flash", ("config.json", INDEX, *shards["flash"][:2]), flash.config),
        Template("draft", root / "flash", ("dspark/config.json", "dspark/model.safetensors"), draft.config),
        Template(
            "modelopt",
            root / "modelopt",
            ("config.json", "model.safetensors"),
            Checkpoint.open(root / "modelopt").config,
        ),
    )


# --- damage ---------------------------------------------------------------------------------------------------------


def bytes_damage(rng: random.Random, data: bytes) -> bytes:
    """One to three edits of raw bytes."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(6)
        if kind == 0 and out:
            out[at % len(out)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 2:
            del out[at : at + rng.randrange(1, 17)]
        elif kind == 3:
            del out[at:]
        elif kind == 4:
            out[at : at + 1] = rng.choice((b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"-", b"1", b"\0", b"\xff"))
        else:
            size = rng.randrange(1, 33)
            out[at:at] = out[at : at + size]
    return bytes(out)


_VALUES: tuple[Callable[[random.Random], Any], ...] = (
    lambda _: None,
    lambda rng: rng.choice((True, False)),
    lambda rng: rng.choice((0, 1, -1, 2, 7, 16, 32, 64, 4096, 2**31 - 1, 2**31, 2**63, -(2**63), 10**400)),
    lambda rng: rng.choice((0.5, -0.0, 1e308, 1e-320, 1.0000001)),
    lambda rng: rng.choice(
        ("", "x", "BF16", "F32", "F8_E4M3", "U8", "F8_E8M0", "nvfp4", "../x", "\0", "é\u202e", "a" * 5000)
    ),
    lambda rng: rng.choice(([], [0], [-1], [[]], [1] * 2000, {}, {"a": {}})),
    lambda _: _nested(500),
)


def _nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every place in a JSON value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in pairs:
        yield value, key
        yield from _places(below)


def json_damage(rng: random.Random, value: Any) -> Any:
    """One edit of a decoded JSON object, in place where it can be."""
    places = list(_places(value))
    if not places:
        return rng.choice(_VALUES)(rng)
    holder, key = rng.choice(places)
    kind = rng.randrange(6)
    old = holder[key]
    if kind == 0:
        holder[key] = rng.choice(_VALUES)(rng)
    elif kind == 1:
        del holder[key]
    elif kind == 2 and isinstance(holder, dict):
        name = str(key)
        at = rng.randrange(len(name) + 1)
        holder[rng.choice((name[:at] + name[at + 1 :], name[:at] + "x" + name[at:], name.upper(), ""))] = holder.pop(
            key
        )
    elif kind == 3 and isinstance(old, int | float):
        holder[key] = old + rng.choice((-1, 1, 0.5, -2 * old))
    elif kind == 4:
        other, there = rng.choice(places)
        holder[key], other[there] = other[there], holder[key]
    elif isinstance(old, list) and old:
        rng.choice((old.reverse, old.pop, lambda: old.append(old[0])))()
    else:
        holder[key] = rng.choice((old, rng.choice(_VALUES)(rng)))
    return value


def _dumped(rng: random.Random, value: Any) -> bytes:
    text = json.dumps(value)
    if rng.random() < 0.05 and text.startswith('{"'):  # a duplicate key
        text = "{" + text[1 : text.index(":") + 1] + "0," + text[1:]
    return text.encode("utf-8", "surrogatepass")


def damage(rng: random.Random, name: str, data: bytes) -> bytes:
    """A damaged copy of one file."""
    if name.endswith(".json"):
        return bytes_damage(rng, data) if rng.random() < 0.4 else _dumped(rng, json_damage(rng, json.loads(data)))
    (length,) = struct.unpack("<Q", data[:8])
    header, body = data[8 : 8 + length], data[8 + length :]
    kind = rng.random()
    if kind < 0.1:  # the length field
        return struct.pack("<Q", rng.choice((0, 1, length - 1, length + 1, 2**63, rng.getrandbits(64)))) + data[8:]
    if kind < 0.2:  # the end of the file
        return data[: rng.randrange(len(data))] if rng.random() < 0.5 else data + rng.randbytes(rng.randrange(1, 99))
    changed = bytes_damage(rng, header) if kind < 0.55 else _dumped(rng, json_damage(rng, json.loads(header)))
    return struct.pack("<Q", len(changed) if rng.random() < 0.9 else length) + changed + body


# --- judgement ------------------------------------------------------------------------------------------------------


def truth(folder: Path, index_name: str) -> dict[str, tuple[str, list[int], bytes]]:
    """What a folder holds, by a reader that shares nothing with m31's: stored name -> dtype, shape, bytes."""
    index = folder / index_name
    names = json.loads(index.read_bytes())["weight_map"].values() if index.exists() else ["model.safetensors"]
    found: dict[str, tuple[str, list[int], bytes]] = {}
    for file in sorted(set(names)):
        data = (folder / file).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                found[name] = entry["dtype"], entry["shape"], data[8 + length + start : 8 + length + stop]
    return found


def _differing_keys(one: Any, two: Any, key: str) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(two, dict):
        for name in (one.keys() | two.keys()) - INERT:
            yield from _differing_keys(one.get(name), two.get(name), name)
    elif type(one) is not type(two) or one != two:
        yield key


def judge(template: Template, folder: Path, name: str, before: bytes, rng: random.Random) -> str:
    """Open the damaged folder; `refused`, `loaded`, or a description of what is wrong about the load.

    Raises:
        Exception: whatever m31 let escape.
    """
    try:
        checkpoint = Checkpoint.open(folder)
        held: Any = checkpoint.draft if template.name == "draft" else checkpoint
        where = folder / "dspark" if template.name == "draft" else folder
        stored = truth(where, INDEX)
        for canonical in held.declared:
            lazy = held.stored(canonical)
            source = held._placed[canonical].stored.name
            dtype, shape, raw = stored[source]
            loaded = lazy.load()
            data = loaded.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if loaded.numel() else b""
            if (lazy.stored_dtype, list(lazy.shape), data) != (dtype, shape, raw):
                return f"'{canonical}' was loaded differently from what '{source}' holds"
        for logical in rng.sample(held.names, min(3, len(held.names))):
            held.tensor(logical).load()
    except M31Error as error:
        return "refused" if str(error) and error.what else "an error without text"
    if name.endswith("config.json"):
        changed = set(_differing_keys(json.loads(before), json.loads((folder / name).read_bytes()), ""))
        if changed and held.config == template.config:
            return f"a change of {sorted(changed)} had no effect"
    return "loaded"


def run_case(case: int, every: tuple[Template, ...], folder: Path) -> str:
    """Run one case in a scratch folder that mirrors its template; returns `judge`'s word, or the escaped exception."""
    rng = random.Random(case)
    template = rng.choice(every)
    name = rng.choice(template.targets)
    scratch = folder / template.folder.name
    if not scratch.exists():
        shutil.copytree(template.folder, scratch)
    path = scratch / name
    before = (template.folder / name).read_bytes()

    def late(_: int, __: FrameType | None) -> None:
        raise Hang(f"more than {LIMIT_S} s")

    previous = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        path.write_bytes(damage(rng, name, before))
        return judge(template, scratch, name, before, rng)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is the finding
        return f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
        path.write_bytes(before)


def run(first: int, count: int, root: Path, *, report: Callable[[str], None]) -> tuple[Counter[str], list[str]]:
    """Cases `first` to `first + count - 1`: outcomes, and a line for each that failed."""
    every = templates(root / "templates")
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    started = time.monotonic()
    for done, case in enumerate(range(first, first + count), 1):
        outcome = run_case(case, every, root / "scratch")
        outcomes[outcome if outcome in ("refused", "loaded") else "failed"] += 1
        if outcome not in ("refused", "loaded"):
            failures.append(f"case {case}: {outcome}")
            report(failures[-1])
        if done % 5000 == 0:
            report(f"{done:,} cases, {dict(outcomes)}, {time.monotonic() - started:.0f} s")
    return outcomes, failures


def main() -> int:
    """The command line at the top of this file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=2000)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the tensors are tiny
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "templates").mkdir()
        outcomes, failures = run(args.first, args.count, Path(scratch), report=lambda line: print(line, flush=True))
    print(f"{args.count:,} cases from {args.first}: {dict(outcomes)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
