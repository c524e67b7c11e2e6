"""`m31 new-backend`: what it writes works as it is; `m31 lint-backend`: what it finds."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from m31 import ops
from m31.cli import new_backend
from m31.cli.main import main
from m31.conformance import check_op
from m31.conformance.bench import Bench
from m31.conformance.catalog import collect
from m31.conformance.item import NotRun
from m31.conformance.lint import lint
from m31.errors import RequestError
from m31.sdk.manifest import read_manifest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A new backend, which can be imported."""
    folder = tmp_path / "made"
    assert main(["new-backend", "two-words", "--dir", str(folder)]) == 0
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name in [n for n in sys.modules if n.partition(".")[0] == "m31_two_words"]:
        del sys.modules[name]


def bench(folder: Path, scratch: Path) -> Bench:
    module = importlib.import_module("m31_two_words")
    return Bench(module.TwoWordsBackend(read_manifest(folder / "m31_two_words" / "backend.toml")), scratch=scratch)


def test_what_is_written_passes_level_0(made: Path, tmp_path: Path) -> None:
    own = bench(made, tmp_path / "scratch")
    ran = []
    for item in collect(own.manifest, ("L0",)):
        try:
            item.judge(item.execute(own))
        except NotRun:
            continue
        ran.append(item.id)
    assert "L0/open/float32" in ran
    assert "L0/rule/weights/random-m31/gemma_rmsnorm" in ran


def test_its_op_is_right_and_a_model_runs(made: Path, tmp_path: Path) -> None:
    own = bench(made, tmp_path / "scratch")
    done = check_op(own.session(), ops.gemma_rmsnorm)
    assert done.ran
    assert not done.refused
    prompt = [5, 6, 7]
    model = own.load(own.checkpoint("random-m31"), max_context=256)
    wanted = Bench("reference", scratch=tmp_path / "scratch").load(own.checkpoint("random-m31"), max_context=256)
    assert (model.logits(prompt) - wanted.logits(prompt)).abs().max() < 1e-4
    assert "linear" in model.fallback_calls
    assert "gemma_rmsnorm" not in model.fallback_calls


SECOND = """
        if op.spec.name == "swiglu_oai":
            alpha, beta, limit = (op.attrs[name] for name in ("alpha", "beta", "limit"))

            def activate(outs: Sequence[Any], ins: Sequence[Any], weights: None, space: torch.Tensor | None) -> None:
                gate, up = ins[0].clamp(max=limit), ins[1].clamp(-limit, limit)
                torch.mul((up + beta) * gate, torch.sigmoid(alpha * gate), out=outs[0])

            exact = Arithmetic("float32", "float32", "float32")
            return Kernel(name="swiglu", run=activate, arithmetic=exact, workspace_bytes=0, why="the only one")
"""


def test_a_second_op_by_the_documentation_alone(made: Path, tmp_path: Path) -> None:
    """What docs/writing-a-backend.md says in section 4: answer `kernel`, move the name, run the op's items."""
    source, manifest = made / "m31_two_words" / "session.py", made / "m31_two_words" / "backend.toml"
    before = '        if op.spec.name != "gemma_rmsnorm":'
    assert before in source.read_text()
    source.write_text(source.read_text().replace(before, SECOND.lstrip("\n") + before))
    text = manifest.read_text().replace('"swiglu_oai", ', "")
    manifest.write_text(text.replace('ops = ["gemma_rmsnorm"]', 'ops = ["gemma_rmsnorm", "swiglu_oai"]'))
    assert [f for f in lint(made) if f.kind == "error"] == []
    own = bench(made, tmp_path / "scratch")
    assert own.manifest.ops == ("gemma_rmsnorm", "swiglu_oai")
    items = collect(own.manifest, ("L1",), "L1/swiglu_oai or L1/gemma_rmsnorm")
    verdicts = [item.judge(item.execute(own)) for item in items]  # none is refused, none fails
    assert {item.subject for item in items} == {"gemma_rmsnorm", "swiglu_oai"}
    assert len(verdicts) > 40
    assert max(verdict.margin or 0 for verdict in verdicts) > 0


def test_nothing_of_the_template_is_left(made: Path) -> None:
    files = [path for path in made.rglob("*") if path.is_file()]
    assert {"pyproject.toml", "README.md", "expect.toml", "conformance.yml", "session.py"} <= {p.name for p in files}
    assert [p for p in files if "@NAME@" in p.read_text() or "@PACKAGE@" in p.read_text()] == []
    fields = ("@CLASS@", "@SESSION@", "@DISTRIBUTION@")
    assert [p for p in files if any(field in p.read_text() for field in fields)] == []
    assert len(files) == len(new_backend._FILES)


