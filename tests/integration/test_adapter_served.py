"""Adapters as they are served: applied beside the weights, or merged into them, against sums made in numpy."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import adapters, numerics, quantised, tiny

import m31
from m31.checkpoint import Adapter, Checkpoint, convert
from m31.checkpoint.merging import MergedCheckpoint
from m31.cli import demo
from m31.cli.main import main
from m31.engine.api import STEPS
from m31.engine.opening import _check_stored, open_model
from m31.errors import (
    BackendRefused,
    CheckpointError,
    MemoryBudgetExceeded,
    NoKernel,
    NonFiniteWeight,
    RequestError,
    WrongShape,
)
from m31.graph import adapt, trace
from m31_reference.session import ReferenceSession

IDS = [3 + (7 * i) % 61 for i in range(33)]
SCALE = adapters.scale(5.0, 3)
EXACT: dict[str, Any] = {"backend": "reference", "dtype": "float64"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("base") / "c"
    return quantised.write_quantised(folder, quantised.bf16_config(), "m31")


@pytest.fixture(scope="module")
def everywhere(base: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of every place that can have one."""
    made = adapters.pairs(base, adapters.EVERYWHERE)
    return adapters.write(tmp_path_factory.mktemp("adapter") / "tuned", made, list(adapters.EVERYWHERE))


def off(got: torch.Tensor, want: Any) -> float:
    """Largest difference, of the largest logit."""
    want = torch.as_tensor(want, dtype=torch.float64)
    return float((got.double() - want).abs().max() / want.abs().max())


def continued(model: Any, tokens: int) -> list[int]:
    """Greedy tokens after IDS."""
    generation = model.generate(IDS, max_tokens=tokens, temperature=0.0, ignore_eos=True)
    assert sum(len(event.token_ids) for event in generation.events()) == tokens
    return list(generation.token_ids)


@pytest.mark.parametrize("place", [*adapters.PLACES, "everywhere"])
def test_applied_is_the_sum_of_weights(base: Checkpoint, tmp_path: Path, place: str) -> None:
    """The naive model in float64 with W + scale B A for W; the graph, the pass and the kernels are not involved."""
    targets = adapters.PLACES.get(place, adapters.EVERYWHERE)
    made = adapters.pairs(base, targets)
    folder = adapters.write(tmp_path / "a", made, list(targets))
    want = tiny.naive_logits(base.config.text, adapters.added(base, made, SCALE), IDS)
    got = m31.load(base.folder, adapter=folder, **EXACT).logits(IDS)
    plain = m31.load(base.folder, **EXACT).logits(IDS)
    assert off(got, want) < 1e-6  # B times the scale is rounded to float32, logits come out in float32
    assert off(plain, want) > 1e-3


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_backends_serve_it_from_ops_that_they_have(base: Checkpoint, everywhere: Path, backend: str) -> None:
    want = m31.load(base.folder, adapter=everywhere, **EXACT).logits(IDS)
    model = m31.load(base.folder, backend=backend, dtype="float32", adapter=everywhere, kv_dtype="float32")
    assert off(model.logits(IDS), want) < 1e-4
    assert model.formats["adapter"] == "applied"
    assert model.context.adapter == f"applied:{Adapter.open(everywhere, base.config).digest}"  # pages are known by it
    told = " ".join(model.notes)
    assert f"adapter {everywhere}: rank 3 in 40 linear layers, applied" in told
    assert ("leaves these ops to reference" in told and "lora_experts" in told) == (backend == "cpu")


def test_generation_continues_as_the_logits_say(base: Checkpoint, everywhere: Path) -> None:
    """Prefill and decode steps agree with the logits of the whole text."""
    model = m31.load(base.folder, adapter=everywhere, **EXACT)
    ids = continued(model, 6)
    whole = model.logits([*IDS, *ids])
    assert whole[len(IDS) - 1 : -1].argmax(-1).tolist() == ids


def test_the_base_is_not_touched(base: Checkpoint, everywhere: Path) -> None:
    before = {path.name: path.read_bytes() for path in base.folder.iterdir()}
    for mode in ("apply", "merge"):
        m31.load(base.folder, adapter=everywhere, adapter_mode=mode, **EXACT).logits(IDS)
    assert {path.name: path.read_bytes() for path in base.folder.iterdir()} == before


# --- merged ----------------------------------------------------------------------------------------------------------


