"""Golden values: what they hold is right, they survive their file, and other computations are found with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import corpora, trained

from m31.checkpoint import Checkpoint
from m31.conformance import golden
from m31.conformance.golden import Agreement, Golden, Recipe, Sets, Tolerance, __main__, observe, prompts
from m31.engine.compiler import Compiler
from m31.errors import BackendRefused, CheckpointError
from m31.training import bpe
from m31.training.cache import open_cache
from m31.training.export import export
from m31_reference.attention import ATTENTION
from m31_reference.kernels import KERNELS

RECIPE = Recipe("w4a4-megamoe", "nvfp4", "nvfp4")
LENGTHS = (1, 2, 13, 45)  # blocks of 4 under top-3: selection begins at position 12
PROMPTS = [(f"random {n}", trained.tokens(1, n, seed=n)[0].tolist()) for n in LENGTHS]
STRICT = Tolerance(
    kl=1e-9, kl_worst=1e-8, top1=1.0, top1_widest=0.0, expert_share=0.0, expert_gap=0.0, block_share=0.0, block_gap=0.0
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, trained.TrainedText]:
    """A checkpoint, and the model in training that it was saved from."""
    folder = tmp_path_factory.mktemp("golden") / "c"
    raw, target = trained.tiny("m31")
    model = trained.model(target, trained.scheme("w4a4-megamoe", kv="nvfp4", index="nvfp4"), dtype=torch.float64)
    export(folder, raw, model.parameters, extra_files={"a.txt": b"a"})
    return folder, model


@pytest.fixture(scope="module")
def folder(made: tuple[Path, trained.TrainedText]) -> Path:
    return made[0]


@pytest.fixture(scope="module")
def values(folder: Path) -> Golden:
    return golden.compute(folder, RECIPE, PROMPTS)


def check(values: Golden, folder: Path, **options: Any) -> list[Agreement]:
    return list(golden.compare(values, golden.open_for(values, folder, backend="reference", **options)))


# --- what they hold --------------------------------------------------------------------------------------------------


def test_they_are_those_of_the_model_in_training(made: tuple[Path, trained.TrainedText], values: Golden) -> None:
    """An implementation of its own: dense in the blocks, differentiable, without pages."""
    model = made[1]
    kinds = [layer for layer, kind in enumerate(model.text.mlp) if kind == "moe"]
    for (name, ids), prompt in zip(PROMPTS, values.prompts, strict=True):
        assert (prompt.name, prompt.ids.tolist()) == (name, ids)
        record: dict[str, Any] = {}
        logits = model.logits(model(torch.tensor([ids]), record).hidden).detach().double()
        want = torch.log_softmax(logits, -1).numpy()
        assert prompt.logprob == pytest.approx(want[np.arange(len(ids) - 1), ids[1:]], abs=1e-5)
        assert np.array_equal(prompt.top[:, 0], want.argmax(-1))
        assert prompt.top_logprob == pytest.approx(-np.sort(-want, -1)[:, :4], abs=1e-5)
        for row, layer in enumerate(kinds):
            chosen = [set(row) for row in record[f"{layer}.experts"].tolist()]
            assert [set(np.flatnonzero(bits)) for bits in prompt.experts[row]] == chosen
        assert (prompt.first, prompt.blocks.shape[1]) == (12, max(0, len(ids) - 12))
        for layer in range(model.text.num_layers):
            if len(ids) > 12:
                assert np.array_equal(prompt.blocks[layer], record[f"{layer}.keep"][0].numpy()[12:])
    assert values.prompts[-1].blocks.sum(-1).tolist() == np.full((3, 33, 2), 3).tolist()


def test_gaps_are_those_of_the_scores(folder: Path, values: Golden) -> None:
    """By sorting, one position at a time."""
    model = golden.open_for(values, folder, backend="reference", dtype="float64")
    stored = Checkpoint.open(folder)
    bias, weight = (
        stored.tensor(f"model.layers.2.block_sparse_moe.{name}").load().double().numpy()
        for name in ("e_score_correction_bias", "gate.weight")
    )
    inputs: list[np.ndarray[Any, Any]] = []
    scores: list[np.ndarray[Any, Any]] = []

    def look(op: Any, outs: Any, ins: Any, weights: Any) -> None:
        if op.spec.name == "router":
            inputs.append(ins[0].numpy().copy())
        elif op.spec.name == "block_select":
            scores.append(ins[0].numpy().copy())

    model.engine.compiler.watch(look)
    model.logits(PROMPTS[-1][1])
    prompt = values.prompts[-1]
    for t, h in enumerate(inputs[0]):
        choice = sorted(1 / (1 + np.exp(-(weight @ h))) + bias, reverse=True)
        assert prompt.expert_gaps[0, t] == pytest.approx(choice[1] - choice[2], rel=1e-3)
    for layer, rows in enumerate(scores):
        for t in range(12, len(rows)):
            for head in range(2):
                rest = sorted(rows[t, head, : t // 4], reverse=True)  # without the query's own block, which is forced
                assert prompt.block_gaps[layer, t - 12, head] == pytest.approx(rest[1] - rest[2], rel=1e-3)


def test_where_everything_is_kept_nothing_is_close() -> None:
    scores, inf = torch.tensor([[3.0, 1.0, 2.0, -torch.inf]]), float("inf")
    for kept, gap in ((0, inf), (1, 1.0), (2, 1.0), (3, inf), (4, inf), (9, inf)):
        assert observe._gap(scores, torch.tensor([kept])).tolist() == [gap]


# --- the file --------------------------------------------------------------------------------------------------------


def test_the_file_gives_them_back(values: Golden, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(golden.dump(values))
    found = golden.read(tmp_path / "f")
    assert golden.dump(found) == golden.dump(values)
    assert (found.checkpoint, found.recipe) == (values.checkpoint, values.recipe)
    for a, b in zip(found.prompts, values.prompts, strict=True):
        for field in dataclasses.fields(a):
            assert np.array_equal(getattr(a, field.name), getattr(b, field.name)), field.name


@pytest.mark.parametrize("damage", ["cut", "empty", "header", "version", "part"])
def test_a_damaged_file_is_refused(damage: str, values: Golden, tmp_path: Path) -> None:
    content = golden.dump(values)
    changed = {
        "cut": content[:-10],
        "empty": b"",
        "header": content.replace(b"recipe", b"recipo"),
        "version": content.replace(b'\\"version\\": 1', b'\\"version\\": 9'),
        "part": content.replace(b"0/top_logprob", b"0/top_logprop"),
    }[damage]
    assert changed != content
    (tmp_path / "f").write_bytes(changed)
    with pytest.raises(CheckpointError, match="has version 9" if damage == "version" else "cannot be read") as caught:
        golden.read(tmp_path / "f")
    assert "python -m m31.conformance.golden write" in str(caught.value)


def test_values_belong_to_one_checkpoint(values: Golden, folder: Path, tmp_path: Path) -> None:
    raw, target = trained.tiny("m31")
    other = trained.model(target, trained.scheme(), dtype=torch.float32, seed=4)
    export(tmp_path / "c", raw, other.parameters, extra_files={})
    assert golden.digest(folder) == values.checkpoint != golden.digest(tmp_path / "c")
    with pytest.raises(CheckpointError, match="the golden values belong to the checkpoint"):
        golden.open_for(values, tmp_path / "c", backend="reference")


# --- what is found with them -----------------------------------------------------------------------------------------


def test_the_reference_agrees_with_itself(values: Golden, folder: Path) -> None:
    found = check(values, folder, dtype="float64")
    assert golden.faults(found, STRICT) == []
    assert [a.tokens for a in found] == list(LENGTHS)
    assert max(a.next_error for a in found) < 1e-5
    assert (found[-1].experts, found[-1].blocks) == (
        Sets(45, 0, 0.0, found[-1].experts.differ),  # type: ignore[union-attr]
        Sets(3 * 33 * 2, 0, 0.0, found[-1].blocks.differ),  # type: ignore[union-attr]
    )
    kept = golden.compare(values, golden.open_for(values, folder, backend="reference"), longest=13)
    assert [a.tokens for a in kept] == [1, 2, 13]


Maker = Callable[..., Any]


def broken(maker: Maker, change: Callable[[Any, Any], None]) -> Maker:
    """A kernel that runs, and then changes its outputs, given its inputs."""

    def make(*args: Any) -> Any:
        run = maker(*args)

        def wrong(outs: Any, ins: Any, w: Any, workspace: Any) -> None:
            run(outs, ins, w, workspace)
            change(outs, ins)

        return wrong

    return make


def other_expert(outs: Any, ins: Any) -> None:
    outs[0][7:, 1] = (outs[0][7:, 0] + 1) % 4  # perhaps the right one, here and there


def first_blocks(outs: Any, ins: Any) -> None:
    full = outs[0][..., -1] >= 0
    outs[0][full] = torch.stack(
        [torch.zeros_like(outs[0][..., 0]), torch.ones_like(outs[0][..., 0]), outs[0][..., 2]], -1
    )[full]


FAULTS: dict[str, tuple[dict[str, Any], str, Any, str]] = {
    "experts": (KERNELS, "router", other_expert, "share of other expert sets"),
    "blocks": (ATTENTION, "block_select", first_blocks, "score gap of another block set"),
    "not a number": (KERNELS, "router", lambda outs, ins: outs[1].fill_(torch.nan), "mean KL divergence is nan"),
    "one weight": (KERNELS, "router", lambda outs, ins: outs[1][-1:].mul_(1.1), "largest KL divergence"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_kernel_is_found(name: str, values: Golden, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, op, change, sentence = FAULTS[name]
    monkeypatch.setitem(table, op, broken(table[op], change))
    said = golden.faults(check(values, folder, dtype="float64"), STRICT)
    assert any(sentence in fault for fault in said), said


def test_another_arithmetic_is_found(values: Golden, folder: Path) -> None:
    for change in ({"arithmetic": "w4a16"}, {"kv": "bfloat16"}, {"index": "bfloat16"}):
        other = dataclasses.replace(values, recipe=dataclasses.replace(RECIPE, **change))
        said = golden.faults(check(other, folder, dtype="float64"), STRICT)
        assert any("KL divergence" in fault for fault in said), change


def test_a_backend_of_another_arithmetic_is_refused(values: Golden, folder: Path) -> None:
    with pytest.raises(BackendRefused, match="arithmetic 'w4a4-megamoe' is not served"):
        golden.open_for(values, folder, backend="cpu")


def test_what_was_not_seen_is_no_agreement(values: Golden, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a plan that is captured whole."""
    monkeypatch.setattr(Compiler, "watch", lambda self, look: None)
    found = check(values, folder, dtype="float64")
    assert golden.faults(found, STRICT) == [
        "expert ids were not observed in 4 of 4 prompts",
        "block ids were not observed in 4 of 4 prompts",
    ]
    assert golden.faults([], STRICT) == ["no prompt was compared"]


