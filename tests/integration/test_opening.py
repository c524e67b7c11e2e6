"""What the core refuses before a backend is asked: another dtype, arithmetic, option; limits that were widened."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.sdk_fakes import manifest

import m31
from m31.cli import demo
from m31.engine.opening import _arithmetic, _listed
from m31.errors import BackendRefused, ContractViolation, OpRefused
from m31.formats.arithmetic import NAMED
from m31.sdk.backend import Limits
from m31_reference.session import ReferenceSession


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("opening") / "demo"
    demo.write(target, seed=0, layers=2)
    return target


def test_the_default_is_the_first_of_the_manifest(folder: Path) -> None:
    assert m31.load(folder, backend="reference").formats["compute"] == "float32"
    two = manifest("x", arithmetic=["w4a16", "w16a16"])
    assert _arithmetic(None, two).name == "w4a16"
    assert _arithmetic("W16A16", two).name == "w16a16"
    assert _arithmetic(None, manifest("x", arithmetic="all")).exact
    assert _arithmetic("w4a16+kv_read=e4m3", manifest("x", arithmetic="all")).kv_read == "e4m3"


def test_what_the_manifest_does_not_list_is_refused() -> None:
    one = manifest("x", arithmetic=["w4a16"])
    with pytest.raises(BackendRefused, match=r"x: arithmetic 'exact' is not served; expected w4a16; .*--backend refer"):
        _arithmetic("exact", one)
    with pytest.raises(OpRefused, match="did you mean 'w4a16'"):
        _arithmetic("w4a15", one)
    with pytest.raises(BackendRefused, match=r"compute dtype 'bf16' is not served.*did you mean 'bfloat16'"):
        _listed("compute dtype", "bf16", ("float32", "bfloat16"), "x")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float"])
def test_a_compute_dtype_that_is_not_served(folder: Path, dtype: str) -> None:
    with pytest.raises(BackendRefused, match=f"compute dtype '{dtype}' is not served; expected float32 or float64"):
        m31.load(folder, backend="reference", dtype=dtype)


def test_a_manifest_must_list_arithmetics_that_exist() -> None:
    with pytest.raises(Exception, match=r"key 'arithmetic'.*unknown arithmetic 'w3a3'"):
        manifest("x", arithmetic=["w3a3"])


@pytest.mark.parametrize(
    "change", [{"max_context": 1 << 30}, {"kv_formats": ("float32", "int8")}, {"draft_tokens": 65}, {"video": True}]
)
def test_a_session_must_not_serve_more_than_its_manifest(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    def wide(self: ReferenceSession, model: Any, declared: Limits) -> Limits:
        return dataclasses.replace(declared, **change)

    monkeypatch.setattr(ReferenceSession, "limits", wide)
    with pytest.raises(
        ContractViolation, match=r"backend reference: breaks the rule 'limits': serves .*at most its man"
    ):
        m31.load(folder, backend="reference")


def lying(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """The reference, whose sessions have other attributes than they were opened with."""
    real = ReferenceSession.__init__

    def init(self: ReferenceSession, *args: Any) -> None:
        real(self, *args)
        for name, value in changes.items():
            setattr(self, name, value)

    monkeypatch.setattr(ReferenceSession, "__init__", init)


def test_a_session_is_what_it_was_opened_as(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lying(monkeypatch, dtypes={"model": torch.float64, "accum": torch.float64, "int64": torch.int64})
    with pytest.raises(ContractViolation, match=r"rule 'opened': computes in float64; expected float32"):
        m31.load(folder, backend="reference")
    lying(monkeypatch, numerics=NAMED["w4a16"])
    with pytest.raises(ContractViolation, match=r"rule 'opened': computes in .*"):
        m31.load(folder, backend="reference")
    monkeypatch.setattr("m31_reference.session.ReferenceBackend.open", lambda self, **given: object())
    with pytest.raises(ContractViolation, match=r"rule 'opened': open returned <object"):
        m31.load(folder, backend="reference")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("limits", lambda self, model, declared: dataclasses.replace(declared, kv_formats=()), "rule 'limits'"),
        ("kernel", lambda self, op, step: None, "rule 'opened': answers None for rope_table"),
        ("weight_bytes", lambda self, op, slots: -1, "rule 'opened': says .* bytes of weights"),
    ],
)
def test_answers_have_the_types_of_the_contract(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, text: str
) -> None:
    monkeypatch.setattr(ReferenceSession, name, value)
    with pytest.raises(ContractViolation, match=text):
        m31.load(folder, backend="reference")
