"""The backend that docs/sdk.md shows is one: its code and manifest, as printed there, run a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.unit.sdk_fakes import candidate

import m31
from m31 import sdk
from m31.cli import demo
from m31.errors import BackendRefused, ContractViolation, ManifestError, RequestError
from m31.sdk.manifest import parse_manifest
from m31.sdk.selection import select

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "sdk.md").read_text(encoding="utf-8")
CODE = next(block for block in re.findall(r"```python\n(.*?)```", TEXT, flags=re.S) if "ActivationBackend" in block)
MANIFEST = next(block for block in re.findall(r"```toml\n(.*?)```", TEXT, flags=re.S) if 'name = "activation"' in block)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("example") / "demo"
    demo.write(target, seed=0, layers=2)
    return target


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends that the example is installed with this manifest; returns its module."""

    def install(manifest: str = MANIFEST) -> dict[str, Any]:
        module: dict[str, Any] = {}
        exec(CODE, module)
        found = candidate("activation", manifest=parse_manifest(manifest, "docs/sdk.md"))
        real_decide, real_open = sdk.decide, sdk.open_backend

        def decide(choice: str | None = None) -> Any:
            return select(sdk.this_machine(), (found,), choice) if choice == "activation" else real_decide(choice)

        def open_backend(decision: Any) -> Any:
            chosen = decision.require()
            return module["ActivationBackend"](chosen.manifest) if chosen is found else real_open(decision)

        monkeypatch.setattr(sdk, "decide", decide, raising=False)
        monkeypatch.setattr(sdk, "open_backend", open_backend, raising=False)
        return module

    return install


def test_it_runs_and_gives_what_the_reference_gives(folder: Path, installed: Any) -> None:
    installed()
    ids = list(range(20, 60))
    model = m31.load(folder, backend="activation", max_context=256)
    assert "swiglu_oai" not in "".join(note for note in model.notes if "leaves these ops" in note)
    got, want = model.logits(ids), m31.load(folder, backend="reference", max_context=256).logits(ids)
    assert float((got - want).abs().max()) < 1e-4 * float(want.abs().max())
    assert "swiglu_oai" not in model.fallback_calls
    assert model.fallback_calls["linear"] > 0


def test_an_op_that_does_not_exist(folder: Path, installed: Any) -> None:
    installed(MANIFEST.replace('"gather_rows"', '"gather_row"'))
    with pytest.raises(ManifestError, match=r"activation.*there is no op 'gather_row'.*did you mean 'gather_rows'"):
        m31.load(folder, backend="activation")
    with pytest.raises(ManifestError, match="fallback lists 'add' more than once"):
        installed(MANIFEST.replace('"add"', '"add", "add"'))


def test_weights_that_the_manifest_does_not_list(folder: Path, installed: Any) -> None:
    installed(MANIFEST.replace('weights = ["bfloat16", "float32", "mxfp8", "nvfp4"]', 'weights = ["float32", "mxfp8"]'))
    with pytest.raises(BackendRefused, match=r"does not take weights stored in bfloat16; expected float32 or"):
        m31.load(folder, backend="activation")


def test_a_spare_that_cannot_be_used(folder: Path, installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    installed()
    decide = sdk.decide
    nothing = select(sdk.this_machine(), (), "reference")
    monkeypatch.setattr(sdk, "decide", lambda choice=None: nothing if choice == "reference" else decide(choice))
    with pytest.raises(BackendRefused, match=r"leaves 19 ops to 'reference', which cannot be used: .*allow"):
        m31.load(folder, backend="activation")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("device", "cpu", "has device 'cpu'"),
        ("dtypes", {"model": 1, "int64": 1}, r"has device .* and dtypes for \['int64', 'model'\]"),
        ("notes", property(lambda self: "one string"), "has notes 'one string'"),
        ("fusions", lambda self: ("qkv",), "wants the fusion 'qkv'"),
    ],
)
def test_a_session_of_other_types(folder: Path, installed: Any, name: str, value: Any, text: str) -> None:
    module = installed()
    session = module["ActivationSession"]
    if name in ("notes", "fusions"):
        setattr(session, name, value)
    else:
        real = session.__init__

        def init(self: Any, numerics: Any) -> None:
            real(self, numerics)
            setattr(self, name, value)

        session.__init__ = init
    with pytest.raises(ContractViolation, match=f"activation: breaks the rule 'opened': {text}"):
        m31.load(folder, backend="activation")


def test_a_session_without_its_attributes(folder: Path, installed: Any) -> None:
    module = installed()
    module["ActivationSession"].__init__ = lambda self, numerics: None
    with pytest.raises(ContractViolation, match="'opened': has no device, dtypes, numerics; expected all three"):
        m31.load(folder, backend="activation")


@pytest.mark.parametrize(
    "given",
    [{"dtype": 3}, {"kv_dtype": 5}, {"arithmetic": 7}, {"max_context": "a"}, {"max_context": 0}],
)
def test_arguments_of_another_type(folder: Path, given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(RequestError, match=f"{name} is .*; expected a (name|whole number from 1 on), or None"):
        m31.load(folder, **given)
