"""`m31 convert` as a process: killed, raced, short of memory, at a terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.quantised import bf16_config, stored_tensors, write_bf16, write_draft

from m31.checkpoint import Checkpoint, convert
from m31.cli.main import main
from m31.errors import DestinationBusy

LIMIT = 120  # seconds; anything slower hangs
ENV = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}

# argv: source, destination, then what happens after how many calls of progress.
_PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from m31.checkpoint import convert
source, goal, what, after = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
calls = 0
def progress(step):
    global calls
    calls += 1
    if calls == after and what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if calls == after and what == "wait":
        Path(goal + ".started").write_text("")
        while not Path(goal + ".go").exists():
            time.sleep(0.01)
convert(source, goal, target="m31", max_shard_bytes=40_000, input_scales={}, progress=progress)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_bf16(tmp_path_factory.mktemp("source") / "ckpt", bf16_config()).folder
    write_draft(folder / "dspark")
    return folder


@pytest.fixture(scope="module")
def wanted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    goal = tmp_path_factory.mktemp("wanted") / "ckpt"
    return stored_tensors(convert(source, goal, target="m31", max_shard_bytes=40_000, input_scales={}))


def start(*words: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _PROGRAM, *map(str, words)]
    return subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def equal(folder: Path, wanted: dict[str, torch.Tensor]) -> None:
    found = stored_tensors(Checkpoint.open(folder))
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


def test_kill_9_and_resume(source: Path, wanted: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Killed again and again, each time a little later; the destination is never there until it is whole."""
    goal = tmp_path / "x"
    work = tmp_path / ".x.m31-convert"
    finished = 0
    for after in (1, 50, 20):
        process = start(source, goal, "kill", after)
        process.communicate(timeout=LIMIT)
        assert process.returncode == -signal.SIGKILL
        assert not goal.exists()
        count = len(list(work.glob("*.safetensors")))
        assert count >= finished
        finished = count
    assert finished >= 1
    process = start(source, goal, "run", 0)
    assert process.communicate(timeout=LIMIT) == (b"", b"")
    equal(goal, wanted)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_of_two_writers_one_wins_and_the_other_says_so(
    source: Path, wanted: dict[str, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    goal = tmp_path / "x"
    process = start(source, goal, "wait", 5)
    deadline = time.monotonic() + LIMIT
    while not Path(f"{goal}.started").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    assert main(["convert", str(source), str(goal), "--format", "m31"]) == 1
    assert (
        f"m31: error: {goal}: is being written by another process; expected one writer; wait for it, or choose another"
        in capsys.readouterr().err
    )
    with pytest.raises(DestinationBusy):
        convert(source, goal, target="bf16", max_shard_bytes=10**6, input_scales={})
    Path(f"{goal}.go").write_text("")
    assert process.communicate(timeout=LIMIT) == (b"", b"")
    equal(goal, wanted)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "x.go", "x.started"]
    assert main(["convert", str(source), str(goal), "--format", "m31"]) == 1
    assert "is not empty; choose another folder or delete it first" in capsys.readouterr().err


def test_a_race_has_one_winner(source: Path, wanted: dict[str, torch.Tensor], tmp_path: Path) -> None:
    processes = [start(source, tmp_path / "x", "run", 0) for _ in range(3)]
    ends = [process.communicate(timeout=LIMIT)[1].decode() for process in processes]
    codes = [process.returncode for process in processes]
    assert codes.count(0) == 1, ends
    for code, text in zip(codes, ends, strict=True):
        assert code == 0 or "DestinationBusy" in text or "is not empty" in text
    equal(tmp_path / "x", wanted)


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """An embedding of 51 MB passes through pieces of 1 MiB: no more than a few of them are ever ours."""
    mapping = bf16_config() | {"vocab_size": 400_000}
    write_bf16(tmp_path / "s", mapping, shard=10**9)
    program = f"""
import m31.checkpoint.encoding as encoding, torch
from m31.checkpoint import convert
from m31.formats import mxfp8, nvfp4
torch.set_num_threads(1)
encoding.CHUNK = 2**18
def anonymous():
    text = open("/proc/self/status").read()
    return int(text[text.index("RssAnon:") + 8 :].split()[0]) * 1024
seen = []
convert({str(tmp_path / "s")!r}, {str(tmp_path / "x")!r}, target="bf16", max_shard_bytes=10**9, input_scales={{}},
        progress=lambda step: seen.append(anonymous()))
print(max(seen) - seen[0])
"""
    run = subprocess.run([sys.executable, "-c", program], env=ENV, capture_output=True, text=True, check=True)
    assert int(run.stdout) < 24 * 2**20


def test_bar_at_a_terminal(source: Path, tmp_path: Path) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "m31.cli", "convert", str(source), str(tmp_path / "x"), "--format", "m3-mxfp8"]
    process = subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=slave)
    os.close(slave)
    shown = b""
    while process.poll() is None or select.select([master], [], [], 0)[0]:
        if select.select([master], [], [], 0.1)[0]:
            try:
                shown += os.read(master, 65536)
            except OSError:  # the other side is closed
                break
    process.wait(LIMIT)
    os.close(master)
    assert process.returncode == 0
    text = shown.decode()
    assert "[==============================] 100%  0.0 of 0.0 GB, 0 s left" in text
    last = text.split("\r")[-2]
    assert last.startswith(f"m31: wrote {tmp_path / 'x'}: 0.000 GB in ")


def test_no_bar_elsewhere(source: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["convert", str(source), str(tmp_path / "x"), "--format", "bf16"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"m31: wrote {tmp_path / 'x'}: ")
    assert captured.err.endswith(" tensors (bf16), 1 file(s)\n")
    assert "\r" not in captured.err
    assert main(["convert", str(source), str(tmp_path / "y"), "--format", "gguf"]) == 2
    assert "invalid choice: 'gguf'" in capsys.readouterr().err
