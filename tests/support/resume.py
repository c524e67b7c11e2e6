"""A stored training state of a small model, and the losses that followed it when it was stored.

    python -m tests.support.resume      # store another one: about two minutes

The model has what the nano has (sparse attention with selection, a dense layer and one with experts, every rounding) in
little, and learns from the nano's pipeline: token cache, sampler and recall documents, over a text that is made up and
bytes as tokens, so that no release of Python or of the tokenizer's library changes a batch.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tests.support import corpora, quantised, synthetic

from m31.training import bpe
from m31.training import config as training_config
from m31.training.cache import open_cache
from m31.training.data import Data
from m31.training.nano import of_corpus
from m31.training.recall import RecallWriter
from m31.training.sampler import Sampler, windows
from m31.training.state import LOG, STATE
from m31.training.trainer import Report, Trainer

STORED = Path(__file__).resolve().parents[1] / "data" / "resume"
FACTS = "followed.json"
NANO = Path(__file__).resolve().parents[2] / "core/m31/training/nano.toml"
AT, FOLLOWED = 20, 200  # the stored step, and how many steps behind it are known
SHARES = {256: 3, 512: 1}


def provide(folder: Path) -> Data:
    """The data of the stored state; `folder` is for the token cache."""
    text = corpora.invented({"train": [6000] * 12, "validation": [3000], "test": []})
    tokens = open_cache(folder, text, bpe.tokenizer_files([]))
    writer = RecallWriter(tokens.tokenizer, (document.text for document in text.split("train")), seed=1)
    train = Sampler(tokens, seed=1, tokens=1024, shares=SHARES, recall=0.2, recall_writer=writer)
    held_out = [(w.tokens[None], w.targets[None]) for w in windows(tokens, "validation", length=256, overlap=0)]
    return Data(train, held_out[:4], train.identity)


def mapping() -> dict[str, Any]:
    """The configuration: 2 layers, blocks of 32 under top-4."""
    whole = synthetic.mapping(
        run={"validate_every": 1000},
        optimiser={"warmup_steps": 10, "learning_rate": 5e-3},
        batch={"micro_tokens": 512},
        budget={"steps": AT + 2 * FOLLOWED},  # so that the end of the budget is never reached
    )
    sparse = {
        **whole["model"]["sparse_attention_config"],
        "sparse_attention_freq": [1, 1],
        "sparse_disable_index_value": [1, 1],
        "sparse_topk_blocks": 4,
        "sparse_block_size": 32,
    }
    whole["model"] |= {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 288,
        "max_position_embeddings": 512,
        "dense_intermediate_size": 64,
        "moe_layer_freq": [0, 1],
        "sparse_attention_config": sparse,
    }
    assert whole["model"]["num_local_experts"] == quantised.EXPERTS
    return whole


class Steps:
    """Stops a trainer after some steps."""

    def __init__(self, count: int) -> None:
        self.left, self.trainer = count, None

    def __call__(self, report: Report) -> None:
        self.left -= 1
        if not self.left:
            assert self.trainer is not None
            self.trainer.stop()


def advance(trainer: Trainer, steps: int) -> list[dict[str, Any]]:
    """Take some steps and store the state; what the log says of them."""
    before = trainer.files.read(trainer.progress.fingerprint)
    stop = Steps(steps)
    stop.trainer, trainer.report = trainer, stop
    assert not trainer.run().finished
    rows = [json.loads(line) for line in (trainer.files.path / LOG).read_text().splitlines()]
    first = before.step if before else 0
    return [row for row in rows if "loss" in row and row["step"] > first]


def small(folder: Path) -> Trainer:
    """A trainer of the small model in `folder`/run; with the stored state, if that was copied there."""
    config = training_config.parse(mapping(), where="resume")
    return Trainer(config, provide(folder / "cache"), folder / "run")


@cache
def nano_text() -> corpora.Corpus:
    """Enough for sequences of 4,096 bytes."""
    return corpora.invented({"train": [9000] * 12, "validation": [5000], "test": []})


def nano(folder: Path) -> Trainer:
    """A trainer of the nano as nano.toml has it, with one sequence of 4,096 tokens a step from the invented text."""
    config = training_config.load(NANO)
    options = {**config.data.options, "tokens": 4096}
    options.pop("cache")
    files = bpe.tokenizer_files([])
    tokens = open_cache(folder / "cache", nano_text(), files)
    return Trainer(config, of_corpus(nano_text(), files, tokens, **options), folder / "run")


def machine() -> dict[str, str]:
    """What bits depend on."""
    return {"torch": torch.__version__.partition("+")[0], "capability": torch.backends.cpu.get_cpu_capability()}


def kept(rows: list[dict[str, Any]]) -> list[list[float]]:
    """[loss, kl, norm] of each step."""
    return [[row["loss"], row["kl"], row["norm"]] for row in rows]


def main() -> None:
    """Make a state and what follows it."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        advance(small(folder), AT)
        shutil.rmtree(STORED, ignore_errors=True)
        STORED.mkdir(parents=True)
        for path in (folder / "run").iterdir():
            if path.name in (STATE, LOG) or path.name.startswith("state-"):
                shutil.copyfile(path, STORED / path.name)
        followed = kept(advance(small(folder), FOLLOWED))
        # The first steps of the nano itself, from nothing.
        first = kept(advance(nano(folder / "nano"), 3))
    content = json.dumps({**machine(), "followed": followed, "nano": first})
    (STORED / FACTS).write_text(content.replace("], [", "],\n [") + "\n")


if __name__ == "__main__":
    sys.exit(main())
