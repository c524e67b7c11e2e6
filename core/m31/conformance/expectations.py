"""`expect.toml`: what a vendor knows to fail, why, where it is tracked and until when. Strict, so that it stays true.

    [[expect]]
    id = "L1/experts/*/nvfp4"       # a pattern over ids: *, ? and [...]
    kind = "xfail"                  # xfail, skip or waiver
    reason = "the K tail is dropped"
    link = "https://example.org/issues/1"
    expires = 2027-03-31

`xfail`: run it, it must fail. `skip`: do not run it. `waiver`: run it, its failure is accepted for the level. None of
the three exercises a claim.
"""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from m31.conformance.item import Result
from m31.errors import SuiteError, UnknownKey

Kind = Literal["xfail", "skip", "waiver"]
KEYS = ("id", "kind", "reason", "link", "expires")


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """An entry: see the module."""

    id: str
    kind: Kind
    reason: str
    link: str
    expires: datetime.date

    def matches(self, item_id: str) -> bool:
        """Whether it is about an item."""
        return fnmatchcase(item_id, self.id)


@dataclass(frozen=True)
class Expectations:
    """The entries of a file; `text` is the file itself, `where` its name in messages."""

    entries: tuple[Expectation, ...] = ()
    text: str = ""
    where: str = "expect.toml"

    def of(self, item_id: str) -> Expectation | None:
        """The entry about an item."""
        return next((entry for entry in self.entries if entry.matches(item_id)), None)

    def require(self, ids: Sequence[str], today: datetime.date) -> None:
        """Refuse entries that are stale before anything runs.

        Raises: SuiteError: an entry has expired, matches no item, or matches one that another entry matches.
        """
        faults = [*self.expired(today)]
        faults += [f"'{entry.id}' matches no item" for entry in self.entries if not any(entry.matches(i) for i in ids)]
        for item_id in ids:
            if len(about := [entry.id for entry in self.entries if entry.matches(item_id)]) > 1:
                faults.append(f"'{item_id}' is matched by '{about[0]}' and by '{about[1]}'")
                break
        if faults:
            raise SuiteError("; ".join(faults), where=self.where, fix="correct or remove these entries")

    def expired(self, today: datetime.date) -> list[str]:
        """What has expired, in words."""
        return [f"'{entry.id}' expired on {entry.expires}" for entry in self.entries if entry.expires < today]

    def broken_by(self, results: Iterable[Result]) -> list[str]:
        """Entries that the results contradict, in words: an xfail that did not fail, a waiver that was not needed."""
        found, of_waivers = [], dict[str, bool]()
        for result in results:
            entry = self.of(result.id)
            if entry is None or result.outcome in ("interrupted", "recorded"):
                continue
            failed = result.outcome == "failed"
            if entry.kind == "xfail" and not failed:
                found.append(f"'{result.id}' was expected to fail and is '{result.outcome}'")
            if entry.kind == "waiver":
                of_waivers[entry.id] = of_waivers.get(entry.id, False) or failed
        return found + [f"the waiver of '{pattern}' is not needed" for pattern, used in of_waivers.items() if not used]


def parse(text: str, *, where: str = "expect.toml") -> Expectations:
    """Parse the text of an `expect.toml`.

    Raises: SuiteError or UnknownKey: it is malformed; every key of an entry must be there, and no other.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SuiteError(f"not valid TOML: {error}", where=where) from error
    for key in data:
        if key != "expect":
            raise UnknownKey(key, where=where, nearest="expect")
    entries = data.get("expect", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise SuiteError("'expect' is no array of tables", where=where, expected="[[expect]]")
    return Expectations(tuple(_entry(e, f"{where}: entry {n}") for n, e in enumerate(entries, 1)), text, where)


def _entry(data: dict[str, Any], where: str) -> Expectation:
    for key in data:
        if key not in KEYS:
            raise UnknownKey(key, where=where, nearest=None)
    if missing := [key for key in KEYS if key not in data]:
        raise SuiteError(f"without {', '.join(missing)}", where=where, expected=", ".join(KEYS))
    for key in ("id", "kind", "reason", "link"):
        if not isinstance(data[key], str) or not data[key].strip():
            raise SuiteError(f"{key} = {data[key]!r}", where=where, expected="a text")
    if data["kind"] not in get_args(Kind):
        raise SuiteError(f"kind = '{data['kind']}'", where=where, expected=", ".join(get_args(Kind)))
    expires = data["expires"]
    if not isinstance(expires, datetime.date) or isinstance(expires, datetime.datetime):
        raise SuiteError(f"expires = {expires!r}", where=where, expected="a date such as 2027-03-31, without quotes")
    return Expectation(
        id=data["id"], kind=data["kind"], reason=data["reason"], link=data["link"], expires=data["expires"]
    )
