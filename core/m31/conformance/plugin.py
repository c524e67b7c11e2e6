"""The suite as a plugin of pytest: `pytest --m31-backend NAME` adds one test per item, wherever it is run.

Without that option it does nothing, and nothing beyond pytest is imported. Items run in this process, so that a
debugger sees them; a crash ends the session, which `m31 conform run` survives.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from m31.conformance.bench import Bench
    from m31.conformance.item import Item

_STATE: pytest.StashKey[_State] = pytest.StashKey()


class ItemFailed(Exception):
    """An item of the suite failed; the text is all there is to see, since the frames are the suite's own."""


class _State:
    """The backend, opened when the first item runs, and the claims that were exercised."""

    def __init__(self, config: pytest.Config, scratch: Any) -> None:
        from m31.conformance.running.setup import Setup

        option = config.getoption
        self.setup = Setup(
            backend=option("m31_backend"),
            device=option("m31_device"),
            level=option("m31_level"),
            expression=option("m31_k"),
        )
        self.scratch = scratch
        self.exercised: set[str] = set()
        self.left: set[str] = set()
        self._bench: Bench | None = None

    def bench(self) -> Bench:
        """The bench, opened once."""
        if self._bench is None:
            from m31.conformance.bench import Bench
            from m31.conformance.running.setup import backend_of

            scratch = self.scratch.mktemp("m31-conformance")
            self._bench = Bench(backend_of(self.setup.backend), device=self.setup.device, scratch=scratch)
        return self._bench


def pytest_addoption(parser: pytest.Parser) -> None:
    """The plugin's options."""
    group = parser.getgroup("m31", "m31 conformance suite")
    group.addoption("--m31-backend", metavar="NAME", help="add the items of the m31 conformance suite for a backend")
    group.addoption("--m31-level", metavar="LEVEL", default="L3", help="highest level of --m31-backend (default: L3)")
    group.addoption("--m31-k", metavar="EXPR", help="only items whose id matches")
    group.addoption("--m31-device", metavar="DEVICE", help="device of the backend")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the suite's items, before `-k` and others select among all."""
    if config.getoption("m31_backend") is None:
        return
    from m31.conformance.running import runner
    from m31.errors import M31Error

    factory = config._tmp_path_factory  # type: ignore[attr-defined]  # what the fixture of that name gives
    state = config.stash[_STATE] = _State(config, factory)
    try:
        planned = runner.plan(state.setup)
    except M31Error as error:
        raise pytest.UsageError(str(error)) from error
    state.left = {item.id for item in planned.chosen}
    items.extend(SuiteItem.from_parent(session, name=item.id, item=item) for item in planned.chosen)
    items.append(ClaimsItem.from_parent(session, name="claims", planned=planned))


class SuiteItem(pytest.Item):
    """A test that is an item of the suite."""

    def __init__(self, *, item: Item, **given: Any) -> None:
        super().__init__(**given)
        self.item = item
        self.add_marker(pytest.mark.m31_conformance)

    def runtest(self) -> None:
        """Execute and judge; skip where there is nothing to judge."""
        from m31.conformance.claims import exercised_by
        from m31.conformance.running.attempt import attempt

        state = self.config.stash[_STATE]
        result = attempt(self.item, state.bench())
        state.left.discard(self.item.id)
        if result.verdict.margin is not None:
            self.user_properties.append(("margin", result.verdict.margin))
        if result.outcome == "failed":
            again = f"m31 conform run --backend {state.setup.backend} --level {self.item.level} -k {self.item.id}"
            raise ItemFailed(f"{result.message}\nagain: {again}")
        if result.outcome != "passed":
            pytest.skip(f"{result.outcome}: {result.message}")
        state.exercised |= exercised_by(result.claims)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """What the suite said, without its frames."""
        return str(excinfo.value) if isinstance(excinfo.value, ItemFailed) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, int | None, str]:
        """Where the test is: in the suite."""
        return "m31.conformance", None, self.item.id


class ClaimsItem(pytest.Item):
    """The last test: every claim of the manifest was exercised by an item that passed."""

    def __init__(self, *, planned: Any, **given: Any) -> None:
        super().__init__(**given)
        self.planned = planned
        self.add_marker(pytest.mark.m31_conformance)

    def runtest(self) -> None:
        """Compare; skip where only a selection ran."""
        from m31.conformance.catalog import upto
        from m31.conformance.claims import first_levels

        state = self.config.stash[_STATE]
        if state.left or state.setup.expression is not None:
            pytest.skip("only a selection of the items ran here")
        levels = upto(state.setup.level)
        first = first_levels(self.planned.manifest, self.planned.everything)
        omitted = _omitted(first.items(), state.exercised, levels)
        if omitted:
            raise ItemFailed(f"not conformant by omission, never exercised: {', '.join(omitted)}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """What is missing."""
        return str(excinfo.value) if isinstance(excinfo.value, ItemFailed) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, int | None, str]:
        """Where the test is: in the suite."""
        return "m31.conformance", None, "claims"


def _omitted(first: Iterable[tuple[str, Any]], exercised: set[str], levels: Iterable[str]) -> list[str]:
    known = set(levels)
    return [claim for claim, level in first if claim not in exercised and (level is None or level in known)]


def pytest_configure(config: pytest.Config) -> None:
    """The mark of the suite's items."""
    config.addinivalue_line("markers", "m31_conformance: an item of the m31 conformance suite")
