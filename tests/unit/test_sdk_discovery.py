"""Listing with real distributions on disk: nothing a plugin does wrong may hide another, and no plugin code runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from sdk_fakes import GOOD_BACKEND, home_dist, machine_with, manifest_text, plugin, write_dist, write_package

from m31.errors import BackendError, DuplicateBackend, ManifestError
from m31.sdk.discovery import Candidate, Policy, discover, manifest_path
from m31.sdk.selection import select

EVERYTHING = Policy(plugins=True, allow=None)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site folder at the front of sys.path with m31's own metadata, as if m31 were installed."""
    folder = tmp_path / "site"
    folder.mkdir()
    home_dist(folder)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def listed(policy: Policy = EVERYTHING) -> dict[str, Candidate]:
    found = discover(policy)
    assert list(found) == sorted(found, key=lambda c: (c.name, c.distribution or "", c.entry))
    return {c.name: c for c in found}


def test_m31s_own_backends_are_listed_with_their_manifests(site: Path) -> None:
    found = listed()
    own = [c for c in found.values() if c.builtin]
    assert {c.name for c in own} >= {"reference", "hopper", "blackwell", "rubin", "mi355x"}
    for c in own:
        assert (c.distribution, c.version) == ("m31", "0.1.0")
        assert c.failure is None, c.failure
        assert c.manifest is not None
        assert c.manifest.name == c.name


def test_bug_93_listing_imports_no_plugin(site: Path) -> None:
    """BUG-93: listing must not load; also not for a dotted entry point, whose lookup could import its parents."""
    body = f"open({str(site / 'imported')!r}, 'w').close()\n" + GOOD_BACKEND
    package = write_package(site, "dotted_package", body, manifest_text("dotted"))
    (package / "sub.py").write_text("raise RuntimeError('imported')\n")
    write_dist(site, "dotted-dist", [("dotted", "dotted_package.sub:Plugin")])
    c = listed()["dotted"]
    assert (c.failure, c.distribution, c.version, c.builtin) == (None, "dotted-dist", "1.0", False)
    assert not (site / "imported").exists()
    assert "dotted_package" not in sys.modules


def test_bug_94_an_edit_in_place_is_seen_at_once(site: Path) -> None:
    """BUG-94: a cache that rounds the file's time to 128 seconds served the old list after an edit in place."""
    write_package(site, "edited_package", GOOD_BACKEND, manifest_text("after"))
    entries = write_dist(site, "edited-dist", [("before", "edited_package:Plugin")])
    stamp = entries.stat().st_mtime
    assert "before" in listed()
    entries.write_text("[m31.backends]\nafter = edited_package:Plugin\n")
    os.utime(entries, (stamp, stamp))  # not even the time differs
    found = listed()
    assert "before" not in found
    assert found["after"].failure is None


def test_bug_95_two_distributions_of_one_name_are_found_though_not_adjacent(site: Path) -> None:
    """BUG-95: grouping an unsorted list missed duplicates with a third name in between; the last one won silently."""
    write_package(site, "dup_package", GOOD_BACKEND, manifest_text("cuda-like"))
    for dist, name in (("aaa-dist", "cuda_like"), ("bbb-dist", "zzz"), ("ccc-dist", "Cuda.Like")):
        write_dist(site, dist, [(name, "dup_package:Plugin")])
    found = discover(EVERYTHING)
    assert [c.distribution for c in found if c.name == "cuda-like"] == ["aaa-dist", "ccc-dist"]
    for choice in (None, "cuda-like"):
        with pytest.raises(DuplicateBackend, match=r"by aaa-dist 1\.0 and by ccc-dist 1\.0"):
            select(machine_with(), found, choice).require()


def test_one_distribution_may_not_register_a_name_twice(site: Path) -> None:
    write_package(site, "dup_package", GOOD_BACKEND, manifest_text("twin"))
    write_dist(site, "twin-dist", [("twin", "dup_package:Plugin"), ("Twin", "dup_package:Other")])
    assert len([c for c in discover(EVERYTHING) if c.name == "twin"]) == 2


def test_an_earlier_installation_shadows_a_later_one(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin(site, "shadow", dist="shadow-dist")
    older = tmp_path / "older"
    write_dist(
        older, "shadow-dist", [("shadow", "shadow_package:Plugin"), ("gone", "shadow_package:Gone")], version="0.9"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(older)])
    found = discover(EVERYTHING)
    assert [c.version for c in found if c.name == "shadow"] == ["1.0"]
    assert "gone" not in {c.name for c in found}