def test_what_is_written_is_clean(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint-backend", str(made)]) == 0
    assert "0 errors, 0 notes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Foo", "did you mean 'foo'?"),
        ("a_b", "did you mean 'a-b'?"),
        ("", "cannot be the name"),
        ("9x", "cannot be the name"),
        ("a--b", "cannot be the name"),
        ("../x", "cannot be the name"),
        ("x" * 41, "cannot be the name"),
        ("class", "means something else"),
        ("auto", "means something else"),
        ("reference", "there is a backend 'reference' already, of m31 "),
    ],
)
def test_names_that_cannot_be(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        new_backend.checked(name)
    assert said in str(caught.value)


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    with pytest.raises(RequestError, match="exists"):
        new_backend.write(tmp_path / "here", "x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(RequestError, match="exists"):
        new_backend.write(tmp_path / "link", "x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["here", "link"]


def test_nothing_is_left_of_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(RequestError, match="cannot be written: No space left"):
        new_backend.write(tmp_path / "here", "x")
    assert list(tmp_path.iterdir()) == []


# --- lint -----------------------------------------------------------------------------------------------------------


def found(folder: Path, source: str) -> list[str]:
    """What is said of a module with this source, without the folder."""
    (folder / "m31_two_words" / "extra.py").write_text(source)
    return [str(f).removeprefix(f"{folder}/") for f in lint(folder)]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import m31.engine\n", "extra.py:1: error: imports 'm31.engine', which is no part of the SDK"),
        ("from m31.engine.model import Model\n", "'m31.engine.model.Model', which is no part of the SDK"),
        ("from m31.sdk.backend import Session\n", "import it from m31.sdk"),
        ("from m31.parallel import Shard\n", "import it from m31.graph"),
        ("from m31.graph.plan import _narrowed\n", "a private name of m31"),
        ("from m31 import engine\n", "'m31.engine', which is no part of the SDK"),
        ("from m31.graph import NoSuchThing\n", "'m31.graph.NoSuchThing', which is no part of the SDK"),
        ("def f():\n    from m31.engine import api\n", "extra.py:2: error"),
        ("from importlib import import_module\nimport_module('m31.engine.api')\n", "extra.py:2: error"),
        ("import m31.graph\nx = m31.graph._private\n", "uses 'm31.graph._private'"),
        ("from m31.sdk import Session\nx = Session._secret\n", "uses 'Session._secret'"),
        ("import m31_reference\n", "imports the backend 'm31_reference'; list the op under fallback"),
        ("from m31.formats import _blocks\n", "a private name of m31"),
        ("def broken(:\n", "extra.py:1: error: no Python source"),
    ],
)
def test_names_that_are_not_public(made: Path, source: str, said: str) -> None:
    (one,) = found(made, source)
    assert said in one


@pytest.mark.parametrize(
    "source",
    [
        "import m31\nfrom m31 import ops, sdk\nprint(m31.__version__)\n",
        "from m31.graph import Kernel, Refusal, Shard\nfrom m31.ops.fused import FUSED\n",
        "from m31.formats import nvfp4\nfrom m31.formats.scales import check_scale\n",
        "from m31.errors import BackendRefused\nfrom m31.config import Model\nimport numpy as np\n",
        "class A:\n    def f(self):\n        return self._own\n",
        "from m31_two_words import TwoWordsBackend\nfrom . import session\n",
    ],
)
def test_names_that_are_public(made: Path, source: str) -> None:
    assert found(made, source) == []


def test_a_name_that_the_version_does_not_hold_is_a_note(made: Path) -> None:
    (one,) = found(made, "from m31.config import Text\n")
    assert "note: 'm31.config.Text'" in one
    assert main(["lint-backend", str(made)]) == 0


@pytest.mark.parametrize(
    ("file", "before", "after", "said"),
    [
        ("backend.toml", 'ops = ["gemma_rmsnorm"]', 'ops = ["gemma_norm"]', "there is no op 'gemma_norm'"),
        ("backend.toml", 'requires = ">=1.0,<2"', 'requires = ">=7"', "requires API >=7"),
        (
            "backend.toml",
            'name = "two-words"',
            'name = "other"',
            "the name is 'other', and the entry point",
        ),
        ("backend.toml", "score = 1 ", "scores = 1 ", "scores"),
        (
            "backend.toml",
            '"linear", ',
            "",
            "note: neither served nor left to the reference",
        ),
        ("pyproject.toml", 'packages = ["m31_two_words"]', 'packages = ["other"]', "the wheel has ['other']"),
        ("pyproject.toml", "m31_two_words:TwoWords", "m31_two_words:ThreeWords", "there is no 'ThreeWordsBackend'"),
        ("pyproject.toml", '"m31.backends"', '"m31.backend"', 'no entry point in the group "m31.backends"'),
        ("pyproject.toml", '"hatchling.build"', '"setuptools.build_meta"', "does not get into the wheel"),
    ],
)
def test_manifests_that_are_not_found(made: Path, file: str, before: str, after: str, said: str) -> None:
    path = made / file if file == "pyproject.toml" else made / "m31_two_words" / file
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    assert any(said in str(finding) for finding in lint(made)), [str(f) for f in lint(made)]


def test_no_manifest_at_all(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (made / "m31_two_words" / "backend.toml").unlink()
    assert main(["lint-backend", str(made), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["errors"] == 1
    assert said["findings"][0]["what"] == "there is no manifest"


@pytest.mark.parametrize(
    "folder", [*sorted(p.name for p in (ROOT / "backends").iterdir() if p.is_dir()), "../examples/numpy_backend"]
)
def test_our_own_backends_keep_to_the_sdk(folder: str) -> None:
    assert [str(f) for f in lint(ROOT / "backends" / folder) if f.kind == "error"] == []


def test_there_has_to_be_a_package(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no Python package"):
        lint(tmp_path)
    with pytest.raises(RequestError, match="no folder"):
        lint(tmp_path / "nowhere")


def test_a_line_is_told_once_and_a_damaged_project_file_is_named(tmp_path: Path) -> None:
    package = tmp_path / "m31_mine"
    package.mkdir()
    (package / "__init__.py").write_text("from m31_reference.session import ReferenceBackend, ReferenceSession\n")
    found = [entry for entry in lint(tmp_path) if "imports the backend" in str(entry)]
    assert len(found) == 1
    (tmp_path / "pyproject.toml").write_text("[project\n")
    with pytest.raises(RequestError, match=r"pyproject\.toml.*not valid TOML"):
        lint(tmp_path)
