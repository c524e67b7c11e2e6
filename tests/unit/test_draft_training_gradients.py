"""Gradients of the draft head's training: against finite differences, against a plain composition, and where they
must not go; what a row costs; and where blocks begin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import drafted, synthetic, trained

from m31.training.data import Data
from m31.training.draft import model as draft_model
from m31.training.draft.losses import expected_length, rows
from m31.training.draft.model import TrainedHead, attend
from m31.training.draft.target import FrozenTarget
from m31.training.draft.task import DraftTraining
from m31.training.fakequant import UNQUANTISED
from m31.training.task import Piece

SHAPES = ((5, 3, 2, 2, 4), (5, 3, 2, 4), (5, 3, 2, 4), (20, 2, 4), (20, 2, 4))
PLACES = torch.tensor([1, 2, 7, 11, 17])


def tensors() -> list[torch.Tensor]:
    """q, k and v of five blocks of three rows, and a context of 20 tokens."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in SHAPES]


@pytest.mark.parametrize("window", [2, 6, 99])
@pytest.mark.parametrize("tile", [1, 2, 16])
def test_attention_is_the_formula(monkeypatch: pytest.MonkeyPatch, tile: int, window: int) -> None:
    """Row by row in numpy: no tile, no mask."""
    monkeypatch.setattr(draft_model, "TILE", tile)
    given = tensors()
    got = attend(*given, PLACES, window=window, scale=0.4).detach().numpy()
    q, k, v, old_k, old_v = (x.detach().numpy() for x in given)
    for a, place in enumerate(PLACES.tolist()):
        for i in range(3):
            seen = range(max(0, place + i - window + 1), place)
            for h in range(2):
                keys = np.stack([*(old_k[s, h] for s in seen), *k[a, :, h]])
                values = np.stack([*(old_v[s, h] for s in seen), *v[a, :, h]])
                for g in range(2):
                    weights = np.exp(keys @ q[a, i, h, g] * 0.4)
                    want = weights @ values / weights.sum()
                    np.testing.assert_allclose(got[a * 3 + i].reshape(2, 2, 4)[h, g], want, rtol=1e-12)


@pytest.mark.parametrize("window", [6, 99])
def test_attention_by_finite_differences(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    monkeypatch.setattr(draft_model, "TILE", 2)
    assert torch.autograd.gradcheck(lambda *x: attend(*x, PLACES, window=window, scale=0.4), tensors())


def exact(folder: Path, **changes: Any) -> tuple[DraftTraining, Piece]:
    """A task that rounds nothing, in float64, and a piece of it."""
    drafted.write_target(folder, "bf16", arithmetic="exact")
    losses = {"blocks": 140, "hard_labels": 0.25, "row_decay": 0.8, "confidence_weight": 0.5}
    config = drafted.config(
        folder,
        target={"arithmetic": "exact", "kv": "float64", "index": "float64"},
        losses={**losses, **changes},
    )
    task = DraftTraining(config, synthetic.counting())
    mapping = drafted.head_config()
    task.target, weights, task.head = drafted.head(folder, UNQUANTISED, mapping, dtype=torch.float64, quantise=False)
    task.parameters = weights
    tokens, targets = trained.tokens(2, 45), trained.tokens(2, 45, seed=1)
    targets[0, 20:23] = -1
    return task, Piece(tokens, targets, (tokens, targets), 3, 0)


def total(task: DraftTraining, piece: Piece) -> float:
    """What is minimised, of a piece that is a whole batch."""
    found = [(float(part.count), float(value.detach())) for part, value in task._sequences(piece)]
    return sum(value for _, value in found) / sum(count for count, _ in found)


def test_every_weight_by_finite_differences(tmp_path: Path) -> None:
    """A step along a random direction in each weight changes the loss as the gradient says. The confidence head's
    target follows the rest, which gets no gradient from there: its part is checked on its own weights only."""
    task, piece = exact(tmp_path / "t", confidence_weight=1e-12)
    sure, _ = exact(tmp_path / "u", confidence_weight=0.5)
    generator = torch.Generator().manual_seed(5)
    for name in task.parameters.leaves:
        one = sure if "confidence" in name else task
        grads = one.gradient(piece).grads
        leaf = one.parameters.leaves[name].detach()
        direction = torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
        losses = []
        for sign in (1, -1):
            leaf += sign * 1e-6 * direction
            losses.append(total(one, piece))
            leaf -= sign * 1e-6 * direction
        want = (losses[0] - losses[1]) / 2e-6
        assert float((grads[name] * direction).sum()) == pytest.approx(want, rel=1e-4, abs=1e-7), name
        assert float(grads[name].abs().max()) > 1e-8, name


def test_the_confidence_head_moves_nothing_else(tmp_path: Path) -> None:
    grads = []
    for weight in (1e-12, 3.0):
        task, piece = exact(tmp_path / str(weight), confidence_weight=weight)
        grads.append(task.gradient(piece).grads)
    for name, grad in grads[0].items():
        same = torch.equal(grad, grads[1][name])
        assert same == ("confidence" not in name), name


def test_pieces_of_a_batch_add_up(tmp_path: Path) -> None:
    task, piece = exact(tmp_path / "t")
    whole = task.gradient(piece)
    parts = [Piece(piece.tokens[r : r + 1], piece.targets[r : r + 1], piece.batch, piece.step, r) for r in (0, 1)]
    first, second = (task.gradient(part) for part in parts)
    first.add(second)
    assert first.count == whole.count
    assert first.mean == pytest.approx(whole.mean)
    for name, grad in whole.grads.items():
        torch.testing.assert_close(first.grads[name], grad, rtol=1e-9, atol=1e-12)
    for name, value in whole.figures.items():
        torch.testing.assert_close(first.figures[name], value)


def test_a_row_is_the_formula() -> None:
    """KL, cross-entropy, acceptance and agreement in numpy."""
    rng = np.random.default_rng(1)
    mine, theirs, labels = rng.standard_normal((6, 9)) * 2, rng.standard_normal((6, 9)) * 2, rng.integers(0, 9, 6)
    q, p = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (mine, theirs))
    for hard in (0.0, 0.3, 1.0):
        found = rows(torch.tensor(mine), torch.tensor(theirs), torch.tensor(labels), hard)
        want = (1 - hard) * (p * np.log(p / q)).sum(-1) - hard * np.log(q[np.arange(6), labels])
        np.testing.assert_allclose(found.loss, want, rtol=1e-12)
    np.testing.assert_allclose(found.acceptance, 1 - np.abs(p - q).sum(-1) / 2, rtol=1e-12)
    assert found.agreement.tolist() == (mine.argmax(-1) == theirs.argmax(-1)).tolist()
    length = expected_length(torch.tensor([[0.5, 0.5, 1.0], [1.0, 1.0, 1.0], [0.0, 1.0, 1.0]]))
    assert length.tolist() == [0.5 + 0.25 + 0.25, 3.0, 0.0]


