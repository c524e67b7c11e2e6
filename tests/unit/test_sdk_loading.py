"""Real plugins that misbehave at import, each in its own fresh interpreter, beside healthy ones."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from sdk_fakes import GOOD_BACKEND, GPU_BACKENDS, answer, candidate, home_dist, machine_with, plugin, run_python

import m31
from m31.errors import BackendLoadFailed, BackendRefused, UnknownBackend
from m31.formats.arithmetic import NAMED
from m31.sdk import choosing
from m31.sdk.child import run_child
from m31.sdk.discovery import Candidate, discover
from m31.sdk.loading import load
from m31.sdk.selection import select


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    home_dist(folder)
    return folder


@pytest.fixture
def here(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, visible to this process, with no choice made and nothing remembered."""
    monkeypatch.syspath_prepend(str(site))
    for name in ("M31_BACKEND", "M31_NO_PLUGINS", "M31_BACKENDS_ALLOW"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(choosing, "_override", None)
    monkeypatch.setattr(choosing, "_machine", machine_with())
    monkeypatch.setattr(choosing, "_cached", None)
    return site


def named(name: str) -> Candidate:
    return next(c for c in discover() if c.name == name)


# --- blast radius ----------------------------------------------------------------------

# what the plugin does at import -> what its own error must say
BROKEN = {
    "raises": (
        "raise ImportError('no module of that name')",
        "importing it failed: ImportError: no module of that name",
    ),
    "hides the cause": (
        """
        try:
            raise OSError("libacme.so: undefined symbol: _Zacme")
        except OSError as error:
            raise RuntimeError("could not load the backend") from error
        """,
        "RuntimeError: could not load the backend (root cause: OSError: libacme.so: undefined symbol: _Zacme)",
    ),
    "exits": ("import sys; sys.exit(3)", "importing it failed: SystemExit: 3"),
    "asserts": ("assert False, 'never here'", "importing it failed: AssertionError: never here"),
    "ends the process": ("import os; os._exit(7)", "importing it failed: the process ended itself with status 7"),
    "aborts": (
        "import os, sys; print('acme: fatal', file=sys.stderr, flush=True); os.abort()",
        "importing it failed: killed by SIGABRT (last words: acme: fatal)",
    ),
    "interrupts": ("raise KeyboardInterrupt", "importing it failed: KeyboardInterrupt"),
}

SCRIPT = """
import json, sys
import m31
from m31 import sdk
report = {}
decision = m31.backend
report["auto"] = [decision.name, decision.refusal and decision.refusal.error.__name__]
report["verdicts"] = {v.name: str(v) for v in decision.verdicts}
report["table"] = sdk.render_backends(decision, sdk.this_machine())
report["tried"] = {v.name: str(v) for v in sdk.decide(try_load=True).verdicts}
for name in ("broken", "healthy"):
    try:
        report[name] = type(sdk.open_backend(sdk.decide(name))).__name__
    except m31.BackendError as error:
        report[name] = [type(error).__name__, error.exit_code, str(error)]
report["reference"] = sdk.decide("reference").name
report["imported"] = "broken_package" in sys.modules
print(json.dumps(report))
"""


@pytest.mark.parametrize("case", BROKEN)
def test_bug_81_82_85_a_plugin_that_dies_at_import_breaks_nothing(site: Path, tmp_path: Path, case: str) -> None:
    """BUG-81 (every command dead), BUG-82 (root cause hidden), BUG-85 (native abort), BUG-77 (silent replacement)."""
    body, message = BROKEN[case]
    plugin(site, "broken", body, score=20)
    plugin(site, "healthy", score=15)
    got = answer(SCRIPT, site, cwd=tmp_path)
    assert got["auto"] == ["broken", None]  # listing runs no plugin code, so the fault cannot be known yet
    assert "broken" in got["table"]
    assert got["tried"]["broken"].startswith("failed: importing it failed: ")
    assert got["tried"]["healthy"] == "not asked for: usable"  # and is not taken instead
    error, code, text = got["broken"]
    assert (error, code) == ("BackendLoadFailed", 3)
    assert text.startswith("backend 'broken' of broken-dist 1.0: ")
    assert message in text
    assert "`m31 backends` lists them" in text
    assert got["healthy"] == "Plugin"
    assert got["reference"] == "reference"
    assert got["imported"] is False  # not even half of it entered this process


def test_a_plugin_that_hangs_at_import_is_given_up(site: Path, tmp_path: Path) -> None:
    plugin(site, "broken", "import time; time.sleep(600)", score=20)
    script = "from m31.sdk import loading\nloading.try_import.__defaults__ = (1.5,)\n" + SCRIPT
    plugin(site, "healthy", score=15)
    got = answer(script, site, cwd=tmp_path)
    assert "importing it failed: no answer within 1.5 s" in got["broken"][2]
    assert got["healthy"] == "Plugin"


def test_a_plugin_that_prints_does_not_spoil_our_output(site: Path, tmp_path: Path) -> None:
    plugin(site, "loud", "print('LOUD')\n" + GOOD_BACKEND)
    code = "from m31 import sdk; print(type(sdk.open_backend(sdk.decide('loud'))).__name__)"
    done = run_python(code, site, cwd=tmp_path)
    assert done.stdout == "Plugin\n"
    assert done.stderr.count("LOUD") == 1


def test_bug_83_any_order_of_imports_works(site: Path, tmp_path: Path) -> None:
    """BUG-83: one library's import ran a second discovery, which imported a backend, which imported the library."""
    (site / "acmelib.py").write_text("from m31.sdk import discover\nFOUND = len(discover())\n")
    plugin(site, "nested", "import acmelib\n" + GOOD_BACKEND)
    steps = {
        "m31": "import m31; m31.backend",
        "library": "import acmelib; assert acmelib.FOUND >= 6",
        "plugin": "import nested_package",
    }
    code = "\n".join(
        f"pid = os.fork()\nif pid == 0:\n  try:\n    {'; '.join(steps[k] for k in order)}\n    os._exit(0)\n"
        f"  except BaseException:\n    traceback.print_exc()\n    os._exit(1)\nstates.append(os.waitpid(pid, 0)[1])"
        for order in itertools.permutations(steps)
    )
    got = answer(f"import json, os, traceback\nstates = []\n{code}\nprint(json.dumps(states))", site, cwd=tmp_path)
    assert got == [0] * 6


@pytest.mark.parametrize("order", ["import torch; import m31; m31.backend", "import m31; m31.backend; import torch"])
def test_bug_83_with_the_real_library(site: Path, tmp_path: Path, order: str) -> None:
    plugin(site, "nested", "import torch\n" + GOOD_BACKEND, score=5)
    got = answer(f"{order}\nimport json; print(json.dumps(m31.backend.name))", site, cwd=tmp_path)
    assert got == "reference"


# --- loading in this process -------------------------------------------------------------


def test_m31s_own_gpu_backends_load_and_refuse_to_open(here: Path) -> None:
    for name in GPU_BACKENDS:
        backend = load(named(name))
        assert backend.manifest.name == name
        with pytest.raises(BackendRefused, match=f"backend '{name}': {name} claims no ops yet in this release"):
            backend.open(device=None, dtype="bfloat16", rank=0, world=1, arithmetic=NAMED["exact"], options={})


@pytest.mark.parametrize(
    ("name", "body", "expected"),
    [
        ("not-a-class", "Plugin = 3", "its entry point 'not_a_class_package:Plugin' is 3; expected a subclass of"),
        ("not-a-backend", "class Plugin: pass", "expected a subclass of m31.sdk.Backend"),
        ("absent", "", "AttributeError: module 'absent_package' has no attribute 'Plugin'"),
        (
            "abstract",
            "from m31.sdk.backend import Backend\nclass Plugin(Backend): pass",
            "loading it raised TypeError: Can't instantiate abstract class Plugin",
        ),
        (
            "ctor-exits",
            GOOD_BACKEND + "    def __init__(self, manifest):\n        raise SystemExit(5)\n",
            "loading it raised SystemExit: 5",
        ),
        (
            "ctor-fails",
            GOOD_BACKEND + "    def __init__(self, manifest):\n        {}['key']\n",
            "loading it raised KeyError: 'key'",
        ),
    ],
)
def test_what_cannot_be_constructed_is_refused(here: Path, name: str, body: str, expected: str) -> None:
    plugin(here, name, body)
    with pytest.raises(BackendLoadFailed) as caught:
        load(named(name))
    assert expected in str(caught.value)


def test_a_falsy_backend_is_still_the_backend(here: Path) -> None:
    """The plugin manager answers with the class when the instance is falsy; we construct it ourselves."""
    plugin(here, "empty", GOOD_BACKEND + "    def __len__(self):\n        return 0\n")
    backend = load(named("empty"))
    assert not isinstance(backend, type)
    assert backend.manifest.name == "empty"


def test_the_cause_is_chained(here: Path) -> None:
    plugin(here, "chained", GOOD_BACKEND + "    def __init__(self, manifest):\n        raise OSError('libacme.so')\n")
    with pytest.raises(BackendLoadFailed) as caught:
        load(named("chained"))
    assert isinstance(caught.value.__cause__, OSError)


def test_a_keyboard_interrupt_stays_one(here: Path) -> None:
    plugin(here, "stopped", GOOD_BACKEND + "    def __init__(self, manifest):\n        raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load(named("stopped"))


def test_without_manifest_nothing_is_loaded() -> None:
    with pytest.raises(BackendRefused, match="cannot be loaded: gone"):
        load(candidate("x", failure="gone"))


def test_bug_94_loading_bypasses_the_stale_cache_too(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BUG-94: even a poisoned cache of the plugin manager does not decide what is loaded."""
    from stevedore import extension

    monkeypatch.setitem(extension.ExtensionManager.ENTRY_POINT_CACHE, "m31.backends", [])
    plugin(here, "fresh")
    assert load(named("fresh")).manifest.name == "fresh"
    assert extension.ExtensionManager.ENTRY_POINT_CACHE["m31.backends"] == []


# --- the child process ----------------------------------------------------------------------


def probe(site: Path, body: str, seconds: float = 20.0) -> Any:
    (site / "probing.py").write_text(body)
    return run_child("probe", "probing:probe", seconds)


@pytest.mark.parametrize(
    ("body", "ok", "declined", "text"),
    [
        ("def probe(): return None", True, False, ""),
        ("def probe(): return 'no device found'", False, True, "no device found"),
        ("def probe(): return True", False, False, "TypeError: the probe returned bool; None (usable)"),
        ("def probe(): raise OSError('broken')", False, False, "OSError: broken"),
        (
            "def probe(): import os; os.abort()",
            False,
            False,
            "killed by SIGABRT (last words: nothing on standard error)",
        ),
        ("def probe(): import os; os.kill(os.getpid(), 9)", False, False, "killed by SIGKILL"),
        ("def probe(): print('{}'); import sys; sys.stdout.flush()", True, False, ""),
        (
            "import threading, time\ndef probe(): threading.Thread(target=time.sleep, args=(60,)).start()",
            True,
            False,
            "",
        ),
        ("import subprocess\ndef probe(): subprocess.Popen(['sleep', '3'])", True, False, ""),
    ],
)
def test_probe_answers(here: Path, body: str, ok: bool, declined: bool, text: str) -> None:
    started = time.monotonic()
    outcome = probe(here, body)
    assert (outcome.ok, outcome.declined) == (ok, declined)
    assert outcome.text.startswith(text)
    assert time.monotonic() - started < 15  # neither threads nor grandchildren keep us waiting


def test_a_hanging_probe_and_what_it_started_are_killed(here: Path) -> None:
    marker = here / "marker"
    later = f"subprocess.Popen('sleep 1; touch {marker}', shell=True)"
    body = f"import subprocess, time\ndef probe():\n    {later}\n    time.sleep(60)\n"
    assert probe(here, body, 0.7).text == "no answer within 0.7 s"
    time.sleep(1.0)
    assert not marker.exists()


def test_no_interpreter_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    assert run_child("probe", "x:y", 1.0).text.startswith("no interpreter is known")
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert run_child("probe", "x:y", 1.0).text.startswith("no child process could be started")


def test_probes_run_only_for_who_is_asked_and_may_match(here: Path) -> None:
    log = here / "log"
    body = GOOD_BACKEND + f"\ndef probe():\n    open({str(log)!r}, 'a').write('x')\n    return 'no device found'\n"
    plugin(here, "probed", body, probe="probed_package:probe", device={"kind": "probe"})
    choosing.decide("reference")
    assert not log.exists()
    decision = choosing.decide()
    assert log.read_text() == "x"
    assert {v.name: str(v) for v in decision.verdicts}["probed"] == "declined: its probe says: no device found"
    assert decision.name == "reference"
    choosing.decide("probed")
    assert log.read_text() == "xx"


# --- who chooses ------------------------------------------------------------------------------


def test_precedence(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """argument > m31.use > M31_BACKEND > automatic."""
    for name in ("one", "two", "three"):
        plugin(here, name, score=5)
    assert (m31.backend.name, m31.backend.source) == ("reference", "auto")
    monkeypatch.setenv("M31_BACKEND", "one")
    assert (m31.backend.name, m31.backend.reason) == ("one", "asked for by M31_BACKEND")
    assert m31.use("two").name == "two"
    assert (m31.backend.name, m31.backend.reason) == ("two", "asked for by m31.use")
    assert choosing.decide("three").name == "three"
    assert choosing.decide("auto").name == "reference"
    assert m31.use(None).name == "one"
    monkeypatch.setenv("M31_BACKEND", "  ")
    assert m31.backend.source == "auto"


def test_a_refused_choice_changes_nothing(here: Path) -> None:
    plugin(here, "one")
    m31.use("one")
    with pytest.raises(UnknownBackend, match="did you mean 'reference'"):
        m31.use("refrence")
    with pytest.raises(BackendRefused, match="no matching device"):
        m31.use("hopper")
    assert m31.backend.name == "one"


def test_a_refused_environment_choice_is_shown_and_raised_on_use(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M31_BACKEND", "refrence")
    decision = m31.backend  # does not raise: `m31 backends` must be able to show it
    assert decision.name is None
    assert str(decision).startswith("no backend: no backend named 'refrence' is installed (asked for by M31_BACKEND)")
    with pytest.raises(UnknownBackend, match="did you mean 'reference'"):
        choosing.open_backend()


def test_the_decision_is_remembered_until_something_changes(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = choosing.decide()
    assert choosing.decide() is first
    plugin(here, "late", score=90)
    assert choosing.decide() is first
    monkeypatch.setenv("M31_BACKENDS_ALLOW", "late")
    assert choosing.decide().name == "late"
    monkeypatch.delenv("M31_BACKENDS_ALLOW")
    choosing.refresh()
    monkeypatch.setattr(choosing, "_machine", machine_with())
    assert choosing.decide().name == "late"


def test_no_plugins_is_a_way_out(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin(here, "squatter", dist="squatter-dist")
    plugin(here, "reference", dist="impostor-dist", score=99)
    assert select(machine_with(), discover()).name is None
    monkeypatch.setenv("M31_NO_PLUGINS", "1")
    assert (m31.backend.name, m31.backend.require().distribution) == ("reference", "m31")