def test_watching_ends(values: Golden, folder: Path) -> None:
    model = golden.open_for(values, folder, backend="reference")
    calls: list[str] = []
    model.engine.compiler.watch(lambda op, outs, ins, weights: calls.append(op.spec.name))
    before = model.logits([5, 6, 7])
    assert calls.count("block_select") == 3
    assert {"embedding", "router", "experts", "linear"} <= set(calls)
    model.engine.compiler.watch(None)
    calls.clear()
    assert torch.equal(model.logits([5, 6, 7]), before)
    assert calls == []


# --- the command, and the nano's prompts -----------------------------------------------------------------------------


def test_write_and_check(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(__main__, "nano_prompts", lambda cache: PROMPTS)
    where = ["--checkpoint", str(folder), "--file", str(tmp_path / "data" / "f")]
    assert __main__.main(["write", *where]) == 0
    assert "wrote " in capsys.readouterr().out
    assert __main__.main(["check", *where, "--backend", "reference", "--longest", "13"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split("  ")[-1] for row in rows] == ["prompt", "random 1", "random 2", "random 13"]
    assert __main__.main(["check", *where, "--backend", "cpu"]) == BackendRefused.exit_code
    assert "golden: backend cpu: arithmetic" in capsys.readouterr().err
    assert __main__.stored(__main__.NANO).name == "nano-w4a4-megamoe-kv-nvfp4-index-nvfp4.safetensors"


def test_the_prompts_are_ten_that_nobody_trained_on(tmp_path: Path) -> None:
    text = corpora.invented({"train": [2000], "validation": [], "test": [5000] * 8})
    cache = open_cache(tmp_path, text, bpe.tokenizer_files([]))
    found = prompts.of_corpus(text, cache)
    assert len(found) == 10
    assert sorted(len(ids) for _, ids in found) == sorted((*prompts.TEXT_LENGTHS, *prompts.RECALL_LENGTHS))
    assert (len(found[0][1]), len(found[-1][1])) == (1, 4000)
    assert all(ids[0] == cache.bos for _, ids in found)
    assert all(name.split()[-1] in {d.path for d in text.split("test")} for name, _ in found if "recall" not in name)
    assert found == prompts.of_corpus(text, cache)