def test_an_upgrade_that_dropped_the_entry_point_shadows_the_old_one(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dist(site, "dropped-dist", [], version="2.0").write_text("[console_scripts]\nx = y:z\n")
    older = tmp_path / "older"
    write_dist(older, "dropped-dist", [("dropped", "dropped_package:Plugin")])
    monkeypatch.setattr(sys, "path", [*sys.path, str(older)])
    assert "dropped" not in listed()


def faulty(site: Path, case: str) -> str:
    """Install one broken plugin; returns the name it is listed under."""
    if case == "package gone":
        write_dist(site, "stale-dist", [("stale", "stale_package:Plugin")])
        return "stale"
    if case == "no manifest":
        write_package(site, "bare_package", GOOD_BACKEND, None)
        write_dist(site, "bare-dist", [("bare", "bare_package:Plugin")])
        return "bare"
    if case == "broken manifest":
        plugin(site, "typo", scor=1)
        return "typo"
    if case == "other name":
        write_package(site, "other_package", GOOD_BACKEND, manifest_text("somebody-else"))
        write_dist(site, "other-dist", [("other", "other_package:Plugin")])
        return "other"
    if case == "no class":
        write_dist(site, "vague-dist", [("vague", "vague_package")])
        return "vague"
    if case == "single module":
        (site / "single_module.py").write_text(GOOD_BACKEND)
        write_dist(site, "single-dist", [("single", "single_module:Plugin")])
        return "single"
    if case == "no METADATA":
        write_dist(site, "anonymous-dist", [("anonymous", "anonymous_package:Plugin")], meta=False)
        return "anonymous"
    assert case == "unparsable entry points"
    write_dist(site, "garbled-dist", []).write_text("[m31.backends]\nthis line is no entry point\n")
    return "garbled-dist"


CASES = {
    "package gone": "package 'stale_package' is not installed, though its metadata is",
    "no manifest": "backend.toml: the manifest is missing",
    "broken manifest": "unknown key 'scor' (did you mean 'score'?)",
    "other name": "the manifest is of 'somebody-else', the entry point of 'other'",
    "no class": "the entry point 'vague_package' is malformed; expected package.module:Class",
    "single module": "'single_module' is not a package with an __init__",
    "no METADATA": "package 'anonymous_package' is not installed",
    "unparsable entry points": "its entry_points.txt cannot be parsed",
}


@pytest.mark.parametrize("case", CASES)
def test_a_faulty_installation_is_listed_with_its_reason_and_hides_nobody(site: Path, case: str) -> None:
    name = faulty(site, case)
    plugin(site, "healthy")
    found = listed()
    assert CASES[case] in str(found[name].failure)
    assert found[name].manifest is None
    assert found["healthy"].failure is None
    assert found["reference"].failure is None


def test_an_import_hook_that_raises_spoils_only_what_it_touches(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hook:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "hooked_package":
                raise RuntimeError("hook is broken")

    monkeypatch.setattr(sys, "meta_path", [Hook(), *sys.meta_path])
    write_dist(site, "hooked-dist", [("hooked", "hooked_package:Plugin")])
    found = listed()
    assert found["hooked"].failure == "looking up package 'hooked_package' failed: RuntimeError: hook is broken"
    assert found["reference"].failure is None


def test_required_packages_are_compared_with_what_is_installed(site: Path) -> None:
    plugin(site, "needy", packages={"surely-not-installed": "1.2", "m31": "9.0", "packaging": "20.0"})
    assert listed()["needy"].missing == (
        "m31 >= 9.0: 0.1.0 is installed",
        "surely-not-installed >= 1.2 is not installed",
    )


def test_policies_block_visibly(site: Path) -> None:
    plugin(site, "outsider")
    alone = listed(Policy(plugins=False, allow=None))
    assert alone["outsider"].blocked == "M31_NO_PLUGINS=1 allows only m31's own backends"
    assert alone["reference"].blocked is None
    few = listed(Policy(plugins=True, allow=("outsider", "hopper")))
    assert few["reference"].blocked == "M31_BACKENDS_ALLOW=outsider,hopper does not list it"
    assert few["outsider"].manifest is not None


@pytest.mark.parametrize(
    ("environ", "policy"),
    [
        ({}, EVERYTHING),
        ({"M31_NO_PLUGINS": "", "M31_BACKENDS_ALLOW": " , "}, EVERYTHING),
        ({"M31_NO_PLUGINS": "0"}, EVERYTHING),
        ({"M31_NO_PLUGINS": "1"}, Policy(plugins=False, allow=None)),
        ({"M31_BACKENDS_ALLOW": "My_Own, reference"}, Policy(plugins=True, allow=("my-own", "reference"))),
    ],
)
def test_policy_variables(environ: dict[str, str], policy: Policy) -> None:
    assert Policy.from_environment(environ) == policy


def test_a_malformed_switch_is_refused() -> None:
    with pytest.raises(BackendError, match=r"M31_NO_PLUGINS: 'yes' is not a value of this variable; expected 1"):
        Policy.from_environment({"M31_NO_PLUGINS": "yes"})


@pytest.mark.parametrize("entry", ["", ":", "a", "a:", "a b:C", "a..b:C", ":C", "a:b c"])
def test_malformed_entry_points(entry: str) -> None:
    with pytest.raises(ManifestError, match=r"is malformed; expected package\.module:Class"):
        manifest_path(entry)
