"""The trainer's gradients: against finite differences, against transformers, and where they must not go."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support import trained

from m31.training import attention
from m31.training.fakequant import straight_through
from m31.training.layers import swiglu
from m31.training.model import TrainedText, divergence


def loss_of(model: TrainedText, tokens: torch.Tensor, targets: torch.Tensor, *, kl: float = 0.0) -> torch.Tensor:
    out = model(tokens)
    return model.loss(out.hidden, targets.flatten()) + kl * out.kl


def backward(model: TrainedText, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradient by canonical name."""
    for leaf in model.parameters.leaves.values():
        leaf.grad = None
    loss.backward()
    held = {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in model.parameters.leaves.items()}
    return {name: model.parameters.view(name, held) for name in model.parameters.units}


def heads(*shape: int, seed: int) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.requires_grad_()


@pytest.mark.parametrize("tile", [4, 6, 128])
@pytest.mark.parametrize("sparse", [False, True])
def test_attention_by_finite_differences(monkeypatch: pytest.MonkeyPatch, tile: int, sparse: bool) -> None:
    monkeypatch.setattr(attention, "TILE", tile)
    q, k, v = heads(11, 2, 2, 3, seed=1), heads(11, 2, 3, seed=2), heads(11, 2, 3, seed=3)
    scores = heads(11, 2, 3, seed=4).detach().masked_fill(~attention.visible(11, 4)[:, None], -torch.inf)
    keep = attention.select(scores, topk=2, block=4, local_blocks=1, init_blocks=0) if sparse else None

    def run(*args: torch.Tensor) -> torch.Tensor:
        return attention.attend(*args, keep, block=4, scale=0.4, rounded_probability=False)[0]

    assert torch.autograd.gradcheck(run, (q, k, v))


@pytest.mark.parametrize("tile", [4, 6, 128])
@pytest.mark.parametrize("sparse", [False, True])
def test_attention_is_the_formula(monkeypatch: pytest.MonkeyPatch, tile: int, sparse: bool) -> None:
    """Written out with a whole mask, which a short sequence can afford."""
    monkeypatch.setattr(attention, "TILE", tile)
    tokens, block = 27, 4
    q, k, v = (heads(tokens, 2, *rest, 3, seed=s) for s, rest in enumerate([(2,), (), ()]))
    seen = attention.visible(tokens, block)[:, None].expand(-1, 2, -1)
    scores = heads(tokens, 2, 7, seed=9).detach().masked_fill(~seen, -torch.inf)
    keep = attention.select(scores, topk=3, block=block, local_blocks=1, init_blocks=1) if sparse else None
    got, mass = attention.attend(q, k, v, keep, block=block, scale=0.4, rounded_probability=False)

    among = (seen if keep is None else keep).repeat_interleave(block, -1)[..., :tokens]
    allowed = among & (torch.arange(tokens) <= torch.arange(tokens)[:, None])[:, None]
    s = torch.einsum("tkgd,skd->tkgs", q, k) * 0.4
    p = s.masked_fill(~allowed[:, :, None], -torch.inf).softmax(-1)
    torch.testing.assert_close(got, torch.einsum("tkgs,skd->tkgd", p, v).flatten(1))
    padded = torch.nn.functional.pad(p, (0, -tokens % block)).unflatten(-1, (-1, block))
    torch.testing.assert_close(mass, padded.sum(-1).mean(2))
    assert keep is None or not bool(keep.logical_not().logical_and(seen).logical_not().all())  # some block was dropped


def test_block_scores_by_finite_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "TILE", 4)
    iq, ik = heads(10, 2, 3, seed=1), heads(10, 3, seed=2)
    seen = attention.visible(10, 4)[:, None]

    def run(iq: torch.Tensor, ik: torch.Tensor) -> torch.Tensor:
        return attention.block_scores(iq, ik, 4).masked_fill(~seen, 0.0)

    assert torch.autograd.gradcheck(run, (iq, ik))


def test_the_divergence_by_finite_differences_and_its_minimum() -> None:
    scores = heads(9, 2, 3, seed=1)
    seen = attention.visible(9, 4)[:, None].expand(-1, 2, -1)
    mass = heads(9, 2, 3, seed=2).detach().masked_fill(~seen, -torch.inf).softmax(-1)
    assert torch.autograd.gradcheck(lambda s: divergence(s.masked_fill(~seen, -torch.inf), mass, None, 4), (scores,))
    at_minimum = divergence(mass.log(), mass, None, 4)
    assert abs(float(at_minimum)) < 1e-12
    assert float(divergence(scores.detach().masked_fill(~seen, -torch.inf), mass, None, 4)) > 1e-3


