"""The training text: what belongs to it, where each file goes, and that equal text gives an equal digest."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from training_helpers import other_environment, small_corpus, small_library

from m31.errors import CorpusError
from m31.training import corpus


@pytest.fixture(scope="module")
def installed() -> corpus.Corpus:
    return corpus.load()


def write(root: Path, **files: bytes) -> None:
    for name, data in files.items():
        path = root / name.replace("__", "/").replace("_py", ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def test_the_installed_library_is_enough_and_is_python(installed: corpus.Corpus) -> None:
    counts = installed.describe()
    total = sum(numbers["bytes"] for numbers in counts.values())
    assert total > 2 * corpus.MIN_BYTES
    for split in ("validation", "test"):
        assert 0.015 < counts[split]["bytes"] / total < 0.05
        assert counts[split]["files"] >= 12
    assert installed.python.endswith(".".join(map(str, sys.version_info[:3])))
    for document in installed.split("test"):
        ast.parse(document.text)


def test_splits_are_files_and_disjoint(installed: corpus.Corpus) -> None:
    paths = [{document.path for document in installed.split(split)} for split in corpus.SPLITS]
    assert sum(map(len, paths)) == len(set.union(*paths)) == len(installed.documents)
    assert all(document.split == corpus.split_of(document.path) for document in installed.documents)
    assert all(len(document.text.encode()) == document.size > 0 for document in installed.documents)
    assert [d.path for d in installed.documents] == sorted((d.path for d in installed.documents), key=str.encode)


def test_a_file_stays_in_its_split() -> None:
    """Pinned: a model trained yesterday must not have seen what is a test file today."""
    expected = {"lzma.py": "test", "this.py": "test", "shutil.py": "validation", "abc.py": "validation"}
    assert {path: corpus.split_of(path) for path in expected} == expected
    shares = [corpus.split_of(f"package/module_{i}.py") for i in range(20_000)]
    assert 0.93 < shares.count("train") / 20_000 < 0.95
    assert 0.025 < shares.count("test") / 20_000 < 0.035


def test_what_does_not_belong_is_left_out(installed: corpus.Corpus) -> None:
    folders = {part for document in installed.documents for part in document.path.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "__pycache__", "encodings", "pydoc_data"}
    assert not [d.path for d in installed.documents if d.path.startswith(("_sysconfigdata", "config-"))]
    assert {"asyncio", "json"} <= folders


def test_left_out_by_name_and_by_content(tmp_path: Path) -> None:
    good = b"x = 1\n"
    write(tmp_path, a_py=good, pkg__b_py="s = 'é'\r\n".encode(), pkg__c_txt=good, pkg__empty_py=b"")
    write(
        tmp_path, pkg__latin_py=b"# \xe9\n", pkg__tests__t_py=good, encodings__e_py=good, pkg__encodings__kept_py=good
    )
    write(tmp_path, sitecustomize_py=good)
    for name in ("_sysconfigdata_x.py", "config-3/python-config.py", "html/entities.py", "site-packages/m/z.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(good)
    found = corpus.load(tmp_path, min_bytes=1, min_split_bytes=0)
    assert [d.path for d in found.documents] == ["a.py", "pkg/b.py", "pkg/encodings/kept.py"]
    assert found.skipped == ("pkg/latin.py",)
    assert found.documents[1].text == "s = 'é'\r\n"
    assert found.documents[1].size == 10


def test_the_digest_is_of_paths_and_bytes(tmp_path: Path) -> None:
    first, second = small_corpus(tmp_path / "a"), small_corpus(tmp_path / "b")
    assert first.digest == second.digest
    assert len(first.digest) == 32

    def digest() -> str:
        return corpus.load(tmp_path / "b", min_bytes=1, min_split_bytes=0).digest

    target = tmp_path / "b" / "copy.py"
    data = target.read_bytes()
    target.write_bytes(data + b"\n")
    assert digest() != first.digest
    target.write_bytes(data)
    assert digest() == first.digest
    os.utime(target, (1, 1))
    assert digest() == first.digest
    target.rename(target.with_name("copi.py"))
    assert digest() != first.digest
    (tmp_path / "b" / "copi.py").rename(target)
    (tmp_path / "b" / "notes.txt").write_text("not a source")
    assert digest() == first.digest


def test_another_process_with_another_hash_seed_and_locale_finds_the_same(installed: corpus.Corpus) -> None:
    code = "from m31.training import corpus; print(corpus.load().digest)"
    done = subprocess.run([sys.executable, "-c", code], env=other_environment(), capture_output=True, text=True)
    assert done.stdout.strip() == installed.digest, done.stderr


def test_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zipped = tmp_path / "python311.zip"
    zipped.write_bytes(b"PK")
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(zipped))
    with pytest.raises(CorpusError, match=r"python311\.zip: .*not a folder.*not zipped or embedded.*another Python"):
        corpus.load()
    with pytest.raises(CorpusError, match="not a folder"):
        corpus.load(tmp_path / "nothing")


def test_too_little_text(tmp_path: Path) -> None:
    root = small_library(tmp_path)
    with pytest.raises(CorpusError, match=r"sources there have [\d,]+ bytes; expected at least 4,000,000"):
        corpus.load(root)
    with pytest.raises(CorpusError, match=r"the validation split has [\d,]+ bytes; expected at least 100,000"):
        corpus.load(root, min_bytes=1, min_split_bytes=100_000)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CorpusError, match="sources there have 0 bytes"):
        corpus.load(tmp_path / "empty")


def test_unreadable(tmp_path: Path) -> None:
    root = small_library(tmp_path)
    (root / "broken.py").symlink_to(root / "gone.py")
    with pytest.raises(CorpusError, match=r"broken\.py: cannot be read \(No such file"):
        corpus.load(root, min_bytes=1)
