"""A rank's part of a stored weight: what it holds, what it reads, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.quantised import bf16_config, save, stored_tensors, write_bf16, write_quantised

from m31.checkpoint import Checkpoint, LazyTensor, QuantizedTensor
from m31.errors import CheckpointError, DamagedScale, GraphError
from m31.graph import Cut, Part, Shard, narrow, placement, shard, trace
from m31_reference.session import ReferenceBackend

O_PROJ = "model.layers.1.self_attn.o_proj.weight"  # MXFP8 [64, 128]
W2 = "model.layers.2.block_sparse_moe.experts.1.w2.weight"  # NVFP4 [64, 128]
WORLDS = (2, 4)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    root = tmp_path_factory.mktemp("narrowed")
    sizes = {"dense_intermediate_size": 128, "intermediate_size": 128, "shared_intermediate_size": 128}
    mapping = {**bf16_config(), **sizes}
    return {"bf16": write_bf16(root / "bf16", mapping), "m31": write_quantised(root / "m31", mapping, "m31")}


def parts_of(checkpoint: Checkpoint, world: int) -> list[dict[str, Part]]:
    text = checkpoint.config.text
    graph = trace(text)
    return [placement(graph, text, Shard(rank, world)) for rank in range(world)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["bf16", "m31"])
def test_the_ranks_together_have_every_weight(checkpoints: dict[str, Checkpoint], name: str, world: int) -> None:
    """BUG-37: codes and scales are cut together, along outputs and along inputs; decoding a part gives part of the
    decoded weight, bit for bit."""
    checkpoint, ranks = checkpoints[name], parts_of(checkpoints[name], world)
    cut_inputs = set()
    for tensor in ranks[0]:
        stored = checkpoint.tensor(tensor)
        whole = stored.load()
        for parts in ranks:
            mine, cut = narrow(stored, parts[tensor]), parts[tensor].cut
            if cut is None:
                assert mine is stored
                continue
            loaded = mine.load()
            assert tuple(loaded.shape) == mine.shape == parts[tensor].shape
            assert (mine.dtype, mine.format, mine.name) == (stored.dtype, stored.format, stored.name)
            assert torch.equal(loaded, whole.narrow(cut.axis, cut.start, cut.stop - cut.start))
            if cut.axis == 1:
                cut_inputs.add(stored.format)
    assert cut_inputs == ({"plain"} if name == "bf16" else {"mxfp8", "nvfp4"})


def test_a_part_is_a_view_of_the_mapped_file(checkpoints: dict[str, Checkpoint]) -> None:
    """Nothing is read or copied by taking it, along either dimension."""
    checkpoint = checkpoints["bf16"]
    for parts in parts_of(checkpoint, 2):
        for name in (O_PROJ, O_PROJ.replace("o_proj", "q_proj"), "lm_head.weight"):
            stored = checkpoint.tensor(name)
            assert isinstance(stored, LazyTensor)
            mine, mapped = narrow(stored, parts[name]).load(), stored.file.storage()
            assert mine.untyped_storage().data_ptr() == mapped.data_ptr()
            assert mine.stride() == stored.load().stride()


@pytest.mark.parametrize(("name", "block", "codes", "per"), [(O_PROJ, 32, "codes", 1), (W2, 16, "packed", 2)])
def test_the_stored_parts_of_a_part(
    checkpoints: dict[str, Checkpoint], name: str, block: int, codes: str, per: int
) -> None:
    """Half of the inputs: half of the codes, half of the block scales, the scales of the whole tensor whole."""
    stored = checkpoints["m31"].tensor(name)
    for rank, parts in enumerate(parts_of(checkpoints["m31"], 2)):
        mine = narrow(stored, parts[name])
        assert isinstance(mine, QuantizedTensor)
        assert mine.shape == (64, 64)
        for role, part in mine.parts().items():
            whole = stored.parts()[role].load()
            if role in (codes, "scale"):
                width = 64 // (per if role == codes else block)
                want = whole[:, rank * width : (rank + 1) * width]
                assert want.shape == part.shape
                file = part.file.storage()  # type: ignore[union-attr]
                assert part.load().untyped_storage().data_ptr() == file.data_ptr()
            else:
                want = whole
            assert torch.equal(part.load().view(torch.uint8), want.view(torch.uint8))
        assert mine.nbytes == sum(p.nbytes for p in mine.parts().values())


def test_a_rank_does_not_read_what_is_anothers(checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    """A damaged scale stops the rank that has it and no other."""
    source = checkpoints["m31"]
    tensors = stored_tensors(source)
    scale = next(name for name in tensors if name.startswith(O_PROJ) and name.endswith("scale_inv"))
    tensors[scale][5, 3] = 255  # inputs 96 to 127: rank 1's
    (tmp_path / "config.json").write_bytes((source.folder / "config.json").read_bytes())
    save(tmp_path / "model.safetensors", tensors)
    damaged = Checkpoint.open(tmp_path)
    zero, one = (narrow(damaged.tensor(O_PROJ), parts[O_PROJ]) for parts in parts_of(damaged, 2))
    assert torch.equal(zero.load(), source.tensor(O_PROJ).load()[:, :64])
    with pytest.raises(DamagedScale, match=r"self_attn.o_proj.*flat index 11 of shape \[64, 2\]"):  # of its own part
        one.load()


def test_memory_is_counted_for_the_part(checkpoints: dict[str, Checkpoint]) -> None:
    """BF16 weights that float32 converts: of what is cut each rank counts its share."""
    checkpoint = checkpoints["bf16"]
    text, own = checkpoint.config.text, Shard(1, 2)
    graph = trace(text)
    parts = placement(graph, text, own)
    session = ReferenceBackend(None).open(device=None, dtype="float32", rank=0, world=1)  # type: ignore[arg-type]
    full = {call.op.weights.name: call.op for call in graph.calls if call.op.weights is not None}
    for call in shard(graph, text, own).calls:
        decl = call.op.weights
        if decl is None or call.op.spec.name not in ("linear", "lm_head"):
            continue
        (tensor,) = decl.slots.values()
        stored = checkpoint.tensor(tensor.name)
        mine = narrow(stored, parts[tensor.name])
        ways = 1 if parts[tensor.name].cut is None else 2
        bytes_ = session.weight_bytes(call.op, {"weight": mine})
        assert bytes_ * ways == session.weight_bytes(full[decl.name], {"weight": stored}) > 0


@pytest.mark.parametrize(
    ("name", "cut", "message"),
    [
        (O_PROJ, Cut(1, 16, 80), r"o_proj.weight: slice 16:80 of the inputs cuts a block; expected multiples of 32"),
        (W2, Cut(1, 0, 40), r"w2.weight: slice 0:40 of the inputs cuts a block; expected multiples of 16"),
        (O_PROJ, Cut(0, 32, 96), r"o_proj.weight: no slice 32:96 of dimension 0 in \[64, 128\]"),
    ],
)
def test_a_cut_that_the_storage_does_not_allow(
    checkpoints: dict[str, Checkpoint], name: str, cut: Cut, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        narrow(checkpoints["m31"].tensor(name), Part(name, (64, 128), cut))


def test_narrowing_twice_or_another_tensor_is_refused(checkpoints: dict[str, Checkpoint]) -> None:
    checkpoint = checkpoints["m31"]
    part = parts_of(checkpoint, 2)[1][O_PROJ]
    once = narrow(checkpoint.tensor(O_PROJ), part)
    with pytest.raises(GraphError, match=r"of shape \[64, 64\]; expected '.*o_proj.weight' of shape \[64, 128\]"):
        narrow(once, part)
    with pytest.raises(GraphError, match=r"tensor 'model.layers.*w2.weight' of shape \[64, 128\]; expected '.*o_proj"):
        narrow(checkpoint.tensor(W2), part)
