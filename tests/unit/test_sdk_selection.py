"""The selection table: hardware x installed backends x the user's wish -> one decision (BUG-91)."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sdk_fakes import (
    GPU_BACKENDS,
    candidate,
    devices,
    machine_with,
    manifest,
    shipped_candidates,
    shipped_manifest,
)

from m31.errors import (
    BackendError,
    BackendLoadFailed,
    BackendRefused,
    BackendTie,
    DuplicateBackend,
    NoUsableBackend,
    UnknownBackend,
)
from m31.sdk import API_VERSION
from m31.sdk.child import Outcome
from m31.sdk.rendering import backends_dict, render_backends
from m31.sdk.selection import Decision, select

PROCESSOR_ONLY = machine_with()
BOARDS = {
    "hopper": devices(8, "nvidia", "sm_90"),
    "blackwell": devices(4, "nvidia", "sm_103"),
    "rubin": devices(4, "nvidia", "sm_107"),
    "mi355x": devices(4, "amd", "gfx950", toolkit="7.2.0-43"),
}
BROKEN_BOARD = devices(1, "nvidia", "sm_90", usable=False, problem="libcuda.so.1: cannot open shared object file")
ACME = {"kind": "gpu", "vendor": "acme", "architectures": ["a1"], "min_count": 1}


def verdict(decision: Decision, name: str) -> str:
    return next(str(v) for v in decision.verdicts if v.name == name)


def refusal(decision: Decision, error: type[BackendError]) -> str:
    assert decision.name is None
    with pytest.raises(error) as caught:
        decision.require()
    assert type(caught.value) is error
    assert caught.value.exit_code == 3
    assert "%s" not in str(caught.value)  # BUG-87
    return str(caught.value)


# --- m31's own five ----------------------------------------------------------------------


def test_a_machine_without_accelerator_gets_the_reference_and_every_other_a_reason() -> None:
    decision = select(PROCESSOR_ONLY, shipped_candidates())
    assert (decision.name, decision.reason, decision.source) == ("reference", "the only usable backend", "auto")
    assert decision.require().name == "reference"
    none = "no matching device: needs "
    assert {v.name: str(v) for v in decision.verdicts} == {
        "reference": "chosen: the only usable backend",
        "hopper": f"{none}8 usable device(s) of nvidia sm_90; this machine has no accelerator",
        "blackwell": f"{none}4 usable device(s) of nvidia sm_100 or sm_103; this machine has no accelerator",
        "rubin": f"{none}4 usable device(s) of nvidia sm_107; this machine has no accelerator",
        "mi355x": f"{none}4 usable device(s) of amd gfx950; this machine has no accelerator",
    }


@pytest.mark.parametrize("name", GPU_BACKENDS)
def test_bug_113_on_its_own_hardware_a_backend_without_kernels_says_so(name: str) -> None:
    """BUG-113: "no backend supports this", with every reason thrown away."""
    decision = select(machine_with(*BOARDS[name]), shipped_candidates())
    assert verdict(decision, name) == f"claims no ops: {name} claims no ops yet in this release"
    message = refusal(decision, NoUsableBackend)
    assert (
        "and no installed backend can use it; to run on the processor nevertheless, say so: --backend reference"
        in message
    )
    for other in shipped_candidates():  # every candidate with its reason, in the error itself
        assert f"  {other.name} (m31 0.1.0): " in message
    with pytest.raises(BackendRefused, match="claims no ops yet in this release"):
        select(machine_with(*BOARDS[name]), shipped_candidates(), name).require()


@pytest.mark.parametrize(("name", "other"), list(itertools.permutations(GPU_BACKENDS, 2)))
def test_bug_97_architectures_come_from_the_manifest(name: str, other: str) -> None:
    """BUG-97: a kernel variant that loads on a device that it was not built for kills the process at its first call."""
    with_kernels = candidate(name, manifest=shipped_manifest(name).model_copy(update={"ops": ("rope",)}))
    decision = select(machine_with(*BOARDS[other]), (with_kernels,))
    assert verdict(decision, name).startswith("no matching device: needs ")
    assert BOARDS[other][0].arch in verdict(decision, name)


@pytest.mark.parametrize("name", GPU_BACKENDS)
def test_with_kernels_the_same_hardware_would_choose_it(name: str) -> None:
    ready = tuple(
        candidate(c.name, manifest=shipped_manifest(c.name).model_copy(update={"ops": ("rope",)}))
        for c in shipped_candidates()
    )
    assert select(machine_with(*BOARDS[name]), ready).name == name
    fewer = select(machine_with(*BOARDS[name][1:]), ready)
    assert f"this machine has {len(BOARDS[name]) - 1} of " in verdict(fewer, name)


def test_bug_77_89_an_unusable_board_never_becomes_a_silent_processor_run() -> None:
    """BUG-77, BUG-89: an accelerator was there or asked for, its library was not, and the processor took over."""
    decision = select(machine_with(*BROKEN_BOARD), shipped_candidates())
    message = refusal(decision, NoUsableBackend)
    assert "1 of nvidia sm_90 (present but unusable: libcuda.so.1: cannot open shared object file)" in message
    assert "--backend reference or M31_BACKEND=reference" in message
    assert verdict(decision, "reference").startswith(
        "not asked for: usable on the processor, which is never chosen unasked"
    )
    asked = select(machine_with(*BROKEN_BOARD), shipped_candidates(), "reference")
    assert (asked.name, asked.reason) == ("reference", "asked for by argument")


# --- rules ----------------------------------------------------------------------


def test_the_highest_score_wins_and_the_others_are_outscored() -> None:
    fast = candidate("fast", manifest=manifest("fast", score=60))
    decision = select(PROCESSOR_ONLY, (candidate("slow"), fast, *shipped_candidates()))
    assert (decision.name, decision.reason) == ("fast", "highest score (60) of 3 usable backends")
    assert verdict(decision, "slow") == "outscored: by fast (60)"


def test_bug_78_a_tie_names_both_and_the_variable() -> None:
    """BUG-78: two claim the machine and the message offers no way out."""
    both = (candidate("alpha", dist="dist-a"), candidate("beta", dist="dist-b", version="2.0"))
    decision = select(PROCESSOR_ONLY, (*both, *shipped_candidates()))
    message = refusal(decision, BackendTie)
    assert "'alpha' of dist-a 1.0 and 'beta' of dist-b 2.0 have the same score 50" in message
    assert "M31_BACKEND=alpha" in message
    assert verdict(decision, "beta") == "tie: score 50, 2 backends"
    assert select(PROCESSOR_ONLY, both, "beta").name == "beta"
    lower = (
        candidate("alpha", manifest=manifest("alpha", score=5)),
        candidate("beta", manifest=manifest("beta", score=5)),
    )
    assert select(PROCESSOR_ONLY, (*lower, *shipped_candidates())).name == "reference"  # a tie below the top is none


def test_bug_84_declined_is_told_from_not_installed() -> None:
    """BUG-84: a device type whose plugin chose not to load looked like one that was never installed."""
    probe = manifest("x", probe="x:probe", device={"kind": "probe"})
    declined = candidate("x", manifest=probe, probed=Outcome(ok=False, text="no device found", declined=True))
    message = refusal(select(PROCESSOR_ONLY, (declined,), "x"), BackendRefused)
    assert "installed (x-dist 1.0) but cannot be used here: declined: its probe says: no device found" in message
    assert "no backend named 'y' is installed" in refusal(select(PROCESSOR_ONLY, (declined,), "y"), UnknownBackend)


@pytest.mark.parametrize("alias", ["gpu", "cuda", "cpu", "default", "nvidia"])
def test_bug_86_there_are_no_aliases(alias: str) -> None:
    """BUG-86: an alias that expanded to the wrong vendor."""
    for machine in (PROCESSOR_ONLY, machine_with(*BOARDS["hopper"])):
        message = refusal(select(machine, shipped_candidates(), alias), UnknownBackend)
        assert "expected one of blackwell, hopper, mi355x, reference, rubin, or auto" in message


def test_a_misspelt_name_gets_the_nearest() -> None:
    message = refusal(select(PROCESSOR_ONLY, shipped_candidates(), "refrence", source="--backend"), UnknownBackend)
    assert message == (
        "no backend named 'refrence' is installed (asked for by --backend); "
        "expected one of blackwell, hopper, mi355x, reference, rubin, or auto; did you mean 'reference'?"
    )


def test_names_are_compared_in_one_spelling() -> None:
    assert select(PROCESSOR_ONLY, (candidate("my-backend"),), "My_Backend").name == "my-backend"
    assert select(PROCESSOR_ONLY, (candidate("x"),), "AUTO").source == "auto"


def test_bug_88_the_api_is_compared_before_anything_runs() -> None:
    """BUG-88: version skew surfaced as a failure deep inside the plugin, and the program went on without it."""
    old = candidate("old", manifest=manifest("old", requires=">=0.1,<1"))
    decision = select(PROCESSOR_ONLY, (old, *shipped_candidates()))
    assert verdict(decision, "old") == f"API mismatch: needs the m31 backend API >=0.1,<1, this is {API_VERSION}"
    assert "API mismatch" in refusal(select(PROCESSOR_ONLY, (old,), "old"), BackendRefused)


@pytest.mark.parametrize(
    ("device", "found", "expected"),
    [
        ({"min_driver": "590"}, {}, "software too old: needs driver 590 or newer; 580.65 is installed"),
        ({"min_driver": "580"}, {}, None),
        ({"min_toolkit": "13.5"}, {}, "software too old: needs toolkit 13.5 or newer; 13.4 is installed"),
        ({"min_toolkit": "7.2"}, {"toolkit": "7.2.0-43"}, None),
        ({"min_toolkit": "7.2"}, {"toolkit": None}, "needs toolkit 7.2 or newer; the installed version is unknown"),
        ({"min_toolkit": "7.2"}, {"toolkit": "odd"}, "needs toolkit 7.2 or newer; odd is installed"),
    ],
)
def test_minimum_software(device: dict[str, Any], found: dict[str, Any], expected: str | None) -> None:
    c = candidate("x", manifest=manifest("x", device={**ACME, **device}))
    decision = select(machine_with(*devices(1, "acme", "a1", **found)), (c,))
    if expected is None:
        assert decision.name == "x"
    else:
        assert expected in verdict(decision, "x")


def test_missing_packages_are_named() -> None:
    lacking = candidate("x", manifest=manifest("x"), missing=("triton >= 3.5: 3.1 is installed",))
    assert verdict(select(PROCESSOR_ONLY, (lacking,)), "x") == "missing package: triton >= 3.5: 3.1 is installed"


def test_blocked_and_failed_candidates_stay_visible() -> None:
    blocked = candidate("b", blocked="M31_NO_PLUGINS=1 allows only m31's own backends")
    failed = candidate("f", failure="the manifest is missing")
    decision = select(PROCESSOR_ONLY, (blocked, failed, *shipped_candidates()))
    assert decision.name == "reference"  # a broken plugin breaks no other backend
    assert verdict(decision, "b") == "blocked: M31_NO_PLUGINS=1 allows only m31's own backends"
    assert verdict(decision, "f") == "failed: the manifest is missing"
    assert "failed: the manifest is missing" in refusal(select(PROCESSOR_ONLY, (failed,), "f"), BackendRefused)


def test_a_name_registered_twice_is_refused_wherever_it_would_have_won() -> None:
    twice = (candidate("dup", dist="dist-a"), candidate("zzz"), candidate("dup", dist="dist-b"))
    for choice in (None, "dup"):
        message = refusal(select(PROCESSOR_ONLY, twice, choice), DuplicateBackend)
        assert "'dup' is registered more than once: by dist-a 1.0 and by dist-b 1.0" in message
    assert select(PROCESSOR_ONLY, twice, "zzz").name == "zzz"
    low = tuple(candidate("dup", dist=d, manifest=manifest("dup", score=1)) for d in ("dist-a", "dist-b"))
    assert select(PROCESSOR_ONLY, (*low, *shipped_candidates())).name == "reference"
    one_blocked = (candidate("dup", dist="dist-a"), candidate("dup", dist="dist-b", blocked="M31_NO_PLUGINS=1"))
    assert select(PROCESSOR_ONLY, one_blocked, "dup").require().distribution == "dist-a"


def test_a_broken_winner_is_an_error_and_not_a_reason_for_the_next_best() -> None:
    dead = Outcome(ok=False, text="killed by SIGABRT (last words: boom)")
    broken = candidate("fast", manifest=manifest("fast"), trial=dead)
    decision = select(PROCESSOR_ONLY, (broken, *shipped_candidates()))
    message = refusal(decision, BackendLoadFailed)
    assert message.startswith(
        "backend 'fast' of fast-dist 1.0: importing it failed: killed by SIGABRT (last words: boom)"
    )
    assert verdict(decision, "fast") == "failed: importing it failed: killed by SIGABRT (last words: boom)"
    assert "SIGABRT" in refusal(select(PROCESSOR_ONLY, (broken,), "fast"), BackendLoadFailed)
    slow = candidate("slow", manifest=manifest("slow", score=1), trial=dead)
    assert select(PROCESSOR_ONLY, (slow, *shipped_candidates())).name == "reference"


def test_a_broken_or_contested_accelerator_backend_does_not_open_the_way_to_the_processor() -> None:
    board = machine_with(*devices(1, "acme", "a1"))
    weak = manifest("weak", score=1, device=ACME)
    failing = candidate("weak", manifest=weak, trial=Outcome(ok=False, text="no"))
    refusal(select(board, (failing, *shipped_candidates())), NoUsableBackend)
    contested = tuple(candidate("weak", dist=d, manifest=weak) for d in ("dist-a", "dist-b"))
    refusal(select(board, (*contested, *shipped_candidates())), NoUsableBackend)


def test_nothing_installed_at_all() -> None:
    assert "install m31 with pip" in refusal(select(PROCESSOR_ONLY, ()), NoUsableBackend)
    assert "there is none" in refusal(select(PROCESSOR_ONLY, (), "reference"), UnknownBackend)


def test_an_unanswered_probe_is_not_a_yes() -> None:
    c = candidate("x", manifest=manifest("x", probe="x:probe", device={"kind": "probe"}))
    assert verdict(select(PROCESSOR_ONLY, (c,)), "x") == "declined: its probe was not run"
    crashed = candidate("x", manifest=c.manifest, probed=Outcome(ok=False, text="killed by SIGSEGV (last words: none)"))
    assert verdict(select(PROCESSOR_ONLY, (crashed,)), "x") == (
        "failed: its probe failed: killed by SIGSEGV (last words: none)"
    )


# --- properties ----------------------------------------------------------------------

POOL = (
    *shipped_candidates(),
    candidate("alpha"),
    candidate("beta"),
    candidate("beta", dist="other"),
    candidate("gamma", failure="gone"),
    candidate("delta", blocked="by hand"),
    candidate("omega", manifest=manifest("omega", device=ACME, score=90)),
)
MACHINES = (PROCESSOR_ONLY, machine_with(*BROKEN_BOARD), machine_with(*devices(2, "acme", "a1")))


@given(
    st.lists(st.sampled_from(POOL), unique_by=id),
    st.sampled_from(MACHINES),
    st.sampled_from([None, "auto", "alpha", "beta", "gamma", "delta", "omega", "reference", "hopper", "nope"]),
)
def test_bug_91_every_decision_is_complete_and_honest(pool: list[Any], machine: Any, choice: str | None) -> None:
    decision = select(machine, tuple(pool), choice)
    kinds = [v.kind for v in decision.verdicts]
    assert len(kinds) == len(pool)
    assert kinds.count("chosen") == (decision.name is not None)
    assert (decision.name is None) == (decision.refusal is not None)
    if choice not in (None, "auto") and decision.name is not None:
        assert decision.name == choice  # an explicit choice is never replaced
    if choice in (None, "auto") and machine.devices and decision.name is not None:
        manifest_of_winner = decision.require().manifest
        assert manifest_of_winner is not None
        assert manifest_of_winner.device.kind != "cpu"
    again = select(machine, tuple(reversed(pool)), choice)
    assert (again.name, again.refusal and again.refusal.error) == (
        decision.name,
        decision.refusal and decision.refusal.error,
    )
    text = render_backends(decision, machine)
    assert all(any(line.startswith(c.name) for line in text.splitlines()) for c in pool)
    json.dumps(backends_dict(decision, machine))


def test_the_table_that_users_see() -> None:
    text = render_backends(select(PROCESSOR_ONLY, shipped_candidates()), PROCESSOR_ONLY)
    lines = text.splitlines()
    assert lines[0].split() == ["backend", "distribution", "score", "verdict"]
    assert "reference  m31 0.1.0        10  chosen: the only usable backend" in lines
    assert "chosen: reference (m31 0.1.0): the only usable backend" in lines
    assert "devices: none" in lines
    refused = render_backends(select(machine_with(*BROKEN_BOARD), shipped_candidates()), machine_with(*BROKEN_BOARD))
    assert "no backend is chosen: this machine has 1 of nvidia sm_90 (present but unusable" in refused
    assert "--backend reference" in refused


def test_the_form_for_programs() -> None:
    form = backends_dict(select(PROCESSOR_ONLY, shipped_candidates()), PROCESSOR_ONLY)
    assert form["api"] == API_VERSION
    assert form["chosen"] == "reference"
    assert form["error"] is None
    assert form["machine"]["devices"] == ()
    assert {b["name"]: b["verdict"] for b in form["backends"]}["hopper"] == "no matching device"
    assert backends_dict(select(PROCESSOR_ONLY, (), "x"), PROCESSOR_ONLY)["error"] == "UnknownBackend"
