"""The frozen contract: every public name and signature of API 1."""

from __future__ import annotations

import difflib
from pathlib import Path

from packaging.version import Version
from tests.support.api import snapshot

from m31.sdk import API_VERSION

STORED = Path(__file__).with_name("api-1.txt")


def test_public_names_and_signatures_are_those_of_the_snapshot() -> None:
    """A line that only appears is an addition: raise API_VERSION's minor number and store the new text. A line that
    goes or changes can break a backend: raise the major number, keep the old file, and say so in the changelog."""
    stored, now = STORED.read_text(encoding="utf-8"), snapshot()
    changes = list(difflib.unified_diff(stored.splitlines(), now.splitlines(), "stored", "now", n=0))
    assert now == stored, "\n".join(
        [*changes, "to store the text as it is now: python -m tests.support.api > tests/unit/api-1.txt"]
    )


def test_the_version_goes_with_the_file() -> None:
    assert STORED.name == f"api-{Version(API_VERSION).major}.txt"


def test_what_backends_are_written_against_is_listed() -> None:
    text = STORED.read_text(encoding="utf-8")
    for line in (
        "    abstract prepare(self, op: OpInstance, slots: Mapping[str, LazyTensor], shard: Shard) -> WeightHandle",
        "    abstract kernel(self, op: OpInstance, step: StepClass) -> Kernel | Refusal",
        "  KVFormat = Literal['float64', 'float32', 'bfloat16', 'fp8', 'nvfp4']",
        "  class BackendRefused(BackendError)",
        "    layout_id: str",
        "-> logits: R,V accum;",
        "  op qkv_insert(",
        "  def encode_kv(",
        "    arithmetic: ",
    ):
        assert line in text, line
