"""A backend that the caller made, instead of a name."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.numpy_example import MANIFEST

from m31 import BackendRefused, load, sdk
from m31.conformance.bench import Bench
from m31.conformance.synthetic import FORMATS, write
from m31.errors import RequestError


def test_a_model_runs_on_a_backend_that_is_not_installed(tmp_path: Path) -> None:
    from m31_numpy import NumpyBackend

    write(tmp_path / "model", "random-m31")
    backend = NumpyBackend(MANIFEST)
    model = load(tmp_path / "model", backend=backend)
    wanted = load(tmp_path / "model", backend="reference")
    assert list(model.generate("hello", max_tokens=4, temperature=0)) == list(
        wanted.generate("hello", max_tokens=4, temperature=0)
    )
    assert model.decision.name == "numpy"
    assert model.decision.source == "argument"
    assert "NumpyBackend" in str(model.decision)
    assert sdk.open_backend(model.decision) is backend


@pytest.mark.parametrize("what", [5, b"x", object(), sdk.Backend])
def test_what_is_no_backend_is_refused(what: object, tmp_path: Path) -> None:
    with pytest.raises(BackendRefused, match="is no backend"):
        load(tmp_path, backend=what)  # type: ignore[arg-type]


def test_sessions_of_a_bench_are_opened_once(tmp_path: Path) -> None:
    bench = Bench("reference", scratch=tmp_path)
    assert bench.session() is bench.session()
    assert bench.session("float64") is not bench.session()
    assert bench.session(arithmetic="w4a16").numerics.name == "w4a16"
    assert bench.claims("linear")


@pytest.mark.parametrize("name", FORMATS)
def test_synthetic_checkpoints_are_the_same_every_time(name: str, tmp_path: Path) -> None:
    bench = Bench("reference", scratch=tmp_path)
    folder = bench.checkpoint(name)
    assert bench.checkpoint(name) == folder
    write(tmp_path / "again", name)
    for path in folder.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_there_is_no_other_synthetic_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no synthetic checkpoint"):
        write(tmp_path / "x", "nano")
