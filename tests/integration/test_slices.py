"""The backends in tree that serve a part of the model: through m31.load, the same greedy tokens as the reference.

The third slice, in numpy and out of tree, is installed and compared in test_numpy_backend_installed.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import m31
from m31.checkpoint import convert
from m31.cli import demo

PROMPT = list(range(20, 180))  # beyond one page of 128


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A demo checkpoint in BF16, as M3.1-Flash stores one, and as M3-MXFP8."""
    root = tmp_path_factory.mktemp("slices")
    demo.write(root / "bf16", seed=0, layers=2)
    for target in ("m31", "m3-mxfp8"):
        convert(root / "bf16", root / target, target=target, max_shard_bytes=1 << 30, input_scales={})  # type: ignore[arg-type]
    return {path.name: path for path in root.iterdir()}


def greedy(
    folder: Path, backend: str, tokens: int, *, prompt: list[int], **options: str
) -> tuple[list[int], dict[str, int]]:
    """Tokens, and what fell back."""
    model = m31.load(folder, backend=backend, max_context=512, **options)  # type: ignore[arg-type]
    with model.generate(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True) as generation:
        list(generation.events())
        return list(generation.token_ids), model.fallback_calls


@pytest.mark.parametrize("target", ["bf16", "m31", "m3-mxfp8"])
@pytest.mark.parametrize("kv", ["float32", "nvfp4"])
def test_the_native_model(folders: dict[str, Path], target: str, kv: str) -> None:
    tokens, elsewhere = greedy(folders[target], "cpu", 12, prompt=PROMPT, kv_dtype=kv)
    want, _ = greedy(folders[target], "reference", 12, prompt=PROMPT, kv_dtype=kv)
    assert tokens == want
    if kv == "float32":  # where pages round, a value beside a tie may round the other way
        logits, reference = (
            m31.load(folders[target], backend=name, max_context=512, kv_dtype=kv).logits(PROMPT)
            for name in ("cpu", "reference")
        )
        torch.testing.assert_close(logits, reference, rtol=0, atol=1e-4 * float(reference.abs().max()))
    assert not elsewhere  # nothing falls back, however the experts are stored


@pytest.mark.parametrize(("target", "kv"), [("bf16", "bfloat16"), ("m31", "nvfp4")])
def test_fused_insert_and_sparse_decode(folders: dict[str, Path], target: str, kv: str) -> None:
    """Interpreted, hence short: longer contexts are in the tests of the kernels."""
    how = {"kv_dtype": kv, "index_dtype": kv, "arithmetic": "w16a16"}
    tokens, elsewhere = greedy(folders[target], "triton", 4, prompt=PROMPT[:9], **how)
    want, _ = greedy(folders[target], "reference", 4, prompt=PROMPT[:9], **how)
    assert tokens == want
    assert "experts" in elsewhere
    assert not {"rope", "head_rmsnorm", "kv_write", "index_write", "sparse_attention"} & set(elsewhere)
