"""Fine-tuning: the loss falls, the base stays, and what was trained is what is served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support import adapters, quantised, synthetic, trained

import m31
from m31.checkpoint import Adapter, Checkpoint, adaptable, encoded, write
from m31.checkpoint.target import target_config
from m31.cli import demo
from m31.cli.main import main
from m31.config import parse
from m31.errors import ConfigError, CorpusError, OpRefused, RequestError, TrainingStateError, UnsupportedFeature
from m31.training import lora, textfile
from m31.training.adapting import AdaptedText, AdapterWeights, FrozenBase, Pair
from m31.training.fakequant import UNQUANTISED
from m31.training.state import LOG
from m31.training.task import Piece
from m31.training.trainer import Report, Trainer

LENGTH = 45
SCHEMES = {  # arithmetic, KV, index, weights of the base
    "default": ("w4a4-megamoe", "nvfp4", "nvfp4", "m31"),
    "e4m3 attention": ("w4a4-q8kv4", "nvfp4", "int8", "m31"),
    "weights only": ("w4a16", "nvfp4", "bfloat16", "m31"),
    "everything in MXFP8": ("w8a8-mxfp8+expert_weights=none", "fp8", "fp8", "m3-mxfp8"),
    "exact": ("exact", "float32", "float32", "bf16"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("base") / "c"
    return quantised.write_quantised(folder, quantised.bf16_config(), "m31")


def mapping(checkpoint: Path, scheme: str = "default", **changes: Any) -> dict[str, Any]:
    """A configuration as TOML decodes it; `changes` update sections."""
    arithmetic, kv, index, _ = SCHEMES[scheme]
    whole = {k: v for k, v in synthetic.mapping().items() if k not in ("model", "quantisation")} | {
        "target": {"checkpoint": str(checkpoint), "arithmetic": arithmetic, "kv": kv, "index": index},
        "lora": {"r": 4, "alpha": 6.0, "rslora": False, "targets": list(adapters.EVERYWHERE)},
        "losses": {"index_weight": 1.0},
    }
    for name, values in changes.items():
        whole[name] = {**whole[name], **values}
    return whole


def trainer(folder: Path, checkpoint: Path, report: Any = None, **changes: Any) -> Trainer:
    return Trainer(lora.parse(mapping(checkpoint, **changes), where="test"), synthetic.counting(), folder, report)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / LOG).read_text().splitlines()]


def repeated(folder: Path) -> list[dict[str, str]]:
    """Everything in the log that must repeat; the speed need not."""
    return [{k: str(v) for k, v in row.items() if k != "tokens_per_second"} for row in rows(folder)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def served(checkpoint: Path, scheme: str, **options: Any) -> Any:
    arithmetic, kv, index, _ = SCHEMES[scheme]
    formats = {"arithmetic": arithmetic, "kv_dtype": kv, "index_dtype": index}
    return m31.load(checkpoint, backend="reference", **formats, **options)


def test_it_learns_and_the_base_stays(base: Checkpoint, tmp_path: Path) -> None:
    """Counting, in 30 steps, under full quantisation; afterwards the served model counts, and without it does not."""
    before = contents(base.folder)
    outcome = trainer(tmp_path / "run", base.folder, budget={"steps": 30}).run()
    assert contents(base.folder) == before
    losses = [row["loss"] for row in rows(tmp_path / "run") if "loss" in row]
    assert losses[0] > 4 > 1 > losses[-1]
    assert outcome.folder == tmp_path / "run" / "adapter"
    adapter = Adapter.open(outcome.folder, base.config)
    assert set(adapter.modules) == set(adaptable(base.config))
    assert json.loads((outcome.folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "c"
    ids, target = synthetic.counting().validation[0]
    found = {}
    for name, options in (
        ("plain", {}),
        ("applied", {"adapter": outcome.folder}),
        ("merged", {"adapter": outcome.folder, "adapter_mode": "merge"}),
    ):
        model = served(base.folder, "default", **options)
        logits = torch.cat([model.logits(row.tolist()) for row in ids])
        found[name] = float(torch.nn.functional.cross_entropy(logits, target.flatten(), ignore_index=-1))
    assert found["applied"] == pytest.approx(outcome.best_loss, rel=1e-4)
    assert found["plain"] > 4 > found["applied"] * 3
    assert found["merged"] < found["plain"] - 0.8 * (found["plain"] - found["applied"])


def random_adapter(checkpoint: Checkpoint, dtype: torch.dtype, targets: Any = adapters.EVERYWHERE) -> AdapterWeights:
    shapes = adaptable(checkpoint.config)
    made = adapters.pairs(checkpoint, targets, rank=4)
    weights = AdapterWeights({m: Pair(4, *shapes[m], 1.5) for m in made}, dtype=dtype)
    weights.load({f"{m}.lora_{part}.weight": t for m, pair in made.items() for part, t in zip("AB", pair, strict=True)})
    weights.refresh()
    return weights


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float64) for name in SCHEMES), ("exact", torch.float32)], ids=str
)
def test_training_computes_what_is_served(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """In float64 no sum depends on its order enough to move a rounding; in float32 one may."""
    checkpoint = quantised.write_quantised(tmp_path / "c", quantised.bf16_config(), SCHEMES[name][3])
    task = lora.Finetuning(lora.parse(mapping(tmp_path / "c", name), where="test"), synthetic.counting(), dtype)
    task.parameters.load(dict(random_adapter(checkpoint, dtype).named()))
    task.parameters.refresh()
    task.export(tmp_path / "a")
    ids = trained.tokens(1, LENGTH)
    got = task.model.logits(task.model(ids).hidden).detach()
    options = {"dtype": str(dtype).removeprefix("torch.")}
    want = served(tmp_path / "c", name, adapter=tmp_path / "a", **options).logits(ids[0].tolist())
    plain = served(tmp_path / "c", name, **options).logits(ids[0].tolist())
    error = float((got - want).abs().max() / want.abs().max())
    assert error <= (1e-6 if dtype is torch.float64 else 1e-5)
    assert float((plain - want).abs().max() / want.abs().max()) > 0.1


def test_some_experts_and_matrices(tmp_path: Path) -> None:
    """Experts without an adapter beside ones with it, and gate without up."""
    quantised.write_quantised(tmp_path / "c", quantised.bf16_config(), "m31")
    for at, targets in enumerate((r".*experts\.[13]\.w2", r".*experts\.0\.w[12]", r".*\.w3")):
        changes = {"lora": {"targets": targets}}
        config = lora.parse(mapping(tmp_path / "c", **changes), where="test")
        task = lora.Finetuning(config, synthetic.counting(), torch.float64)
        task.parameters.initialise(1)
        for name, master in task.parameters.named():
            if ".lora_B." in name:
                master.copy_(torch.randn(master.shape, generator=torch.Generator().manual_seed(at)))
        task.parameters.refresh()
        task.export(tmp_path / str(at))
        ids = trained.tokens(1, LENGTH)
        got = task.model.logits(task.model(ids).hidden).detach()
        want = served(tmp_path / "c", "default", adapter=tmp_path / str(at), dtype="float64").logits(ids[0].tolist())
        assert float((got - want).abs().max() / want.abs().max()) <= 1e-6


def test_gradients_are_those_of_the_sum(tmp_path: Path) -> None:
    """By the chain rule from the gradient of whole weights W + s B A: dB = s dW A^T, dA = s B^T dW."""
    raw, target = trained.tiny("bf16")
    checkpoint = quantised.write_bf16(tmp_path / "c", raw)
    weights = random_adapter(checkpoint, torch.float64)
    adapted = AdaptedText(FrozenBase(checkpoint, dtype=torch.float64), weights, UNQUANTISED)
    whole = trained.model(target)
    sums = adapters.added(checkpoint, adapters.pairs(checkpoint, adapters.EVERYWHERE, rank=4), 1.5)
    with torch.no_grad():
        for name in whole.parameters.units:
            whole.parameters.view(name, whole.parameters.leaves).copy_(sums[name])
    ids, targets = trained.tokens(2, 24), trained.tokens(2, 24, seed=5).flatten()
    grads = []
    for model, leaves in ((adapted, weights.leaves), (whole, whole.parameters.leaves)):
        out = model(ids)
        loss = model.loss(out.hidden, targets) + out.kl
        wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        grads.append(dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True)))
    for module in weights.pairs:
        a, b = (weights.leaves[f"{module}.lora_{part}.weight"].detach() for part in "AB")
        dw = whole.parameters.view(f"{module}.weight", grads[1])
        for got, want in (
            (grads[0][f"{module}.lora_B.weight"], 1.5 * dw @ a.T),
            (grads[0][f"{module}.lora_A.weight"], 1.5 * b.T @ dw),
        ):
            assert float((got - want).abs().max()) <= 1e-6 * float(want.abs().max()), module
            assert bool(want.any()), module


def test_the_base_has_no_gradient(base: Checkpoint) -> None:
    frozen = FrozenBase(base, dtype=torch.float32)
    assert not any(leaf.requires_grad for leaf in frozen.leaves.values())
    assert not frozen.masters
    for name in frozen.units:
        assert torch.equal(frozen.view(name, frozen.leaves), base.tensor(name).load().float()), name


def test_it_begins_with_the_base_and_the_index_branch_learns_from_the_divergence(base: Checkpoint) -> None:
    batch = synthetic.counting().train.batch(0)
    piece = Piece(*batch, batch, 0, 0)
    moved = {}
    for targets in (["index_q_proj", "q_proj"], ["q_proj"]):
        config = lora.parse(mapping(base.folder, lora={"targets": targets}), where="test")
        task = lora.Finetuning(config, synthetic.counting())
        task.parameters.initialise(1)
        task.parameters.refresh()
        found = task.gradient(piece)
        assert found.count == int((batch[1] >= 0).sum())
        moved[len(targets)] = {name for name, grad in found.grads.items() if bool(grad.any())}
        plain = served(base.folder, "default", dtype="float32").logits(batch[0][0].tolist())
        got = task.model.logits(task.model(batch[0][:1]).hidden).detach()
        assert float((got - plain).abs().max()) <= 1e-5 * float(plain.abs().max())
    # B is zero, so that only B has a gradient, everywhere; that of the index branch is the divergence's
    assert moved[2] == {
        f"model.layers.{layer}.self_attn.{name}.lora_B.weight"
        for layer in range(3)
        for name in ("q_proj", "index_q_proj")
    }
    assert moved[1] == {name for name in moved[2] if "index" not in name}


class Stopping:
    """Stops its run after some steps."""

    def __init__(self, after: int) -> None:
        self.after, self.run = after, None

    def __call__(self, report: Report) -> None:
        if report.step == self.after:
            assert self.run is not None
            self.run.stop()


def test_it_continues_exactly_also_from_another_place(base: Checkpoint, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"lora": {"targets": ["q_proj", "w1", "lm_head"]}, "budget": {"steps": 8}}
    assert trainer(tmp_path / "whole", base.folder, **changes).run().finished
    stop = Stopping(3)
    stop.run = trainer(tmp_path / "run", base.folder, stop, **changes)
    assert not stop.run.run().finished
    moved = tmp_path / "c"
    shutil.copytree(base.folder, moved)
    assert trainer(tmp_path / "run", moved, **changes).run().finished
    assert repeated(tmp_path / "run") == repeated(tmp_path / "whole")
    name = "adapter_model.safetensors"
    assert (tmp_path / "run/adapter" / name).read_bytes() == (tmp_path / "whole/adapter" / name).read_bytes()


@pytest.mark.parametrize("change", ["base", "rank", "targets"])
def test_another_run_is_not_continued(base: Checkpoint, tmp_path: Path, change: str) -> None:
    stop = Stopping(1)
    stop.run = trainer(tmp_path / "run", base.folder, stop)
    stop.run.run()
    other: dict[str, Any] = {"rank": {"lora": {"r": 2}}, "targets": {"lora": {"targets": ["w1"]}}}.get(change, {})
    folder = base.folder
    if change == "base":
        folder = quantised.write_quantised(tmp_path / "c", quantised.bf16_config(), "m31", seed=2).folder
    with pytest.raises(TrainingStateError, match="another configuration"):
        trainer(tmp_path / "run", folder, **other).run()


# --- configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": {"targets": ["z_proj"]}}, "names no linear layer"),
        ({"lora": {"targets": "("}}, "no regular expression"),
        ({"lora": {"targets": []}}, "names of modules"),
        ({"lora": {"r": 0}}, "'r'"),
        ({"lora": {"alpha": -1.0}}, "'alpha'"),
        ({"lora": {"dropout": 0.1}}, "unknown key 'dropout'"),
        ({"target": {"arithmetic": "w8a8-mxfp8"}}, "transform"),
        ({"target": {"kv": "float32"}}, None),
        ({"losses": {"index_weight": 0.0}}, "'index_weight'"),
    ],
)
def test_configurations(base: Checkpoint, changes: dict[str, Any], message: str | None) -> None:
    def make() -> lora.Finetuning:
        return lora.Finetuning(lora.parse(mapping(base.folder, **changes), where="test"), synthetic.counting())

    if message is None:
        make()
        return
    with pytest.raises(ConfigError, match=message):
        make()


def test_calibrated_input_scales_are_refused(tmp_path: Path) -> None:
    source = quantised.bf16_config()
    raw, described = target_config(source, parse(source, where="here"), "m31")
    scales = {"model.layers.2.block_sparse_moe.experts.1.w2.weight": 123.0}
    tensors = encoded(described, quantised.bf16_weights(source).items(), input_scales=scales)
    write(tmp_path / "c", raw, tensors, max_shard_bytes=1 << 30, extra_files={})
    with pytest.raises(UnsupportedFeature, match="calibrated input_global_scale 123"):
        lora.Finetuning(lora.parse(mapping(tmp_path / "c"), where="test"), synthetic.counting())
    lora.Finetuning(lora.parse(mapping(tmp_path / "c", "weights only"), where="test"), synthetic.counting())


@pytest.mark.parametrize("stored", ["all", "one"])
def test_projections_that_are_stored_plain_are_refused(tmp_path: Path, stored: str) -> None:
    """Serving leaves their inputs in BF16, and training would quantise them."""
    if stored == "all":
        quantised.write_bf16(tmp_path / "c", quantised.bf16_config())
    else:
        whole = quantised.write_quantised(tmp_path / "whole", quantised.bf16_config(), "m31")
        name = "model.layers.1.self_attn.index_q_proj.weight"
        tensors = {n: whole.stored(n).load() for n in whole.declared if n != f"{name}_scale_inv"}
        tensors[name] = whole.tensor(name).load().bfloat16()
        (tmp_path / "c").mkdir()
        shutil.copy(whole.folder / "config.json", tmp_path / "c")
        save_file(tensors, tmp_path / "c" / "model.safetensors")
    with pytest.raises(OpRefused, match=r"_proj\.weight' is stored plain"):
        lora.Finetuning(lora.parse(mapping(tmp_path / "c"), where="test"), synthetic.counting())
    lora.Finetuning(lora.parse(mapping(tmp_path / "c", "weights only"), where="test"), synthetic.counting())


# --- a text file, from the command line ------------------------------------------------------------------------------

TOML = """
seed = 1
[run]
folder = "run"
threads = 1
save_minutes = 60
validate_every = 6
[data]
provider = "m31.training.textfile:provide"
[data.options]
file = "{folder}/text.txt"
checkpoint = "{folder}/demo"
length = 24
rows = 4
seed = 1
validation = 0.1
[target]
checkpoint = "demo"
arithmetic = "w4a16"
kv = "nvfp4"
index = "bfloat16"
[lora]
r = 8
alpha = 16.0
rslora = false
targets = ["q_proj", "v_proj", "o_proj", "w1", "w2", "w3", "lm_head"]
[losses]
index_weight = 1.0
[optimiser]
learning_rate = 0.02
final_fraction = 0.1
warmup_steps = 2
beta1 = 0.9
beta2 = 0.95
epsilon = 1e-8
weight_decay = 0.0
clip_norm = 1.0
[budget]
steps = 12
[batch]
micro_tokens = 96
"""


def test_a_small_text_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Train, run with what was trained; then the configuration again, which has nothing left to do."""
    demo.write(tmp_path / "demo", seed=0, layers=2)
    (tmp_path / "text.txt").write_text("the galaxy turns and the galaxy shines\n" * 80)
    (tmp_path / "lora.toml").write_text(TOML.format(folder=tmp_path))
    before = contents(tmp_path / "demo")
    assert main(["train", "--lora", str(tmp_path / "lora.toml")]) == 0
    told = capsys.readouterr().err
    assert f"wrote {tmp_path}/run/adapter" in told
    validations = [row["validation"] for row in rows(tmp_path / "run") if "validation" in row]
    assert validations[-1] < 0.6 * validations[0]
    assert contents(tmp_path / "demo") == before
    run = ["run", str(tmp_path / "demo"), "the galaxy", "--raw", "--backend", "reference", "--max-tokens", "2"]
    assert main([*run, "--adapter", str(tmp_path / "run/adapter"), "--temperature", "0"]) == 0
    assert "adapter applied" in capsys.readouterr().err
    assert main(["train", "--lora", str(tmp_path / "lora.toml")]) == 0
    assert main(["train", str(tmp_path / "lora.toml")]) == 1
    assert "[losses]: missing key 'balance_rate'" in capsys.readouterr().err


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("words")
    demo.write(root / "demo", seed=0, layers=1)
    (root / "text.txt").write_text("".join(f"line {i}\n" for i in range(300)))
    return {"file": str(root / "text.txt"), "checkpoint": str(root / "demo")}


