"""A plain text file as training data: windows of its tokens, in a new order each epoch, and its end as validation."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from m31 import config as model_config
from m31.checkpoint import bundled
from m31.config.jsonfile import read_bytes
from m31.errors import CorpusError, RequestError
from m31.text.tokenizer import Tokenizer
from m31.training.data import Batch, Data
from m31.training.draws import Purpose, permutation

LIMIT = 2**30  # bytes of the file


def provide(*, file: str, length: int, rows: int, seed: int, validation: float, checkpoint: str | None = None) -> Data:
    """The provider for fine-tuning on a text.

    Args:
        file: UTF-8 text; `~` is the user's home, other relative paths begin at the current folder.
        length: tokens of a sequence.
        rows: sequences of a batch.
        seed: of their order.
        validation: fraction of the text, from its end, that is not trained on.
        checkpoint: folder whose tokenizer.json and config.json make tokens of it, likewise; None is the bundled nano.

    Raises:
        CorpusError: the file cannot be read, is not UTF-8, or is too short.
        TokenizerError, ConfigError: the checkpoint's files.
        RequestError: an argument out of range.
    """
    _check({"length": length, "rows": rows}, validation)
    path = Path(file).expanduser()
    folder = bundled.folder() if checkpoint is None else Path(checkpoint).expanduser()
    data = read_bytes(path, limit=LIMIT, error=CorpusError)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise CorpusError(f"byte {exc.start + 1} is not valid UTF-8", where=str(path), expected="UTF-8 text") from exc
    described = model_config.load(folder).text
    tokenizer = Tokenizer.load(folder, vocab_size=described.vocab_size)
    ids = torch.tensor(tokenizer.encode(text, special=False), dtype=torch.int64)
    identity = hashlib.blake2b(ids.numpy().tobytes(), digest_size=16).hexdigest()
    windows = _windows(ids, length)
    held = max(1, round(len(windows) * validation))
    if len(windows) - held < rows:
        raise CorpusError(
            f"gives {len(windows)} windows of {length} tokens",
            where=str(path),
            expected=f"at least {rows + held}: one batch, and {held} for the validation",
            fix="shorten length, or give a longer text",
        )
    train = Windows(windows[:-held], rows, seed)
    return Data(
        train, [_batch(window[None]) for window in windows[-held:]], f"{identity}/{length}/{rows}/{seed}/{held}"
    )


def _check(counts: dict[str, object], fraction: object) -> None:
    """Options come from a file, whatever their annotations say."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RequestError(f"{name} is {value!r}", where=name, expected="a whole number from 1 on")
    if not isinstance(fraction, float) or not 0 < fraction < 1:
        raise RequestError(f"validation is {fraction!r}", where="validation", expected="a fraction between 0 and 1")


class Windows:
    """Batches of windows; every window once per epoch.

    Args:
        windows: [W, T + 1].
        rows: of a batch, at most W.
        seed: of the orders.
    """

    def __init__(self, windows: torch.Tensor, rows: int, seed: int) -> None:
        self.windows, self.rows, self.seed = windows, rows, seed

    def batch(self, step: int) -> Batch:
        """See `m31.training.data.Source`. A batch may span two epochs."""
        numbers = range(step * self.rows, (step + 1) * self.rows)
        orders = {
            epoch: permutation(self.seed, Purpose.WINDOWS, epoch, len(self.windows))
            for epoch in {number // len(self.windows) for number in numbers}
        }
        chosen = [int(orders[n // len(self.windows)][n % len(self.windows)]) for n in numbers]
        return _batch(self.windows[chosen])


def _windows(ids: torch.Tensor, length: int) -> torch.Tensor:
    """[W, length + 1], each beginning where the one before has its last target; what is left at the end is dropped."""
    count = max(0, (len(ids) - 1) // length)
    return (
        torch.stack([ids[i * length : (i + 1) * length + 1] for i in range(count)])
        if count
        else ids.new_empty(0, length + 1)
    )


def _batch(windows: torch.Tensor) -> Batch:
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
