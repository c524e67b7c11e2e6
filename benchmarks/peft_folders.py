"""Adapter folders against PEFT itself: it reads what m31 writes, m31 reads what it writes, and both compute the same.

    pip install peft && python benchmarks/peft_folders.py

PEFT is no dependency of m31. The model is a tree of plain linear layers under the official module names, as large as
the tests' smallest checkpoint; PEFT's layers in float32 are compared with (W + scale B A) x in
float64.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn

from m31 import config
from m31.checkpoint import Adapter, AdapterConfig, adaptable, write_adapter
from m31.checkpoint.adapter import official_module

CASES: dict[str, dict[str, Any]] = {
    "list": {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "index_k_proj", "w1", "lm_head"]},
    "regex": {"r": 3, "lora_alpha": 16, "target_modules": r".*\.(self_attn\.o_proj|experts\.[02]\.w[23])"},
    "rslora": {"r": 4, "lora_alpha": 6, "target_modules": ["down_proj", "v_proj"], "use_rslora": True},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "up_proj", "w2"],
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 7},
        "alpha_pattern": {"up_proj": 3, r"experts\.1\.w2": 100},
    },
    "excluded": {
        "r": 2,
        "lora_alpha": 2,
        "target_modules": ["q_proj", "k_proj"],
        "exclude_modules": r".*layers\.0\..*",
    },
}


def tree(modules: dict[str, tuple[int, int]]) -> nn.Module:
    """Linear layers by dotted name, with random weights."""
    torch.manual_seed(1)
    root = nn.Module()
    for name, (out, width) in modules.items():
        at = root
        *path, last = name.split(".")
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, nn.Module())
            at = getattr(at, part)
        at.add_module(last, nn.Linear(width, out, bias=False))
    return root


@torch.no_grad()
def worst(root: nn.Module, adapter: Adapter, described: config.Model) -> float:
    """Largest difference between PEFT's layers and W x + B A x with the adapter as m31 reads it."""
    off = 0.0
    for module, pair in adapter.modules.items():
        layer = root.get_submodule(official_module(module, described))
        x = torch.randn(3, layer.in_features)
        whole = layer.base_layer.weight.double() + pair.delta(0, layer.out_features)
        want = x.double() @ whole.T
        off = max(off, float((layer(x) - want).abs().max() / want.abs().max()))
    return off


def main() -> None:
    """Print a line per case and direction."""
    mapping = config.published("m3.1-flash")
    mapping.pop("quantization_config", None)
    text = mapping["text_config"]
    text |= {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"head_dim": 32, "rotary_dim": 16, "vocab_size": 64, "dense_intermediate_size": 96, "intermediate_size": 32}
    text |= {"shared_intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
    text |= {"moe_layer_freq": [0, 0, 1], "bos_token_id": 1, "eos_token_id": 2}
    text["sparse_attention_config"] |= {"sparse_attention_freq": [1] * 3, "sparse_disable_index_value": [1] * 3}
    text["sparse_attention_config"] |= {"sparse_num_index_heads": 2, "sparse_index_dim": 32}
    described = config.parse({**text, "architectures": ["MiniMaxM3SparseForCausalLM"]}, where="here")
    shapes = {official_module(m, described): shape for m, shape in adaptable(described).items()}
    print(f"peft {peft.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            root = tree(shapes)
            made = peft.get_peft_model(root, peft.LoraConfig(init_lora_weights=False, **case))
            made.save_pretrained(Path(folder, name), save_embedding_layers=False)
            read = Adapter.open(Path(folder, name), described)
            adapted = {n.removeprefix("base_model.model.") for n, m in made.named_modules() if hasattr(m, "base_layer")}
            assert adapted == {official_module(m, described) for m in read.modules}
            print(f"{name:9} peft -> m31  {len(read.modules):3} modules, off by {worst(root, read, described):.1e}")

            chosen = read.config
            tensors = {m: (p.a.source.load(), p.b.source.load()) for m, p in read.modules.items()}
            written = write_adapter(Path(folder, f"{name}-m31"), chosen, tensors, model=described, base="tiny")
            other = tree(shapes)
            other.prepare_inputs_for_generation = None  # PEFT asks a causal model for it and does not call it here
            peft.PeftModel.from_pretrained(other, str(written.folder))
            print(f"{name:9} m31 -> peft  {len(read.modules):3} modules, off by {worst(other, written, described):.1e}")
            assert isinstance(chosen, AdapterConfig)


if __name__ == "__main__":
    main()
