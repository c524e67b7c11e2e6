"""Worker processes: started, fed, watched, and replaced when an item crashes one or hangs in it."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from m31.conformance.item import Item, Result
from m31.conformance.running.attempt import lost
from m31.conformance.running.journal import result_from
from m31.conformance.running.setup import Setup
from m31.errors import BackendLoadFailed

if TYPE_CHECKING:
    from m31.sdk.manifest import Manifest

START_SECONDS = 300.0  # importing a framework from a cold disk takes its time
_LOG_CHARACTERS = 1500
CRASHED, HUNG = "WorkerCrashed", "TimedOut"
LOST_IN_A_ROW = 20
"""Items that may crash or hang one after the other. Then it is the device, and each more costs a new process."""


class WorkerFailed(BackendLoadFailed):
    """No process with the backend lives; nothing more can be run. `exit_code` is that of its own error."""

    def __init__(self, what: str, *, where: str | None, exit_code: int = BackendLoadFailed.exit_code) -> None:
        super().__init__(what, where=where)
        self.exit_code = exit_code


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    since: float  # when it was started, or given its item
    ready: bool = False
    item: Item | None = None
    unread: bytes = b""

    @property
    def answers(self) -> IO[bytes]:
        assert self.process.stdout is not None, "it was made with a pipe"
        return self.process.stdout

    def ask(self, value: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None, "it was made with a pipe"
        with contextlib.suppress(BrokenPipeError):  # it is dead; the end of its answers says so
            self.process.stdin.write(json.dumps(value).encode() + b"\n")
            self.process.stdin.flush()

    def end(self) -> int:
        """Kill it; its exit status."""
        self.process.kill()
        status = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        return status

    def last_words(self) -> str:
        """The report of the fault handler, or else the end of what it printed."""
        self.log.seek(0)
        text = self.log.read().decode(errors="replace").strip()
        fault = text.rfind("Fatal Python error")
        return text[fault : fault + _LOG_CHARACTERS] if fault >= 0 else text[-_LOG_CHARACTERS:]


class Pool:
    """Runs items in processes of their own.

    Args:
        setup: what is run; `jobs` processes at most.
        manifest: of the backend.
        seeds: the seed of an item, for results of items that could not say it themselves.
        evidence: item -> file: where its evidence is, or is to be put; None without any.
        judging: only judge what is in `evidence`.
    """

    def __init__(
        self,
        setup: Setup,
        manifest: Manifest,
        *,
        seeds: Callable[[str], int],
        evidence: Callable[[Item], Path] | None = None,
        judging: bool = False,
    ) -> None:
        self._setup, self._seeds, self._evidence = setup, seeds, evidence
        self._first = {
            "setup": setup.to_dict(),
            "manifest": manifest.model_dump_json(),
            "record": None if evidence is None else "",
            "judging": judging,
        }
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._started = self._lost = 0

    def run(self, items: list[Item], done: Callable[[Result], bool]) -> bool:
        """Run items; the long ones first if there are several processes.

        Args:
            items: what to run.
            done: told of each result as it comes; False stops the run.

        Returns: whether it ran to the end; what was running when it was stopped is told of as `interrupted`.

        Raises:
            WorkerFailed: no process with the backend could be started, or none lives through an item.
            KeyboardInterrupt: after telling of what was running.
        """
        waiting = deque(sorted(items, key=lambda item: -item.seconds) if self._setup.jobs > 1 else items)
        with tempfile.TemporaryDirectory(prefix="m31-conformance-") as scratch:
            try:
                return self._serve(waiting, done, Path(scratch))
            finally:
                running = [(w.item, time.monotonic() - w.since) for w in self._workers if w.item is not None]
                for worker in self._workers:
                    worker.end()
                    worker.log.close()
                self._workers.clear()
                self._selector.close()
                for item, seconds in running:
                    done(lost(item, "interrupted", "the run was stopped", seed=self._seeds(item.id), seconds=seconds))

    def _serve(self, waiting: deque[Item], done: Callable[[Result], bool], scratch: Path) -> bool:
        while waiting or any(worker.item for worker in self._workers):
            busy = sum(worker.item is not None for worker in self._workers)
            while len(self._workers) < min(self._setup.jobs, len(waiting) + busy):
                self._start(scratch)
            for worker in self._workers:
                if worker.ready and worker.item is None and waiting:
                    self._give(worker, waiting.popleft())
            heard = [r for key, _ in self._selector.select(self._patience()) for r in self._hear(key.data)]
            heard += [self._overtime(worker) for worker in self._workers.copy() if self._overdue(worker)]
            for result in heard:
                if not done(result):
                    return False
                self._lost = self._lost + 1 if result.error in (CRASHED, HUNG) else 0
                if self._lost == LOST_IN_A_ROW:
                    what = f"the last {LOST_IN_A_ROW} items all crashed or hung, the last one so: {result.message}"
                    raise WorkerFailed(what, where=self._setup.backend)
        return True

    def _start(self, scratch: Path) -> None:
        self._started += 1
        own = scratch / str(self._started)
        own.mkdir()
        log = (scratch / f"{self._started}.log").open("w+b")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        if self._setup.jobs > 1:  # N processes with a thread per core each would wait for each other
            environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self._setup.jobs)))
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "m31.conformance.running.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
        )
        worker = _Worker(process, log, time.monotonic())
        worker.ask({**self._first, "scratch": str(own)})
        self._workers.append(worker)
        self._selector.register(worker.answers, selectors.EVENT_READ, worker)

    def _give(self, worker: _Worker, item: Item) -> None:
        worker.item, worker.since = item, time.monotonic()
        worker.ask({"id": item.id, "evidence": None if self._evidence is None else str(self._evidence(item))})

    def _deadline(self, worker: _Worker) -> float | None:
        if not worker.ready:
            return worker.since + START_SECONDS
        return None if worker.item is None else worker.since + self._setup.timeout

    def _patience(self) -> float | None:
        deadlines = [d for worker in self._workers if (d := self._deadline(worker)) is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _overdue(self, worker: _Worker) -> bool:
        deadline = self._deadline(worker)
        return deadline is not None and time.monotonic() >= deadline

    def _hear(self, worker: _Worker) -> list[Result]:
        """What a worker says; the end of it if it says nothing any more."""
        piece = os.read(worker.answers.fileno(), 1 << 16)
        if not piece:
            return [result] if (result := self._crashed(worker)) else []
        *lines, worker.unread = (worker.unread + piece).split(b"\n")
        results = []
        for line in lines:
            answer = json.loads(line)
            if "fatal" in answer:
                self._remove(worker)
                told = str(answer["fatal"])
                where = None if told.startswith(self._setup.backend) else self._setup.backend
                raise WorkerFailed(told, where=where, exit_code=answer["code"])
            worker.ready = True
            if "result" in answer:
                worker.item = None
                results.append(result_from(answer["result"]))
        return results

    def _crashed(self, worker: _Worker) -> Result | None:
        item, seconds, words = worker.item, time.monotonic() - worker.since, worker.last_words()
        status = self._remove(worker, kill=False)
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"
        if not worker.ready:
            said = f": {words}" if words else " and said nothing"
            raise WorkerFailed(f"the process that opens it {how}{said}", where=self._setup.backend)
        if item is None:
            return None
        text = f"the process that ran it {how}" + (f"; its last output was:\n{words}" if words else "")
        return lost(item, "failed", text, seed=self._seeds(item.id), seconds=seconds, error=CRASHED)

    def _overtime(self, worker: _Worker) -> Result:
        item, words = worker.item, worker.last_words()
        self._remove(worker)
        if item is None:
            raise WorkerFailed(
                f"opening it did not end within {START_SECONDS:.0f} s: {words}", where=self._setup.backend
            )
        text = f"it did not end within {self._setup.timeout:g} s and was stopped"
        seed = self._seeds(item.id)
        return lost(item, "failed", text, seed=seed, seconds=self._setup.timeout, error=HUNG)

    def _remove(self, worker: _Worker, *, kill: bool = True) -> int:
        self._selector.unregister(worker.answers)
        self._workers.remove(worker)
        if not kill:  # its answers have ended: it is ending by itself, and its own status tells more than ours
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(5)
        status = worker.end()
        worker.log.close()
        return status
