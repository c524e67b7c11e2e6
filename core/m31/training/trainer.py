"""The training loop: AdamW on float32 masters, gradients of the served model, states that continue exactly."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from m31.checkpoint.workfolder import locked
from m31.errors import TrainingDiverged, TrainingStateError
from m31.training.config import RunConfig
from m31.training.data import Data
from m31.training.pieces import Pieces
from m31.training.state import Progress, StateFolder, append

CHECKPOINT = RunConfig.PRODUCT  # what a run of a model leaves


@dataclass(frozen=True)
class Report:
    """After each step: losses in nats per token, of the training batch and of the last validation."""

    step: int
    total: int | None
    loss: float
    validation: float | None
    tokens_per_second: float
    seconds_left: float | None


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `finished` with what it made in `folder`, or interrupted with a state that continues."""

    finished: bool
    step: int
    total: int | None
    best_loss: float | None
    folder: Path


class Trainer:
    """One run.

    Args:
        config: what to do; it makes the task.
        data: what to learn.
        folder: of the run; created if absent. A state of the same configuration in it is continued.
        report: called after every step.
    Raises:
        TrainingStateError: the folder holds a run of another configuration, or a damaged one.
    """

    def __init__(
        self, config: RunConfig, data: Data, folder: Path, report: Callable[[Report], None] | None = None
    ) -> None:
        self.config, self.data, self.report = config, data, report
        self.task = config.task(data)
        self.parameters = self.task.parameters
        self.files = StateFolder(folder)
        self._stopped = threading.Event()
        self.progress = Progress(fingerprint=config.fingerprint(self.task.identity), total=config.budget.steps)
        self._optimiser = self._adamw()

    def stop(self) -> None:
        """Ask the run to end; it stores its state after at most one piece of a batch."""
        self._stopped.set()

    def run(self) -> Outcome:
        """Train until the budget is used or `stop` is called (SIGTERM and SIGINT call it), then store the state.

        Raises:
            TrainingDiverged: a loss or a gradient is not finite; the last state stays.
            TrainingStateError: the folder cannot be made, or holds a product that this run has not written.
            DestinationBusy: another process trains in this folder.
        """
        path = self.files.path
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise TrainingStateError(
                f"cannot be made ({exc.strerror})", where=str(path), fix="give another [run] folder"
            ) from exc
        with locked(path), _on_signals(self.stop):
            self._restore()
            if not self._done and (path / self.config.PRODUCT).exists():
                raise TrainingStateError(
                    "is there, and this run has not written it",
                    where=str(path / self.config.PRODUCT),
                    expected="nothing there until the run is finished",
                    fix="move it away, or give another [run] folder",
                )
            log = self.files.open_log(self.progress)
            try:
                with self._pieces() as pieces:
                    self._loop(log, pieces)
            finally:
                os.close(log)
            done = self._done
            if done and not (path / self.config.PRODUCT).exists():
                self.parameters.load(self.files.best(self.progress))
                self.task.export(path / self.config.PRODUCT)
        best = self.progress.best_loss
        return Outcome(
            done, self.progress.step, self.progress.total, best, path / self.config.PRODUCT if done else path
        )

    # -- the loop --------------------------------------------------------------------------------------------------

    def _pieces(self) -> Pieces:
        return Pieces(
            self.task,
            threads=self.config.run.threads,
            micro_tokens=self.config.batch.micro_tokens,
            stopped=self._stopped,
        )

    def _loop(self, log: int, pieces: Pieces) -> None:
        saved = began = time.monotonic()
        spent, validation = self.progress.seconds, self.progress.best_loss
        while not self._stopped.is_set():
            if self._due():
                validation = self._validate(log, pieces)
            if self._done or self._stopped.is_set():
                break
            start = time.monotonic()
            row = self._step(pieces)
            if row is None:
                break  # stopped within the batch: nothing has changed
            now = time.monotonic()
            self.progress.seconds = spent + now - began
            self._plan()
            row["tokens_per_second"] = round(row.pop("tokens") / (now - start), 1)
            self.progress.log_bytes += append(log, row)
            if now - saved >= 60 * self.config.run.save_minutes:
                self._save()
                saved = time.monotonic()
            if self.report is not None:
                self.report(self._report(row, validation))
        if not self._saved:
            self._save()

    @property
    def _done(self) -> bool:
        return self.progress.step == self.progress.total == self.progress.validated

    def _due(self) -> bool:
        """Whether this step's validation is missing; it may be, where a run was interrupted during it."""
        progress = self.progress
        wanted = progress.step == progress.total or progress.step % self.config.run.validate_every == 0
        return wanted and progress.step != progress.validated

    def _step(self, pieces: Pieces) -> dict[str, Any] | None:
        """One optimiser step; what to log, or None if it was given up."""
        step = self.progress.step
        batch = self.data.train.batch(step)
        self.parameters.refresh()
        found = pieces.gradient(step, batch)
        if found is None:
            return None
        loss = found.mean
        norm = self._clip(loss, found.grads)
        rate = self._rate(step)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self._optimiser.step()
        warming = step < self.config.optimiser.warmup_steps
        with torch.no_grad():
            self.task.after_step(found, 1.0 if warming else rate / self.config.optimiser.learning_rate)
        self.progress.step += 1
        self._saved = False
        tokens = batch[0].numel()
        figures = self.task.shown(found, tokens)
        return {"step": self.progress.step, "loss": loss, "lr": rate, "norm": norm, "tokens": tokens} | figures

    def _clip(self, loss: float, grads: dict[str, Tensor]) -> float:
        """Gradients of the leaves become those of the masters, at most `clip_norm` long; their norm before that."""
        for name, master in self.parameters.masters.items():
            master.grad = grads.get(name)
        norm = float(torch.stack([grad.norm() for grad in grads.values()]).norm())
        if not math.isfinite(norm) or not math.isfinite(loss):
            raise TrainingDiverged(
                f"loss {loss:g}, gradient norm {norm:g}",
                where=f"step {self.progress.step}",
                expected="finite numbers",
                fix="lower learning_rate or clip_norm; the last state is untouched",
            )
        if norm > self.config.optimiser.clip_norm:
            torch._foreach_mul_(list(grads.values()), self.config.optimiser.clip_norm / norm)
        return norm

    def _rate(self, step: int) -> float:
        o = self.config.optimiser
        if step < o.warmup_steps:
            return o.learning_rate * (step + 1) / o.warmup_steps
        total = self.progress.total
        assert total is not None, "planned at the end of the warmup"
        along = (step - o.warmup_steps) / max(1, total - o.warmup_steps)
        return o.learning_rate * (o.final_fraction + (1 - o.final_fraction) * (1 + math.cos(math.pi * along)) / 2)

    def _plan(self) -> None:
        """With a budget in minutes: fix the number of steps once the warmup has shown how long one takes."""
        progress, minutes = self.progress, self.config.budget.minutes
        if (
            progress.total is None
            and minutes is not None
            and progress.step >= max(1, self.config.optimiser.warmup_steps)
        ):
            left = (60 * minutes - progress.seconds) / (progress.seconds / progress.step)
            progress.total = progress.step + max(1, int(left))

    def _validate(self, log: int, pieces: Pieces) -> float | None:
        """Mean loss of the validation batches, after which the masters are kept if there was none lower; None if it was
        stopped: the run then continues with this validation."""
        self.parameters.refresh()
        found, progress = pieces.measure(self.data.validation), self.progress
        if found is None:
            return None
        loss = found.mean
        if not math.isfinite(loss):  # it would be the best one for ever: no number is less than NaN
            raise TrainingDiverged(
                f"validation loss {loss:g}",
                where=f"step {progress.step}",
                expected="a finite number",
                fix="lower learning_rate or clip_norm; the last state is untouched",
            )
        progress.validated = progress.step
        self._saved = False
        best = progress.best_loss is None or loss < progress.best_loss
        figures = self.task.shown(found, sum(tokens.numel() for tokens, _ in self.data.validation))
        progress.log_bytes += append(log, {"step": progress.step, "validation": loss, "best": best} | figures)
        if best:
            progress.best = self.files.write_best(progress.step, dict(self.parameters.named()))
            progress.best_loss, progress.best_step = loss, progress.step
            self._save()  # which drops the best one before
        return loss

    def _report(self, row: dict[str, Any], validation: float | None) -> Report:
        progress = self.progress
        left = None if progress.total is None else (progress.total - progress.step) * progress.seconds / progress.step
        return Report(progress.step, progress.total, row["loss"], validation, row["tokens_per_second"], left)

    # -- the state -------------------------------------------------------------------------------------------------

    def _adamw(self) -> torch.optim.AdamW:
        o, masters = self.config.optimiser, self.parameters.masters
        learned = [name for name in masters if self.parameters.learned(name)]
        groups = [
            {
                "params": [masters[name] for name in learned if self.parameters.decayed(name) == decayed],
                "weight_decay": o.weight_decay if decayed else 0.0,
            }
            for decayed in (True, False)
        ]
        return torch.optim.AdamW(groups, lr=o.learning_rate, betas=(o.beta1, o.beta2), eps=o.epsilon)

    def _moments(self, kind: str) -> dict[str, Tensor]:
        """`exp_avg` or `exp_avg_sq` by the names of `masters`, zero where there is none yet."""
        masters, state = self.parameters.masters, self._optimiser.state
        return {name: state[m][kind] if m in state else torch.zeros_like(m) for name, m in masters.items()}

    def _save(self) -> None:
        names = self.parameters.units
        tensors = {f"weight/{name}": master for name, master in self.parameters.named()}
        for kind in ("exp_avg", "exp_avg_sq"):
            moments = self._moments(kind)
            tensors |= {f"{kind}/{n}": self.parameters.view(n, moments) for n in names if self.parameters.learned(n)}
        self.files.write(self.progress, tensors)
        self._saved = True

    def _restore(self) -> None:
        found = self.files.read(self.progress.fingerprint)
        self._saved = found is not None
        if found is None:
            self.parameters.initialise(self.config.seed)
            return
        self.progress = found
        tensors = self.files.tensors(found)
        self.parameters.load({n: tensors[f"weight/{n}"] for n in self.parameters.units})
        if not found.step:
            return
        moments = {kind: self._moments(kind) for kind in ("exp_avg", "exp_avg_sq")}
        for kind, held in moments.items():
            for name in self.parameters.units:
                if self.parameters.learned(name):
                    self.parameters.view(name, held).copy_(tensors[f"{kind}/{name}"])
        for name, master in self.parameters.masters.items():
            if self.parameters.learned(name):
                values = {kind: held[name] for kind, held in moments.items()}
                self._optimiser.state[master] = {"step": torch.tensor(float(found.step)), **values}


@contextmanager
def _on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """SIGTERM, and the first SIGINT, ask the run to stop. Outside the main thread signals belong to the program."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handler(number: int, frame: FrameType | None) -> None:
        stop()
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
