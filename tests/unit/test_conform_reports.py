"""Reports from results that nobody ran: their form, their safety, their size."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.support.fake_runs import result, run

from m31.conformance import comparing, provenance, report
from m31.conformance.item import Verdict
from m31.conformance.report import document, heat, page, schema
from m31.conformance.running.journal import Run

ROOT = Path(__file__).resolve().parents[2]
EVIL = "<script>alert('x')</script> & \" | ` \x00\x1b[31m"


def mixed() -> Run:
    """One of every outcome, with text that means harm."""
    outcomes = ("passed", "failed", "refused", "fallback", "unclaimed", "skipped", "interrupted")
    results = [result(f"L1/linear/{name}", outcome=name, message=EVIL, format="mxfp8") for name in outcomes]
    results.append(result("L0/rule/exact", verdict=Verdict(), attributes={"tokens": [1, 128], "gaps": True}))
    results.append(result("L1/rope/<b>/x", attributes={"how": EVIL}, kernel=EVIL, error=EVIL))
    results.append(result("L1/known/a", outcome="failed", message="known"))
    expect = '[[expect]]\nid = "L1/known/*"\nkind = "xfail"\nreason = "<i>r</i>"\nlink = "<u>"\nexpires = 2099-01-01\n'
    return run(results, header={"expect": expect, "claims": {"op:linear": "L1", "op:rope": "L1"}})


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return document.build(mixed())


def test_reports_are_written_and_made_again_the_same(tmp_path: Path) -> None:
    same = mixed()
    made = document.build(same)
    assert report.write(same, tmp_path) == made
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert files == report.render(made)
    assert set(files) == {"report.json", "report.md", "report.html", "junit.xml"}
    assert json.loads(files["report.json"]) == made
    assert report.render(json.loads(files["report.json"])) == files


def test_the_report_follows_its_published_schema(made: dict[str, Any]) -> None:
    published = json.loads((ROOT / "docs/conformance/report.schema.json").read_text())
    assert published == document.schema()
    assert list(schema.faults(made, published)) == []
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(published)
    jsonschema.Draft202012Validator(published).validate(made)


def test_our_own_check_knows_every_word_of_the_schema() -> None:
    def words(entry: Any, names: bool) -> set[str]:
        if not isinstance(entry, dict):
            return set()
        found = set() if names else set(entry)
        for key, value in entry.items():
            found |= words(value, names=not names and key in ("properties", "$defs"))
        return found

    assert words(document.schema(), names=False) <= schema.KNOWN


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("verdict"),
        lambda d: d.update(extra=1),
        lambda d: d.update(schema_version=2),
        lambda d: d["results"][0].update(outcome="fine"),
        lambda d: d["results"][0].update(seed="7"),
        lambda d: d["results"][0]["verdict"].update(margin=1.5),
        lambda d: d["verdict"].update(exit_code=4),
        lambda d: d["verdict"]["counts"].update(odd=1),
        lambda d: d["selection"].update(catalog="x"),
        lambda d: d.update(complete=1),
        lambda d: d["provenance"]["environment"].update(A=1),
    ],
)
def test_what_does_not_follow_the_schema_is_noticed(change: Any, made: dict[str, Any]) -> None:
    changed = json.loads(json.dumps(made))
    change(changed)
    assert list(schema.faults(changed, document.schema()))
    jsonschema = pytest.importorskip("jsonschema")
    assert not jsonschema.Draft202012Validator(document.schema()).is_valid(changed)


class Page(HTMLParser):
    """Which tags and attributes a page has."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_escapes_everything(made: dict[str, Any]) -> None:
    text = page.render(made)
    read = Page()
    read.feed(text)
    assert read.open == []
    assert not {"script", "link", "img", "iframe", "u"} & set(read.tags)
    assert not [name for name, _ in read.attributes if name.startswith("on") or name in ("src", "href")]
    assert not re.search(r"url\(|@import|https?:", text)
    assert "&lt;script&gt;alert(&#x27;x&#x27;)" in text


def test_what_is_no_measured_pass_has_a_sign_beside_its_colour(made: dict[str, Any]) -> None:
    style = (Path(heat.__file__).parent / "page.css").read_text()
    for result_ in made["results"]:
        kind = heat.class_of(result_)
        if not kind.startswith("m"):
            assert f"i.{kind}::before" in style
    classes = {r["outcome"]: heat.class_of(r) for r in made["results"] if r["subject"] == "linear"}
    assert len({classes[name] for name in ("passed", "failed", "refused", "fallback", "unclaimed")}) == 5
    assert [heat.class_of(r) for r in made["results"] if r["subject"] == "known"] == ["xf"]


@pytest.mark.parametrize(
    ("margin", "kind"),
    [(0, "m0"), (1e-3, "m0"), (1.1e-3, "m1"), (0.02, "m2"), (0.1, "m3"), (0.29, "m4"), (0.6, "m5"), (0.61, "m6")],
)
def test_colours_are_logarithmic(margin: float, kind: str) -> None:
    (made,) = document.build(run([result("L0/a/b", verdict=Verdict(margin=margin))]))["results"]
    assert heat.class_of(made) == kind


