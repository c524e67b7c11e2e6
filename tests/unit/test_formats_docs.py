"""The examples of docs/formats.md are real output."""

from __future__ import annotations

import doctest
from pathlib import Path

import torch

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/formats.md"


def test_examples() -> None:
    before = torch.get_rng_state()
    ran = doctest.testfile(str(DOCUMENT), module_relative=False, optionflags=doctest.REPORT_NDIFF)
    assert ran.failed == 0
    assert ran.attempted > 20
    assert torch.equal(torch.get_rng_state(), before)
