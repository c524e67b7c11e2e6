"""The levels L0, L2 and L3 on backends that are right: the reference, and the example in numpy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support import numpy_example

from m31.conformance import synthetic
from m31.conformance.bench import Bench
from m31.conformance.item import Evidence, Item, NotRun, Verdict
from m31.conformance.levels import contract, model, real, state
from m31.ops import cases

MODULES = {"L0": contract, "L2": state, "L3": model}
# What takes long or repeats: the whole levels run with `m31 conform`.
SOME = {
    "L0": ("manifest", "open/", "refuses", "limits", "random-m31"),
    "L2": (
        *("pages/", "chunks/300-split-127", "chunks/one-by-one", "resume/at-129/kv-nvfp4", "resume/found-pages"),
        *("batch/3-together", "batch/decode-among-prefill", "repeat", "verify/rewind-of-3", "verify/step-of-1"),
        *("drafts/alternating", "fallback"),
    ),
    "L3": (
        *("layers/random-m31/prefill", "agreement/random-m31/default", "agreement/random-m31/w4a4-q8kv4/"),
        *("agreement/random-m31/int8", "agreement/random-m3-mxfp8"),
    ),
}
NUMPY = {
    "L0": ("manifest", "open/", "refuses", "limits/session", "rule/weights/random-m31", "rule/layout-id"),
    "L2": ("pages/", "fallback/nothing-borrowed/random-m31", "verify", "drafts"),
    "L3": ("layers/random-m31/prefill/layer-1",),
}


def numpy_backend() -> object:
    from m31_numpy import NumpyBackend

    return NumpyBackend(numpy_example.MANIFEST)


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bench]:
    root = tmp_path_factory.mktemp("bench")
    return {
        "reference": Bench("reference", scratch=root),
        "numpy": Bench(numpy_backend(), scratch=root),  # type: ignore[arg-type]
    }


def chosen(bench: Bench, level: str, parts: tuple[str, ...]) -> Iterator[Item]:
    return (item for item in MODULES[level].items(bench.manifest) if any(part in item.id for part in parts))


def stored(evidence: Evidence) -> Evidence:
    """As it comes back from a recorded run: numbers in arrays, JSON in facts."""
    arrays = {}
    for name, array in evidence.arrays.items():
        assert array.dtype.kind in "fi", name
        arrays[name] = np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape).copy()
    return Evidence(arrays, json.loads(json.dumps(evidence.facts)))


@pytest.mark.parametrize("level", MODULES)
@pytest.mark.parametrize("name", ["reference", "numpy"])
def test_a_backend_that_is_right_passes(benches: dict[str, Bench], name: str, level: str) -> None:
    bench = benches[name]
    done = 0
    for item in chosen(bench, level, SOME[level] if name == "reference" else NUMPY[level]):
        verdict = item.judge(stored(item.execute(bench)))
        assert isinstance(verdict, Verdict), item.id
        assert verdict.margin is None or 0 <= verdict.margin <= 1, item.id
        done += 1
    assert done >= 1


@pytest.mark.parametrize("level", MODULES)
def test_items_have_names_of_their_own_and_make_nothing_before_they_run(
    benches: dict[str, Bench], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*_: object) -> None:
        raise AssertionError("a number was drawn, or a checkpoint written, to list the items")

    monkeypatch.setattr(cases, "seed_of", made)
    monkeypatch.setattr(synthetic, "write", made)
    for bench in benches.values():
        found = list(MODULES[level].items(bench.manifest))
        ids = [item.id for item in found]
        assert len(set(ids)) == len(ids)
        assert all(item.level == level and item.id.startswith(f"{level}/") for item in found)
        assert all(character not in name for name in ids for character in " *?\n")


def test_every_claim_of_a_format_or_an_arithmetic_has_an_item(benches: dict[str, Bench]) -> None:
    for bench in benches.values():
        manifest = bench.manifest
        covered = {claim for module in MODULES.values() for item in module.items(manifest) for claim in item.claims}
        formats = manifest.formats
        wanted = {f"kv:{f}" for f in formats.kv} | {f"index:{f}" for f in formats.index}
        wanted |= {f"compute:{f}" for f in formats.compute} | {"limit:context_tokens"}
        wanted |= {f"weights:{f}" for f in formats.weights if f != "float32"}  # no checkpoint is all float32
        wanted |= {"limit:draft_tokens"} if manifest.limits.draft_tokens else set()
        assert wanted <= covered


def test_a_backend_that_does_not_write_pages_is_not_asked_to(tmp_path: Path) -> None:
    bench = Bench("triton", scratch=tmp_path)
    outcomes = set()
    for item in chosen(bench, "L2", ("pages/write-read",)):
        with pytest.raises(NotRun) as refused:
            item.execute(bench)
        outcomes.add(refused.value.outcome)
    assert outcomes == {"fallback"}


def test_a_checkpoint_of_the_user(benches: dict[str, Bench]) -> None:
    bench = benches["reference"]
    assert list(real.items(bench.manifest)) == []
    (item,) = real.items(bench.manifest, bench.checkpoint("random-m31"))
    assert item.judge(item.execute(bench)).margin < 0.5  # type: ignore[operator]