def test_a_page_of_three_thousand_items_stays_small() -> None:
    forms = ("float32", "bfloat16", "fp8", "nvfp4")
    results = [
        result(f"L1/op{n % 30}/some-longer-case-{n}/{forms[n % 4]}", format=forms[n % 4], attributes={"tokens": n % 9})
        for n in range(3000)
    ]
    text = page.render(document.build(run(results)))
    assert len(text.encode()) < 500_000
    assert text.count("<i class=m") > 3000


def test_each_row_of_a_map_has_as_many_cells_as_its_head(made: dict[str, Any]) -> None:
    for table in re.findall(r'<table class="(?:matrix|cases)">.*?</table>', page.render(made), re.DOTALL):
        head = table.partition("</thead>")[0].count('scope="col"')
        for row in table.partition("<tbody>")[2].split("</tr>")[:-1]:
            wide = sum(int(n) - 1 for n in re.findall(r'colspan="(\d+)"', row))
            assert row.count("<td") + row.count("<th") + wide == head


def test_junit_counts_and_escapes(made: dict[str, Any]) -> None:
    root = ET.fromstring(report.render(made)["junit.xml"])
    assert root.tag == "testsuites"
    assert {name: root.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "10",
        "failures": "1",
        "errors": "1",
        "skipped": "5",
    }
    (failure,) = root.iter("failure")
    assert failure.text is not None
    assert "<script>" in failure.text
    assert "\x00" not in failure.text
    assert [suite.get("name") for suite in root] == ["reference L1", "reference L0"]


def test_markdown_keeps_its_tables(made: dict[str, Any]) -> None:
    text = report.render(made)["report.md"].decode()
    assert "**not conformant: 1 item failed" in text
    assert "<script>" not in text
    for line in text.splitlines():
        if line.startswith("| L1"):
            assert line.replace("\\|", "").count("|") == 9


def test_the_command_repeats_one_item(made: dict[str, Any]) -> None:
    commands = {r["id"]: r["command"] for r in made["results"]}
    assert commands["L0/rule/exact"] == "m31 conform run --backend reference --level L0 -k L0/rule/exact"
    assert commands["L1/rope/<b>/x"].endswith("-k 'L1/rope/<b>/x'")


def test_coverage_counts_values(made: dict[str, Any]) -> None:
    assert made["coverage"]["rule"]["tokens"] == {"1": {"passed": 1, "items": 1}, "128": {"passed": 1, "items": 1}}
    assert made["coverage"]["linear"]["format"] == {"mxfp8": {"passed": 1, "items": 7}}
    assert list(made["coverage"]["rule"]) == ["gaps", "tokens"]


def test_two_reports_are_compared() -> None:
    before = [result("L0/a/x"), result("L0/a/y", outcome="failed"), result("L0/a/z"), result("L0/gone/x")]
    after = [result("L0/a/x", outcome="failed"), result("L0/a/y"), result("L0/new/x", outcome="refused")]
    after.append(result("L0/a/z", verdict=Verdict(margin=0.9)))
    a, b = document.build(run(before)), document.build(run(after, header={"claims": {"op:z": "L0"}}))
    b["provenance"]["software"]["m31"] = "9.9"
    found = comparing.compare(a, b)
    assert (found.broken, found.fixed) == (("L0/a/x",), ("L0/a/y",))
    assert found.margins == (("L0/a/z", 0.5, 0.9),)
    assert (found.appeared, found.disappeared, found.claims) == (("L0/new/x",), ("L0/gone/x",), ("+op:z",))
    assert found.provenance == (("software.m31", f'"{a["provenance"]["software"]["m31"]}"', '"9.9"'),)
    text = comparing.render(found)
    assert "passed in A, not in B (1):\n  L0/a/x" in text
    assert comparing.render(comparing.compare(a, a)).endswith("no difference")


def test_small_changes_of_margins_are_no_news() -> None:
    def one(margin: float) -> dict[str, Any]:
        return document.build(run([result("L0/a/x", verdict=Verdict(margin=margin))]))

    assert comparing.compare(one(0.5), one(0.6)).margins == ()
    assert comparing.compare(one(1e-9), one(1e-3)).margins == ()
    assert comparing.compare(one(1e-9), one(0.02)).margins == (("L0/a/x", 1e-9, 0.02),)


def test_a_package_that_nobody_tracks_is_not_traceable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable backend outside of any repository: its sources may be anything by the time somebody verifies."""
    package = tmp_path / "m31_loose"
    package.mkdir()
    assert provenance.checkout(package) == {"commit": "untracked", "dirty": True}
    monkeypatch.setattr(provenance.site, "getsitepackages", lambda: [str(tmp_path)])
    assert provenance.checkout(package) is None  # installed: its version says what it is
