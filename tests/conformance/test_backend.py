"""`pytest tests/conformance --m31-backend NAME`: the conformance suite on a backend, one test per item.

The tests are added by the plugin `m31.conformance.plugin`; without its option there are none but this one.
"""

from __future__ import annotations

import pytest


def test_a_backend_is_named(request: pytest.FixtureRequest) -> None:
    assert request.config.getoption("m31_backend", None), "name a backend: pytest tests/conformance --m31-backend NAME"
