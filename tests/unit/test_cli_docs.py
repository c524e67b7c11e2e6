"""docs/cli.md against the grammar: it has a section for every command, and names every flag and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from m31.cli.arguments import COMMANDS, build

TEXT = (Path(__file__).resolve().parents[2] / "docs/cli.md").read_text()
TOP, PARSERS = build()
NAMED = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", TEXT))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_flag_is_documented(command: str) -> None:
    assert re.search(rf"^## m31 {command}\b", TEXT, re.MULTILINE)
    flags = [flag for flag in PARSERS[command].flags() if flag.startswith("--")]
    assert [flag for flag in flags if flag not in NAMED] == []


def test_no_flag_is_documented_that_does_not_exist() -> None:
    known = {flag for parser in (TOP, *PARSERS.values()) for flag in parser.flags()}
    assert {"--kv-dtype", "--input-scales"} <= known
    assert sorted(NAMED - known) == []
