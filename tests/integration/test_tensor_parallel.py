"""A model spread over ranks equals the model in one piece: shard pass, weight axes, narrowed weights, collectives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import adapters, quantised, spread

from m31.checkpoint import Checkpoint, write
from m31.errors import BackendError
from m31.ops.collective import gathered, reduced
from m31.parallel import CollectiveError, Shard, TorchGroup

SECONDS = 150  # two processes that start torch on a busy machine; a hang ends here
EXACT = {"float32": 1e-5, "float64": 1e-10}  # of the largest logit

# Jobs of the two processes: folder, compute dtype, and what is done wrong on purpose.
JOBS: dict[str, dict[str, Any]] = {
    "plain-float32": {"folder": "m3.1", "dtype": "float32"},
    "plain-float64": {"folder": "m3.1", "dtype": "float64"},
    "dense-attention-float64": {"folder": "m3", "dtype": "float64"},
    "quantised-float32": {"folder": "quantised", "dtype": "float32"},
    "quantised-float64": {"folder": "quantised", "dtype": "float64"},
    "wrong-o": {"folder": "m3.1", "dtype": "float64", "moved": {"0.self_attn.o_proj.weight": 1}},
    "wrong-index": {"folder": "m3.1", "dtype": "float64", "moved": {"0.self_attn.index_q_proj.weight": 1}},
    "wrong-expert": {"folder": "quantised", "dtype": "float64", "moved": {"experts.1.w2.weight": 1}},
    "wrong-head": {"folder": "m3.1", "dtype": "float64", "moved": {"lm_head.weight": 1}},
    "without-sum": {"folder": "m3.1", "dtype": "float64", "without_sum": True},
}
RIGHT = [name for name, job in JOBS.items() if not {"moved", "without_sum"} & set(job)]
WRONG = [name for name in JOBS if name not in RIGHT]


def wide(name: str) -> dict[str, Any]:
    """Widths that four ranks divide into whole blocks of 32."""
    mapping = quantised.bf16_config(name=name)  # type: ignore[arg-type]
    sizes = {"dense_intermediate_size": 128, "intermediate_size": 128, "shared_intermediate_size": 128}
    return {**mapping, **sizes}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """M3.1 and M3 in BF16, and M3.1 as published: MXFP8 projections, NVFP4 experts."""
    root = tmp_path_factory.mktemp("spread")
    for folder, name in (("m3.1", "m3.1-flash"), ("m3", "m3")):
        weights = quantised.bf16_weights(wide(name)).items()
        write(root / folder, wide(name), weights, max_shard_bytes=1 << 20, extra_files={})
    quantised.write_quantised(root / "quantised", wide("m3.1-flash"), "m31", shard=1 << 20)
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="module")
def processes(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    """What each of two processes computed, by job."""
    root = tmp_path_factory.mktemp("ranks")
    jobs = json.dumps({name: {**job, "folder": str(folders[job["folder"]])} for name, job in JOBS.items()})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # this machine only, whatever its name resolves to
    command = [sys.executable, "-m", "tests.support.spread"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", f"file://{root}/meeting", f"{root}/{rank}.pt", jobs],
            env=environment,
            cwd=Path(__file__).resolve().parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    return [torch.load(root / f"{rank}.pt") for rank in range(2)]


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest error, of the largest logit."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    assert bool(want.isfinite().all())
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("name", RIGHT)
def test_two_processes_equal_one(folders: dict[str, Path], processes: list[dict[str, torch.Tensor]], name: str) -> None:
    """Prefill, a chunk beside a decode, and decodes, of two sequences; both ranks have all logits, bit for bit."""
    want = spread.alone(folders[JOBS[name]["folder"]], JOBS[name]["dtype"])
    assert want.shape[0] == sum(map(sum, spread.STEPS))
    assert distance(processes[0][name], want) < EXACT[JOBS[name]["dtype"]]
    assert torch.equal(processes[0][name], processes[1][name])


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_shows(folders: dict[str, Path], processes: list[dict[str, torch.Tensor]], name: str) -> None:
    """The comparison can fail: one part of one weight from the other rank, or no sum."""
    want = spread.alone(folders[JOBS[name]["folder"]], JOBS[name]["dtype"])
    assert distance(processes[0][name], want) > 1e-3


@pytest.mark.parametrize("folder", ["m3.1", "m3", "quantised"])
@pytest.mark.parametrize("world", [2, 4])
def test_a_world_of_threads(folders: dict[str, Path], folder: str, world: int) -> None:
    """Four ranks have two KV heads and two index heads between them: each is on two ranks (MODEL.md §2.4)."""
    want = spread.alone(folders[folder], "float64")
    for got in spread.Threads(world).run(folders[folder], "float64"):
        assert distance(got, want) < EXACT["float64"]


@pytest.mark.parametrize("world", [2, 4])
def test_an_adapter_is_spread_with_what_it_adapts(folders: dict[str, Path], tmp_path: Path, world: int) -> None:
    """B is cut along the outputs and A along the inputs of its matrix: in every place that can have an adapter."""
    made = adapters.pairs(Checkpoint.open(folders["quantised"]), adapters.EVERYWHERE)
    folder = adapters.write(tmp_path / "a", made, list(adapters.EVERYWHERE))
    want = spread.alone(folders["quantised"], "float64", adapter=folder)
    assert distance(want, spread.alone(folders["quantised"], "float64")) > 0.1
    for got in spread.Threads(world).run(folders["quantised"], "float64", adapter=folder):
        assert distance(got, want) < EXACT["float64"]


@pytest.mark.parametrize("pages", ["nvfp4", "fp8"])
def test_quantised_pages_hold_the_ranks_heads(folders: dict[str, Path], pages: str) -> None:
    """What is rounded to BF16 before it is written is rounded head by head, so a rank writes what the whole would."""
    want = spread.alone(folders["quantised"], "float64", pages)
    assert distance(want, spread.alone(folders["quantised"], "float64")) > 1e-4
    for got in spread.Threads(4).run(folders["quantised"], "float64", pages):
        assert distance(got, want) < EXACT["float64"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_collectives_of_two_processes(processes: list[dict[str, torch.Tensor]], dtype: torch.dtype) -> None:
    """Sums are rounded once; two addends have one order."""
    parts = [spread.given(rank, dtype) for rank in range(2)]
    total = torch.from_numpy(reduced([p.double().numpy() for p in parts])).to(dtype)
    for done in processes:
        assert torch.equal(done[f"{dtype}/all_reduce"], total)
        assert torch.equal(done[f"{dtype}/in place"], total)
        assert torch.equal(
            done[f"{dtype}/all_gather"], torch.from_numpy(gathered([p.double().numpy() for p in parts])).to(dtype)
        )


def test_a_rank_that_waits_in_vain_says_so(tmp_path: Path) -> None:
    joined = TorchGroup.joined(Shard(1, 2), address=f"file://{tmp_path}/m", transport="gloo", seconds=1)
    with pytest.raises(CollectiveError, match=r"joining the process group, rank 1 of 2: failed .*other ranks") as info:
        joined.__enter__()
    assert (info.value.rank, info.value.world) == (1, 2)
    assert isinstance(info.value, BackendError)
