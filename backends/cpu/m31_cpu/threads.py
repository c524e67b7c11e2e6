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
    """`count` workers, the caller among them.

    One caller at a time; another waits.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._lock = threading.Lock()
        self._owner = 0
        self._inboxes: list[SimpleQueue[Work | None]] = []
        self._results: SimpleQueue[int | BaseException] = SimpleQueue()

    def run(self, work: Work) -> int:
        """`work(part, parts)` for every part, side by side; the results or-ed.

        Raises:
            whatever a part raised, after all have ended.
        """
        if self.count == 1:
            return work(0, 1)
        if self._owner != os.getpid():  # a lock that a fork copied in the middle of a run would never open
            self._lock = threading.Lock()
        with self._lock:
            if self._owner != os.getpid():
                self._start()
            for inbox in self._inboxes:
                inbox.put(work)
            outcomes: list[int | BaseException] = [_outcome(work, 0, self.count)]
            outcomes += [self._results.get() for _ in self._inboxes]
        total = 0
        try:
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
                total |= outcome
        finally:
            outcomes.clear()  # an error that its own traceback holds would keep the pool until the next collection
            outcome = 0
        return total

    def _start(self) -> None:
        self._inboxes = [SimpleQueue() for _ in range(self.count - 1)]
        self._results = SimpleQueue()
        for part, inbox in enumerate(self._inboxes, 1):
            arguments = (inbox, self._results, part, self.count)
            threading.Thread(target=_serve, args=arguments, name=f"m31-cpu-{part}", daemon=True).start()
        self._owner = os.getpid()
        weakref.finalize(self, _dismiss, self._inboxes, self._owner)


def _serve(inbox: SimpleQueue[Work | None], results: SimpleQueue[int | BaseException], part: int, parts: int) -> None:
    while (work := inbox.get()) is not None:
        results.put(_outcome(work, part, parts))
        del work  # it holds the caller's buffers


def _outcome(work: Work, part: int, parts: int) -> int | BaseException:
    try:
        return work(part, parts)
    except BaseException as error:  # noqa: BLE001 - raised again by whoever asked
        return error


def _dismiss(inboxes: list[SimpleQueue[Work | None]], owner: int) -> None:
    if owner == os.getpid():
        for inbox in inboxes:
            inbox.put(None)