def test_where_blocks_begin(tmp_path: Path) -> None:
    """Distinct, ascending, with room and a token before them, other ones each step and for each sequence."""
    task, _ = exact(tmp_path / "t", blocks=100)
    targets = torch.zeros(80, dtype=torch.int64)
    targets[10:30] = -1
    seen = set()
    for step in range(40):
        places = task._places(step, 0, targets)
        assert len(places) == 8  # 100 per 1,024
        assert places.tolist() == sorted(set(places.tolist()))
        seen |= set(places.tolist())
        assert torch.equal(places, task._places(step, 0, targets))
        assert not torch.equal(places, task._places(step, 1, targets))
    assert seen == {*range(1, 10), *range(30, 74)}
    weights = task._weights(targets, torch.tensor([8]))
    assert weights[0].tolist() == pytest.approx([1.0, 0.8, 0, 0, 0, 0, 0])
    assert len(task._places(0, 0, targets[:7])) == 0
    assert len(task._places(0, 0, torch.zeros(8, dtype=torch.int64))) == 1


def test_sequences_without_room_give_nothing(tmp_path: Path) -> None:
    task, _ = exact(tmp_path / "t")
    tokens = trained.tokens(1, 6)
    found = task.gradient(Piece(tokens, tokens, (tokens, tokens), 0, 0))
    assert (found.loss, found.count, found.figures) == (0.0, 0, {})
    assert not any(bool(grad.any()) for grad in found.grads.values())
    assert task.shown(found, 6) == {}


def test_the_target_gets_no_gradient(tmp_path: Path) -> None:
    drafted.write_target(tmp_path / "t")
    task = DraftTraining(drafted.config(tmp_path / "t"), Data(synthetic.Counting(1, 40, 64, 1), [], "x"))
    task.parameters.initialise(1)
    task.parameters.refresh()
    assert isinstance(task.target, FrozenTarget)
    assert isinstance(task.head, TrainedHead)
    tokens, targets = synthetic.Counting(1, 40, 64, 1).batch(0)
    found = task.gradient(Piece(tokens, targets, (tokens, targets), 0, 0))
    assert set(found.grads) == set(task.parameters.leaves)
    assert not task.target.embedding.requires_grad
    assert not task.target.head.requires_grad
    moved = {name for name, grad in found.grads.items() if bool(grad.any())}
    # The Markov correction begins at zero, and so nothing reaches its embedding in the first step.
    assert set(found.grads) - moved == {"dspark.markov_head.markov_w1.weight"}