def nvfp4(w: Any) -> np.ndarray:
    """MODEL.md §3.2: G = 2688 / amax, then per 16; in float32 as the rule says."""
    overall = np.float32(2688) / np.float32(np.abs(w).max())
    g = np.asarray(w, np.float32).reshape(*w.shape[:-1], -1, 16)
    scale = numerics.nearest(np.abs(g).max(-1, keepdims=True) / np.float32(6) * overall, numerics.E4M3)
    codes = numerics.nearest(g * overall / scale.astype(np.float32), numerics.E2M1)
    return (codes * scale).reshape(w.shape) / float(overall)


def rounded(checkpoint: Checkpoint, made: adapters.Pairs) -> dict[str, np.ndarray]:
    """Every adapted weight after rounding W + scale B A to its format, by tests/support/numerics.py."""
    sums = adapters.added(checkpoint, made, SCALE)
    how = {"mxfp8": numerics.mxfp8, "nvfp4": nvfp4, "plain": numerics.bf16}
    return {
        name: how[checkpoint.tensor(name).format](sums[name].float().double().numpy())
        for name in checkpoint.names
        if name.removesuffix(".weight") in made
    }


def test_merged_weights_are_rounded_once_in_their_own_format(base: Checkpoint, everywhere: Path) -> None:
    made = adapters.pairs(base, adapters.EVERYWHERE)
    merged = MergedCheckpoint(base, Adapter.open(everywhere, base.config))
    want = rounded(base, made)
    assert set(merged.tensors) == set(want)
    error = change = kept = 0.0
    sums = adapters.added(base, made, SCALE)
    for name, tensor in merged.tensors.items():
        got = tensor.load().double().numpy()
        np.testing.assert_allclose(got, want[name], rtol=2e-7, atol=0, err_msg=name)
        assert tensor.format == base.tensor(name).format
        assert {role: part.dtype for role, part in tensor.parts().items()} == {
            role: part.load().dtype for role, part in base.tensor(name).parts().items()
        }
        weight = base.tensor(name).load().double().numpy()
        delta = sums[name].numpy() - weight
        error, change = error + float(((got - weight - delta) ** 2).sum()), change + float((delta**2).sum())
        kept += float(((got - weight) * delta).sum())
    loss = merged.loss()
    assert loss.matrices == 40
    assert loss.relative == pytest.approx((error / change) ** 0.5, rel=1e-6)
    assert loss.share == pytest.approx(kept / change, rel=1e-6)
    assert 0.02 < loss.relative < 0.3  # 3 or 1 bits of mantissa under a change as large as the weights
    assert f"errs by {loss.relative:.1%} of that change" in str(loss)


def test_merged_at_load_is_the_converted_checkpoint(base: Checkpoint, everywhere: Path, tmp_path: Path) -> None:
    """Bit for bit; and in BF16, which rounds less, it is closer to what is applied: the rest is rounding."""
    notes: list[str] = []
    options: dict[str, Any] = {"max_shard_bytes": 1 << 30, "input_scales": {}, "adapter": everywhere}
    convert(base.folder, tmp_path / "m31", target="m31", note=notes.append, **options)
    convert(base.folder, tmp_path / "bf16", target="bf16", **options)
    merged = m31.load(base.folder, adapter=everywhere, adapter_mode="merge", **EXACT)
    assert merged.formats["adapter"] == "merged"
    (told,) = [note for note in merged.notes if note.startswith("merged 40 matrices")]
    assert told in notes
    got = merged.logits(IDS)
    assert torch.equal(got, m31.load(tmp_path / "m31", **EXACT).logits(IDS))
    applied = m31.load(base.folder, adapter=everywhere, **EXACT).logits(IDS)
    # The median over tokens: where another block or expert is chosen, logits differ by as much as they like.
    coarse, fine = (
        float((logits - applied).norm(dim=-1).median() / applied.norm(dim=-1).median())
        for logits in (got, m31.load(tmp_path / "bf16", **EXACT).logits(IDS))
    )
    assert 5 * fine < coarse < 0.7
    naive = adapters.added(base, adapters.pairs(base, adapters.EVERYWHERE), SCALE)
    naive |= {
        name: torch.from_numpy(value)
        for name, value in rounded(base, adapters.pairs(base, adapters.EVERYWHERE)).items()
    }
    assert off(got, tiny.naive_logits(base.config.text, naive, IDS)) < 1e-5  # so that rounding explains all of it


