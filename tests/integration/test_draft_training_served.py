"""What the training of a draft head computes is what the exported head drafts, code for code."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import drafted, trained

import m31
from m31.checkpoint import Checkpoint
from m31.engine.drafting import DraftHead
from m31.engine.engine import Sequence
from m31.formats import mxfp8
from m31.training.draft.export import export

PROMPT = trained.tokens(1, 37)[0].tolist()
SCHEMES: dict[str, tuple[str, str, str, str, bool]] = {  # target's weights, arithmetic, KV, index, MXFP8 head
    "as M3.1": ("m31", "w4a4-megamoe", "nvfp4", "nvfp4", True),
    "e4m3 attention of the target": ("m31", "w4a4-q8kv4", "nvfp4", "int8", True),
    "activations in bf16": ("m31", "w4a16", "nvfp4", "bfloat16", True),
    "a head in bf16": ("m31", "w4a4-megamoe", "nvfp4", "nvfp4", False),
    "queries not rounded": ("m31", "w4a4-megamoe+query=none", "nvfp4", "nvfp4", True),
    "exact": ("bf16", "exact", "float64", "float64", True),
}


def made(folder: Path, name: str, dtype: torch.dtype) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Target, weights and head in training, and how to serve `folder / "c"`, where they are written."""
    weights, arithmetic, kv, index, quantised = SCHEMES[name]
    drafted.write_target(folder / "t", weights, arithmetic=arithmetic)
    mapping = drafted.head_config(**({} if quantised else {"quantization_config": None}))
    scheme = drafted.scheme(arithmetic, kv, index)
    target, values, head = drafted.head(folder / "t", scheme, mapping, dtype=dtype)
    export(folder / "c", target.checkpoint, mapping, values)
    options = {"backend": "reference", "arithmetic": arithmetic, "kv_dtype": kv, "index_dtype": index, "draft": 7}
    return target, values, head, {**options, "dtype": str(dtype).removeprefix("torch."), "max_context": 512}


def served(folder: Path, options: dict[str, Any], patch: pytest.MonkeyPatch) -> tuple[list[int], list[Any], list[Any]]:
    """A sampled text; (anchor's position, base, hidden, drafted) of every draft; (positions, taps) of every lesson."""
    model = m31.load(folder, **options)
    drafts: list[Any] = []
    lessons: list[Any] = []
    run, draft, learn = DraftHead._pass, DraftHead.draft, DraftHead.learn

    def passing(self: DraftHead, anchor: int, count: int, length: int, pages: Any) -> Any:
        base, hidden = run(self, anchor, count, length, pages)
        drafts.append([length, base.clone(), hidden.clone()])
        return base, hidden

    def drafting(self: DraftHead, *args: Any) -> Any:
        found = draft(self, *args)
        drafts[-1].append(found)
        return found

    def learning(self: DraftHead, taps: torch.Tensor, positions: Any, slots: Any) -> None:
        lessons.append((list(positions), taps.clone()))
        learn(self, taps, positions, slots)

    with patch.context() as p:
        p.setattr(DraftHead, "_pass", passing)
        p.setattr(DraftHead, "draft", drafting)
        p.setattr(DraftHead, "learn", learning)
        generation = model.generate(PROMPT, max_tokens=30, temperature=1.0, top_p=1.0, seed=3, ignore_eos=True)
        list(generation.events())
    return [*PROMPT, *generation.token_ids], drafts, lessons


