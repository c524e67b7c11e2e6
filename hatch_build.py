"""Hatchling's hook: nothing to distribute is built without the bundled checkpoint, whole and unchanged."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NanoHook(BuildHookInterface[Any]):
    """Checks core/m31/data/nano. An editable installation may lack it: then whoever needs it is told."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects files. Raises CheckpointError."""
        if version != "standard":
            return
        core = Path(self.root, "core")
        sys.path.insert(0, str(core))  # for m31.errors, which imports nothing
        try:
            path = core / "m31/checkpoint/bundled.py"  # alone: its package needs what is not there during a build
            spec = importlib.util.spec_from_file_location("m31_bundled", path)
            assert spec is not None
            assert spec.loader is not None
            bundled = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(bundled)
        finally:
            sys.path.remove(str(core))
        bundled.check(core.joinpath("m31", *bundled.PLACE))