def test_untouched_weights_are_copied(base: Checkpoint, tmp_path: Path) -> None:
    """Also where an adapter has only zeros, as before its first step."""
    made = adapters.pairs(base, ["q_proj", "w2"])
    zero = "model.layers.0.self_attn.q_proj"
    made[zero] = (made[zero][0], torch.zeros_like(made[zero][1]))
    folder = adapters.write(tmp_path / "a", made, ["q_proj", "w2"])
    written = convert(
        base.folder, tmp_path / "c", target="m31", max_shard_bytes=1 << 30, input_scales={}, adapter=folder
    )
    changed = {
        name
        for name in base.declared
        if not torch.equal(*(c.stored(name).load().reshape(-1).view(torch.uint8) for c in (base, written)))
    }
    assert {name.rpartition(".weight")[0] for name in changed} == set(made) - {zero}
    assert not any("input_global_scale" in name for name in changed)
    assert MergedCheckpoint(base, Adapter.open(folder, base.config)).loss().matrices == len(made) - 1


def test_a_conversion_of_another_adapter_is_another_job(base: Checkpoint, everywhere: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"target": "m31", "max_shard_bytes": 40_000, "input_scales": {}}

    def stop(step: Any) -> None:
        if step.finished > 150_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(base.folder, tmp_path / "c", adapter=everywhere, progress=stop, **options)
    with pytest.raises(CheckpointError, match="another"):
        convert(base.folder, tmp_path / "c", **options)
    convert(base.folder, tmp_path / "c", adapter=everywhere, **options)
    want = m31.load(base.folder, adapter=everywhere, adapter_mode="merge", **EXACT).logits(IDS)
    assert torch.equal(m31.load(tmp_path / "c", **EXACT).logits(IDS), want)


def test_gate_and_up_under_one_scale(base: Checkpoint, everywhere: Path, tmp_path: Path) -> None:
    """From a BF16 folder: both matrices are merged before the largest weight of the two is looked for."""
    plain = quantised.write_bf16(tmp_path / "bf16", quantised.bf16_config())
    options: dict[str, Any] = {"target": "m31", "max_shard_bytes": 1 << 30, "input_scales": {}}
    written = convert(plain.folder, tmp_path / "c", adapter=everywhere, joint_gate_up=True, **options)
    sums = adapters.added(plain, adapters.pairs(base, adapters.EVERYWHERE), SCALE)
    at = "model.layers.2.block_sparse_moe.experts.1"
    largest = max(float(sums[f"{at}.{matrix}.weight"].abs().max()) for matrix in ("w1", "w3"))
    for matrix in ("w1", "w3"):
        scale = float(written.stored(f"{at}.{matrix}.weight_global_scale").load())
        assert scale == pytest.approx(2688 / largest, rel=1e-6)


# --- what is refused, and what is said -------------------------------------------------------------------------------


def test_requests_that_are_refused(base: Checkpoint, everywhere: Path) -> None:
    for options, message in (
        ({"adapter": 3}, "adapter is 3"),
        ({"adapter": everywhere, "adapter_mode": "add"}, "adapter_mode is 'add'"),
        ({"adapter_mode": "merge"}, "without an adapter"),
    ):
        with pytest.raises(RequestError, match=message):
            m31.load(base.folder, **options, **EXACT)


def test_an_adapter_of_another_model_is_refused(everywhere: Path, tmp_path: Path) -> None:
    other = quantised.write_quantised(tmp_path / "c", {**quantised.bf16_config(), "num_attention_heads": 8}, "m31")
    with pytest.raises(WrongShape, match="q_proj"):
        m31.load(other.folder, adapter=everywhere, **EXACT)


@pytest.mark.parametrize("mode", ["apply", "merge"])
@pytest.mark.parametrize("target", ["q_proj", "lm_head", "w3"])
def test_a_damaged_adapter_is_refused(base: Checkpoint, tmp_path: Path, mode: str, target: str) -> None:
    made = adapters.pairs(base, [target])
    next(iter(made.values()))[1][1, 2] = torch.nan
    folder = adapters.write(tmp_path / "a", made, [target])
    with pytest.raises(NonFiniteWeight):
        m31.load(base.folder, adapter=folder, adapter_mode=mode, **EXACT).logits(IDS)