@pytest.mark.parametrize("name", SCHEMES)
def test_taps_contexts_blocks_and_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In float64 no sum depends on its order enough to move a rounding, so that everything must agree."""
    target, _, head, options = made(tmp_path, name, torch.float64)
    ids, drafts, lessons = served(tmp_path / "c", options, monkeypatch)
    assert len(drafts) > 4
    taps, _ = target(torch.tensor([ids]), head.draft.target_layer_ids)
    for positions, found in lessons:
        torch.testing.assert_close(taps[0, positions], found, rtol=1e-9, atol=1e-9)
    context = head.context(taps[0])
    for length, base, hidden, found in drafts:
        rows = len(found.tokens)
        anchors, places = torch.tensor([ids[length]]), torch.tensor([length])
        u = head.block(context, anchors, places, rows).detach()
        torch.testing.assert_close(u, hidden, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(u @ target.head.t(), base, rtol=1e-9, atol=1e-9)
        prev = torch.tensor([ids[length], *found.tokens[:-1]])
        q = torch.softmax(head.logits(u, prev).detach(), -1)
        np.testing.assert_allclose(q.numpy(), np.stack(found.chances), rtol=1e-8, atol=1e-9)
        sure = torch.sigmoid(head.confidence(u, prev)).detach()
        torch.testing.assert_close(sure, torch.tensor(found.confidence, dtype=torch.float64), rtol=1e-6, atol=1e-9)
    assert {len(d[3].tokens) for d in drafts} > {7}  # and shorter ones at the end


def test_many_blocks_at_once_are_each_alone(tmp_path: Path) -> None:
    """One pass over all blocks of a sequence, in tiles, gives what each block gives alone."""
    target, _, head, _ = made(tmp_path, "as M3.1", torch.float64)
    ids = trained.tokens(1, 90)
    taps, _ = target(ids, head.draft.target_layer_ids)
    context, places = head.context(taps[0]), torch.arange(1, 84, 2)
    together = head.block(context, ids[0, places], places, 7).view(-1, 7, 64)
    for at in (0, 3, 15, 16, 17, 41):
        alone = head.block(context, ids[0, places[at : at + 1]], places[at : at + 1], 7)
        torch.testing.assert_close(together[at], alone, rtol=1e-10, atol=1e-10)
    # What comes after an anchor does not reach its block.
    changed = taps[0].clone()
    changed[places[20] :] += 1.0
    other = head.block(head.context(changed), ids[0, places[:21]], places[:21], 7).view(-1, 7, 64)
    torch.testing.assert_close(together[:21], other, rtol=0, atol=0)


def test_pages(tmp_path: Path) -> None:
    """The head's pages hold the keys and values of training, bit for bit."""
    target, _, head, options = made(tmp_path, "as M3.1", torch.float64)
    model = m31.load(tmp_path / "c", **options)
    taps, _ = target(torch.tensor([PROMPT]), head.draft.target_layer_ids)
    context = head.context(taps[0])
    engine, drafter = model.engine, model.engine.drafter
    sequence = Sequence(prompt=PROMPT, params=None, seed=0, request=0, stop_ids=frozenset())
    engine.add(sequence)
    held: list[int] = []
    while not sequence.done:
        engine.step()
        held = held or list(sequence.pages)
    for layer in range(head.draft.num_layers):
        for at, page in enumerate(held):
            rows = slice(at * 4, min(len(PROMPT), at * 4 + 4))
            found = drafter.cache.read(layer, page)
            for kind, values in (("k", context.keys), ("v", context.values)):
                want = values[layer][rows].detach().transpose(0, 1)
                assert torch.equal(found[kind][:, : want.shape[1]].to(want.dtype), want), (layer, at, kind)


def test_in_the_dtype_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, _, head, options = made(tmp_path, "as M3.1", torch.float32)
    ids, drafts, lessons = served(tmp_path / "c", options, monkeypatch)
    taps, _ = target(torch.tensor([ids]), head.draft.target_layer_ids)
    assert all(torch.allclose(taps[0, p], found, rtol=1e-4, atol=1e-4) for p, found in lessons)
    context, agree = head.context(taps[0]), Counter[bool]()
    for length, base, _, found in drafts:
        u = head.block(context, torch.tensor([ids[length]]), torch.tensor([length]), len(found.tokens))
        got = (u @ target.head.t()).detach()
        agree[bool((got - base).abs().max() <= 1e-5 * base.abs().max())] += 1
    assert agree[True] >= 0.8 * agree.total()  # a sum on the edge of a rounding may fall to either side


def test_weights(tmp_path: Path) -> None:
    """The stored codes are those of the masters, and what they decode to is what training multiplied with."""
    target, values, _, _ = made(tmp_path, "as M3.1", torch.float32)
    saved = Checkpoint.open(tmp_path / "c")
    assert saved.draft is not None
    formats = Counter[str]()
    for name, master in values.named():
        stored = saved.draft.tensor(name)
        formats[stored.format] += 1
        assert torch.equal(stored.load().float(), values.leaves[name].detach()), name
        if stored.format == "mxfp8":
            codes, scale = mxfp8.encode(master)
            parts = {role: part.load() for role, part in stored.parts().items()}
            assert torch.equal(parts["codes"].view(torch.uint8), codes.view(torch.uint8)), name
            assert torch.equal(parts["scale"], scale), name
    assert formats == {"mxfp8": 14, "plain": 15}
    assert (tmp_path / "c" / "note.txt").read_bytes() == b"target"
    for name in target.checkpoint.declared:
        a, b = (c.stored(name).load() for c in (target.checkpoint, saved))
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


def test_it_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another arithmetic gives visibly other rows."""
    target, _, head, options = made(tmp_path, "as M3.1", torch.float64)
    ids, drafts, _ = served(tmp_path / "c", {**options, "arithmetic": "w4a16"}, monkeypatch)
    taps, _ = target(torch.tensor([ids]), head.draft.target_layer_ids)
    context = head.context(taps[0])
    length, base, *_ = drafts[1]
    u = head.block(context, torch.tensor([ids[length]]), torch.tensor([length]), len(base))
    assert float((u.detach() @ target.head.t() - base).abs().max()) > 1e-3 * float(base.abs().max())
