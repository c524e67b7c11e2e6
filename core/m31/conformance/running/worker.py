"""A process that runs items one by one, so that whatever one of them does to its process is done to no other.

It speaks JSON lines: a request on standard input, an answer on what was standard output. What a backend prints goes to
standard error, and that into a file. Started by `m31.conformance.running.pool` and by nobody else.
"""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from m31.conformance.catalog import collect, upto
from m31.conformance.item import Item, Result
from m31.conformance.running.attempt import attempt, judge
from m31.conformance.running.journal import result_dict
from m31.conformance.running.setup import Setup, backend_of
from m31.errors import BackendError, M31Error

if TYPE_CHECKING:
    from m31.conformance.bench import Bench
    from m31.sdk.manifest import Manifest


def main() -> int:
    """Serve until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the pool decides what it means
    faulthandler.enable(all_threads=False)  # of the thread that crashed, and not of the one that reads requests
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests = _requests()
    try:
        serve = _Server(requests.get(), answers)
    except M31Error as error:
        _answer(answers, {"fatal": str(error), "error": type(error).__name__, "code": error.exit_code})
        return 0
    _answer(answers, {"ready": True})
    while True:
        serve.one(requests.get())


def _requests() -> queue.Queue[dict[str, Any]]:
    """Requests as they come. When they end the pool is gone, and so is the process, even in the midst of an item."""
    found: queue.Queue[dict[str, Any]] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            found.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return found


def _answer(answers: TextIO, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value, allow_nan=False) + "\n")
    answers.flush()


class _Server:
    """Items by id, and a bench unless they are only judged."""

    def __init__(self, asked: dict[str, Any], answers: TextIO) -> None:
        from m31.sdk.manifest import Manifest

        self._answers = answers
        self._setup = Setup.from_dict(asked["setup"])
        self._record = None if asked["record"] is None else Path(asked["record"])
        self._judging = bool(asked["judging"])
        manifest = Manifest.model_validate_json(asked["manifest"])
        levels = upto(self._setup.level)
        folder = self._setup.folder
        items = collect(manifest, levels, checkpoint=folder, source=self._setup.source)
        self._items: dict[str, Item] = {item.id: item for item in items}
        if not self._judging:
            self._bench = self._open(manifest, Path(asked["scratch"]))

    def _open(self, manifest: Manifest, scratch: Path) -> Bench:
        from m31.conformance.bench import Bench

        bench = Bench(backend_of(self._setup.backend), device=self._setup.device, scratch=scratch)
        if bench.manifest != manifest:
            raise BackendError("its manifest changed since the run began", where=self._setup.backend)
        try:
            bench.serving()  # what cannot be opened at all on this machine is no failure of a thousand items
        except BackendError:
            raise
        except Exception as error:  # noqa: BLE001 - a fault of the backend: the items that open it will show it
            sys.stderr.write(f"opening raised {type(error).__name__}: {error}\n")
        return bench

    def one(self, request: dict[str, Any]) -> None:
        """Run or judge one item."""
        item = self._items[request["id"]]
        evidence = Path(request["evidence"]) if request.get("evidence") else None
        result: Result
        if self._judging:
            assert evidence is not None, "only recorded items are judged"
            result = judge(item, evidence, salt=self._setup.salt)
        else:
            result = attempt(item, self._bench, salt=self._setup.salt, record=evidence)
        _answer(self._answers, {"id": item.id, "result": result_dict(result)})


if __name__ == "__main__":
    sys.exit(main())
