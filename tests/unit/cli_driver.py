"""Runs the command line in a process of its own against a fake model: cli_driver.py '{"endless": true, ...}' ARGS...

`closed_file` in the options is written when the generation is closed, so that a test can see it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import cli_fakes

from m31.cli.main import main


def run() -> int:
    options = json.loads(sys.argv[1])
    closed_file = options.pop("closed_file", None)
    model = cli_fakes.FakeModel(**options)
    if closed_file:
        model.on_close = lambda: Path(closed_file).write_text("closed")
    cli_fakes.install(model)
    return main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(run())
