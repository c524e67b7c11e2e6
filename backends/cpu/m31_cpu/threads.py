"""A few threads of this backend's own, and how many there should be.

Kernels release the GIL, so plain Python threads run them side by side. The threads are made when they are first needed
in a process: a fork inherits none of them, and a forked child makes its own.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from queue import SimpleQueue

from m31.errors import ConfigError
from m31.sdk import this_machine

Work = Callable[[int, int], int]
VARIABLE = "M31_NUM_THREADS"
MOST = 1024


def thread_count(environ: Mapping[str, str] | None = None) -> int:
    """`M31_NUM_THREADS`, or as many as the scheduler and the control group let this process use.

    Raises:
        ConfigError: the variable is not a number from 1 to 1024.
    """
    text = (os.environ if environ is None else environ).get(VARIABLE)
    if text is None:
        return this_machine().cpu.cores
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= MOST:
        raise ConfigError(
            f"{VARIABLE} is {text!r}",
            where="environment",
            expected=f"a number from 1 to {MOST}",
            fix=f"unset {VARIABLE} to use what the machine grants",
        )
    return int(text)


class Pool:
    """`count` workers, the caller among them. One caller at a time; another waits."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._crews: dict[int, _Crew] = {}  # by process

    def run(self, work: Work) -> int:
        """`work(part, parts)` for every part, side by side; the results or-ed.

        Raises:
            whatever a part raised, or what interrupted the caller. No part runs any more when this returns or raises.
        """
        if self.count == 1:
            return work(0, 1)
        process = os.getpid()
        crew = self._crews.get(process) or self._crews.setdefault(process, _Crew())
        with crew.lock:
            if not crew.inboxes:
                crew.start(self.count)
                weakref.finalize(self, crew.dismiss, process)
            job = _Job(work, self.count)
            try:
                for inbox in crew.inboxes:
                    inbox.put(job)
                total = work(0, self.count)
                job.wait()
            except BaseException:
                job.abandon()
                raise
        failed = next((outcome for outcome in job.outcomes if isinstance(outcome, BaseException)), None)
        if failed is not None:
            job.outcomes.clear()
            try:
                raise failed
            finally:
                del failed  # its traceback holds this frame: together they would live until a collection
        for outcome in job.outcomes:
            assert isinstance(outcome, int)
            total |= outcome
        return total


class _Job:
    """One piece of work for all workers. Everything but `outcomes` is guarded by the lock."""

    def __init__(self, work: Work, parts: int) -> None:
        self.work, self.parts = work, parts
        self.outcomes: list[int | BaseException] = []
        self._lock = threading.Lock()
        self._news: SimpleQueue[None] = SimpleQueue()
        self._open, self._running = True, 0

    def take(self, part: int) -> None:
        """Do a part, unless the job was abandoned."""
        with self._lock:
            if not self._open:
                return
            self._running += 1
        try:
            outcome: int | BaseException = self.work(part, self.parts)
        except BaseException as error:  # noqa: BLE001 - raised again by whoever asked
            outcome = error
        with self._lock:
            self._running -= 1
            self.outcomes.append(outcome)
        del outcome
        self._news.put(None)

    def wait(self) -> None:
        """Until all workers have ended their parts."""
        while len(self.outcomes) < self.parts - 1:
            self._news.get()

    def abandon(self) -> None:
        """Let no further part begin, and wait for those that run: they write into the caller's buffers.

        Further interrupts do not shorten that; a part takes milliseconds.
        """
        while True:
            try:
                with self._lock:
                    self._open = False
                while self._running:
                    self._news.get()
            except BaseException:  # noqa: BLE001 - the first one is on its way already
                continue
            return


class _Crew:
    """The threads of one process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inboxes: list[SimpleQueue[_Job | None]] = []

    def start(self, count: int) -> None:
        """Make the workers."""
        inboxes: list[SimpleQueue[_Job | None]] = [SimpleQueue() for _ in range(count - 1)]
        for part, inbox in enumerate(inboxes, 1):
            threading.Thread(target=_serve, args=(inbox, part), name=f"m31-cpu-{part}", daemon=True).start()
        self.inboxes = inboxes

    def dismiss(self, process: int) -> None:
        """Let the workers end, if they are this process's."""
        if process == os.getpid():
            for inbox in self.inboxes:
                inbox.put(None)


def _serve(inbox: SimpleQueue[_Job | None], part: int) -> None:
    while (job := inbox.get()) is not None:
        job.take(part)
        del job  # it holds the caller's buffers
