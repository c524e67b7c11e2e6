"""safetensors headers: one reader, one behaviour (BUG-106), and never beyond the end of a file (BUG-101)."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from checkpoint_helpers import raw_shard, write_shard
from hypothesis import given, settings
from hypothesis import strategies as st

from m31.checkpoint.header import HEADER_LIMIT, encode_header, read_header
from m31.errors import BadHeader, CheckpointError, TruncatedShard


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


GOOD = {
    "__metadata__": {"format": "pt"},
    "a": entry(),
    "b": entry("BF16", (3, 2), (8, 20)),
    "e": entry("U8", (0,), (20, 20)),
}


def test_good_header(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_shard(path, GOOD, bytes(20))
    header = read_header(path)
    base = path.stat().st_size - 20
    assert header.metadata == {"format": "pt"}
    assert list(header.tensors) == ["a", "b", "e"]
    b = header.tensors["b"]
    assert (b.dtype, b.shape, b.start, b.stop, b.path) == ("BF16", (3, 2), base + 8, base + 20, path)


def test_encoded_headers_read_back_aligned(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    entries = {k: v for k, v in GOOD.items() if k != "__metadata__"}
    path.write_bytes(encode_header(entries, {"format": "pt"}) + bytes(20))
    header = read_header(path)
    assert header.tensors["a"].start % 8 == 0
    assert set(header.tensors) == {"a", "b", "e"}


@pytest.mark.parametrize("keep", range(0, 31, 3))
def test_truncation_at_every_kind_of_offset(tmp_path: Path, keep: int) -> None:
    """BUG-101: a short shard is refused before it is mapped, wherever it ends."""
    path = tmp_path / "x.safetensors"
    write_shard(path, GOOD, bytes(20))
    size = path.stat().st_size
    with path.open("r+b") as handle:
        handle.truncate(size * keep // 31)
    with pytest.raises(TruncatedShard, match="fetch the file again") as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_one_missing_byte_and_one_too_many(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_shard(path, GOOD, bytes(19))
    with pytest.raises(TruncatedShard, match=r"its header describes \d+ \(1 tensors reach beyond the end\)"):
        read_header(path)
    write_shard(path, GOOD, bytes(21))
    with pytest.raises(TruncatedShard, match="has 1 bytes after its last tensor"):
        read_header(path)


@pytest.mark.parametrize(
    ("header", "fragment"),
    [
        ({"a": entry("F31")}, "has the dtype 'F31'; expected one of BOOL"),
        ({"a": entry(7)}, "has the dtype 7"),  # type: ignore[arg-type]
        ({"a": entry(shape=(3,))}, "tensor 'a' of F32 [3] needs 12 bytes, but its data_offsets span 8"),
        ({"a": entry(shape=(-2,))}, "has the shape [-2]"),
        ({"a": entry(shape=(2.0,))}, "has the shape [2.0]"),
        ({"a": entry(shape=(True, 2))}, "has the shape [True, 2]"),
        ({"a": entry(shape=(1,) * 9)}, "expected up to 8 non-negative integers"),
        ({"a": entry(shape=(10**30,))}, "but its data_offsets span 8"),
        ({"a": entry(offsets=(8, 0))}, "expected 0 <= begin <= end"),
        ({"a": entry(offsets=(-8, 0))}, "expected 0 <= begin <= end"),
        ({"a": entry(offsets=(0, 2**63))}, "expected 0 <= begin <= end"),
        ({"a": entry(offsets=(0,))}, "expected two integers"),
        ({"a": entry(offsets=(0, 8.0))}, "expected two integers"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "expected dtype, shape and data_offsets"),
        ({"a": entry() | {"x": 1}}, "expected dtype, shape and data_offsets"),
        ({"a": 3}, "has the entry 3"),
        ({"a": entry(), "b": entry()}, "tensors 'a' and 'b' overlap"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, "tensors 'a' and 'b' overlap"),
        ({"a": entry(), "b": entry(offsets=(12, 20))}, "4 bytes before tensor 'b' belong to no tensor"),
        ({"a": entry(offsets=(1, 9))}, "1 bytes before tensor 'a' belong to no tensor"),
        ({"__metadata__": {"n": 1}, "a": entry()}, "__metadata__ is not a map of strings"),
    ],
)
def test_contradictions_have_their_own_messages(tmp_path: Path, header: dict[str, Any], fragment: str) -> None:
    path = tmp_path / "x.safetensors"
    write_shard(path, header, bytes(8))
    with pytest.raises(BadHeader) as caught:
        read_header(path)
    assert fragment in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "error", "fragment"),
    [
        (b"", TruncatedShard, "has 0 bytes, fewer than a header's length field"),
        (b"1234567", TruncatedShard, "has 7 bytes"),
        (struct.pack("<Q", HEADER_LIMIT + 1) + b"{}", BadHeader, "claims a header of 100,000,001 bytes"),
        (struct.pack("<Q", 0), BadHeader, "claims a header of 0 bytes"),
        (struct.pack("<Q", 50) + b"{}", TruncatedShard, "has 10 bytes, but its header alone needs 58"),
        (raw_shard(b"[]", b""), BadHeader, "header is not a JSON object"),
        (raw_shard(b"{]", b""), BadHeader, "is not valid JSON"),
        (raw_shard(b'{"a\xff":1}', b""), BadHeader, "is not UTF-8"),
        (raw_shard(b'{"a":1,"a":2}', b""), BadHeader, "duplicate key 'a'"),
        (raw_shard(b"{" + b'"a":{' * 100_000, b""), BadHeader, "nested too deeply"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", BadHeader, "is a Git LFS pointer"),
    ],
)
def test_files_that_are_no_safetensors(tmp_path: Path, content: bytes, error: type[Exception], fragment: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(error) as caught:
        read_header(path)
    assert fragment in str(caught.value)


def test_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a regular file"):
        read_header(tmp_path)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_damage_is_a_checkpoint_error_or_harmless(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Flip, cut or insert bytes anywhere: a CheckpointError, or a header whose extents still lie inside the file."""
    raw = bytearray(raw_shard(json.dumps(GOOD).encode(), bytes(20)))
    position = data.draw(st.integers(0, len(raw) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "insert"]))
    if kind == "flip":
        raw[position] = data.draw(st.integers(0, 255))
    elif kind == "cut":
        del raw[position : position + data.draw(st.integers(1, 30))]
    else:
        raw[position:position] = data.draw(st.binary(min_size=1, max_size=8))
    path = tmp_path_factory.mktemp("damage") / "x.safetensors"
    path.write_bytes(raw)
    try:
        header = read_header(path)
    except CheckpointError:
        return
    assert all(0 <= t.start <= t.stop <= len(raw) for t in header.tensors.values())