def test_merged_weights_count_as_memory(base: Checkpoint, everywhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merged = MergedCheckpoint(base, Adapter.open(everywhere, base.config))
    stored = sum(base.tensor(name).nbytes for name in merged.tensors)
    assert merged.nbytes == stored
    monkeypatch.setattr(ReferenceSession, "memory_free", lambda self: stored)
    with pytest.raises(MemoryBudgetExceeded):
        m31.load(base.folder, adapter=everywhere, adapter_mode="merge", **EXACT)


def test_a_draft_head_stays_that_of_the_base(tmp_path: Path) -> None:
    folder = quantised.write_quantised(tmp_path / "c", quantised.bf16_config(), "m31").folder
    quantised.write_draft(folder / "dspark")
    made = adapters.pairs(Checkpoint.open(folder), adapters.EVERYWHERE)
    adapter = adapters.write(tmp_path / "a", made, list(adapters.EVERYWHERE))
    drafting = m31.load(folder, adapter=adapter, draft=3, **EXACT)
    assert any("was made for the model without the adapter" in note for note in drafting.notes)
    alone = m31.load(folder, adapter=adapter, **EXACT)
    assert continued(drafting, 12) == continued(alone, 12)


def test_a_backend_that_lacks_the_op_says_so(base: Checkpoint, everywhere: Path) -> None:
    opened = open_model(
        base.folder,
        backend="cpu",
        device=None,
        dtype=None,
        kv_dtype=None,
        index_dtype=None,
        v_scale_order=None,
        arithmetic=None,
        draft=None,
        adapter=everywhere,
        merge_adapter=False,
        options={},
    )
    opened.serving._may = frozenset(opened.serving._may) - {"lora_experts"}
    with pytest.raises(NoKernel, match="lora_experts"):
        list(opened.compiler.assigned(STEPS))


# --- command line ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A demo checkpoint and an adapter of it."""
    root = tmp_path_factory.mktemp("shown")
    demo.write(root / "demo", seed=0, layers=4)
    made = adapters.pairs(Checkpoint.open(root / "demo"), ["o_proj", "w1"])
    return root / "demo", adapters.write(root / "tuned", made, ["o_proj", "w1"])


@pytest.mark.parametrize("flags", [[], ["--merge-adapter"]])
def test_run_says_what_it_does(shown: tuple[Path, Path], flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, adapter = map(str, shown)
    run = ["run", checkpoint, "hello", "--raw", "--backend", "reference", "--max-tokens", "2", "--adapter", adapter]
    assert main([*run, *flags]) == 0
    told = capsys.readouterr().err
    assert f"adapter {'merged' if flags else 'applied'}" in told
    assert ("encoding them again errs by" in told) == bool(flags)


def test_explain_shows_the_ops_of_an_adapter(shown: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, adapter = map(str, shown)
    assert main(["explain", checkpoint, "--backend", "reference", "--adapter", adapter, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["ops"]
    found = {row["op"]: row["kernel"] for row in rows}
    assert found["lora_experts"] == "m31_reference.lora_experts"
    assert "experts" not in found
    linears = {row["layers"]: row["calls"] for row in rows if row["op"] == "linear" and row["step"] == "decode"}
    assert main(["explain", checkpoint, "--backend", "reference", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)["ops"]
    before = {row["layers"]: row["calls"] for row in plain if row["op"] == "linear" and row["step"] == "decode"}
    assert {layers: calls - before[layers] for layers, calls in linears.items()} == dict.fromkeys(before, 2)


def test_convert_says_what_merging_cost(
    shown: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, adapter = map(str, shown)
    assert main(["convert", checkpoint, str(tmp_path / "c"), "--format", "m31", "--adapter", adapter]) == 0
    told = capsys.readouterr().err
    assert f"merging adapter {adapter}: rank 3" in told
    assert "encoding them again errs by" in told


def test_a_flag_that_would_be_ignored_is_refused(shown: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(shown[0]), "hello", "--merge-adapter"]) == 2
    assert "add --adapter or drop it" in capsys.readouterr().err


def test_a_backend_that_does_not_take_float32_weights_refuses(base: Checkpoint) -> None:
    graph = adapt(trace(base.config.text, stored=lambda name: "bfloat16"), {"lm_head": 2})
    narrow = SimpleNamespace(name="narrow", formats=SimpleNamespace(weights=("bfloat16",)))
    with pytest.raises(BackendRefused, match="stored in float32"):
        _check_stored(graph, narrow)  # type: ignore[arg-type]