def test_the_activation_has_no_gradient_beyond_its_clamps() -> None:
    gate, up = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in ([8.0, 1.0, -9.0], [0.5, -9.0, 2.0]))
    y = swiglu(gate, up, 1.702, 1.0, 7.0)
    y.sum().backward()
    assert y.tolist()[1:] == pytest.approx([-5.07477, -6.0095e-6], rel=1e-5)  # MODEL.md §2.5
    assert gate.grad is not None
    assert up.grad is not None
    assert float(gate.grad[0]) == 0.0 == float(up.grad[1])
    assert float(gate.grad[2]) != 0.0
    assert float(up.grad[0]) != 0.0


def test_quantisation_passes_gradients_straight_through() -> None:
    x = torch.linspace(-3, 3, 7, dtype=torch.float64, requires_grad=True)
    y = straight_through(x, torch.round)
    (y * torch.arange(7)).sum().backward()
    assert torch.equal(y, x.detach().round())
    assert x.grad is not None
    assert x.grad.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_every_weight_by_finite_differences() -> None:
    """Unquantised, float64, beyond top-k: a step along a random direction in each weight changes the loss as the
    gradient says. The routing and the kept blocks stay as they are within so small a step."""
    _, target = trained.tiny("bf16")
    model = trained.model(target)
    tokens, targets = trained.tokens(2, 21), trained.tokens(2, 21, seed=1)
    targets[0, :5] = -1
    grads = backward(model, loss_of(model, tokens, targets))
    generator = torch.Generator().manual_seed(5)
    for name in model.parameters.units:
        if ".index_" in name or "e_score" in name:
            continue
        leaf = model.parameters.view(name, model.parameters.leaves).detach()
        direction = torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
        losses = []
        for sign in (1, -1):
            leaf += sign * 1e-6 * direction
            losses.append(float(loss_of(model, tokens, targets).detach()))
            leaf -= sign * 1e-6 * direction
        want = (losses[0] - losses[1]) / 2e-6
        assert float((grads[name] * direction).sum()) == pytest.approx(want, rel=1e-4, abs=1e-5), name


def test_the_index_branch_learns_alone() -> None:
    """The divergence moves index weights only, and the cross-entropy every other weight but the routing bias."""
    _, target = trained.tiny()
    model = trained.model(target, trained.scheme(), dtype=torch.float32)
    tokens, targets = trained.tokens(1, 40), trained.tokens(1, 40, seed=1)
    moved = {n for n, g in backward(model, model(tokens).kl).items() if bool(g.any())}
    index = {n for n in model.parameters.units if ".index_" in n}
    assert moved == index
    assert len(index) == 4 * target.text.num_layers
    moved = {n for n, g in backward(model, loss_of(model, tokens, targets)).items() if bool(g.any())}
    assert moved == {n for n in model.parameters.units if ".index_" not in n and "e_score" not in n}


def test_the_divergence_trains_where_no_block_is_dropped() -> None:
    _, target = trained.tiny("bf16")
    model = trained.model(target)
    tokens = trained.tokens(1, 12)  # three blocks, top-3
    record: dict[str, object] = {}
    out = model(tokens, record)
    assert record["0.keep"] == [None]
    assert bool(backward(model, out.kl)["model.layers.0.self_attn.index_q_proj.weight"].any())


def test_transformers_has_the_same_gradients(tmp_path: Path) -> None:
    """Of the cross-entropy, weight by weight. Saved as if they were weights, its gradients get our names."""
    from tests.support import peer  # transformers is a requirement of the tests

    from m31.checkpoint import Checkpoint
    from m31.training.parameters import Parameters

    theirs = peer.text_only(tmp_path / "weights", seed=3).float()
    saved = Checkpoint.open(tmp_path / "weights")
    parameters = Parameters(saved.config, dtype=torch.float32, quantise=False)
    parameters.load({name: saved.tensor(name).load().float() for name in parameters.units})
    parameters.refresh()
    ours = TrainedText(parameters, trained.UNQUANTISED)
    tokens = trained.tokens(1, 61, vocabulary=peer.VOCAB)

    logits = theirs(input_ids=tokens).logits[0]
    torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:], reduction="sum").backward()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.copy_(torch.zeros_like(weight) if weight.grad is None else weight.grad)
    theirs.save_pretrained(tmp_path / "gradients")
    want = Checkpoint.open(tmp_path / "gradients")
    targets = torch.cat([tokens[0, 1:], torch.tensor([-1])])
    got = backward(ours, loss_of(ours, tokens, targets[None]))
    moved = 0
    for name, gradient in got.items():
        if "e_score" in name:
            continue  # a buffer there: what is saved is still the bias
        value = want.tensor(name).load().float()
        assert float((gradient - value).abs().max()) <= 1e-4 * max(1.0, float(value.abs().max())), name
        moved += bool(value.any())
    assert moved > len(got) / 2  # all but the index branch and experts that got no token