def test_windows_cover_the_text_once_per_epoch(words: dict[str, Any]) -> None:
    data = textfile.provide(**words, length=16, rows=3, seed=4, validation=0.2)
    first = data.train.batch(0)
    assert all(torch.equal(a, b) for a, b in zip(first, data.train.batch(0), strict=True))
    assert first[0].shape == first[1].shape == (3, 16)
    assert torch.equal(first[0][:, 1:], first[1][:, :-1])
    windows = data.train.windows  # type: ignore[attr-defined]
    seen = torch.cat([data.train.batch(step)[0] for step in range(len(windows))])  # three epochs
    order = [tuple(row.tolist()) for row in seen]
    epoch = len(windows)
    assert sorted(order[:epoch]) == sorted(order[epoch : 2 * epoch]) == sorted(map(tuple, windows[:, :-1].tolist()))
    assert order[:epoch] != order[epoch : 2 * epoch]
    held = [batch[0][0].tolist() for batch in data.validation]
    assert len(held) == round(0.2 * (len(held) + epoch))
    assert windows[-1, -1] == held[0][0]  # the validation begins where the training text ends
    other = textfile.provide(**words, length=16, rows=3, seed=5, validation=0.2)
    assert other.identity != data.identity


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"length": 0}, RequestError, "length is 0"),
        ({"rows": True}, RequestError, "rows is True"),
        ({"validation": 1.0}, RequestError, "validation is 1.0"),
        ({"length": 5000}, CorpusError, "at least"),
        ({"file": "nowhere.txt"}, CorpusError, "does not exist"),
    ],
)
def test_texts_that_are_refused(
    words: dict[str, Any], options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        textfile.provide(**{**words, "length": 16, "rows": 3, "seed": 4, "validation": 0.2, **options})


def test_a_text_that_is_not_utf8(words: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"ab\xff")
    with pytest.raises(CorpusError, match="byte 3"):
        textfile.provide(**{**words, "file": str(tmp_path / "t.txt")}, length=1, rows=1, seed=0, validation=0.5)
