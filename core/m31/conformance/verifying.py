"""`m31 conform verify`: whether an archive is what it says, and whether a sample of it holds here with fresh seeds."""

from __future__ import annotations

import datetime
import json
import random
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from m31.conformance import catalog, expectations, packing, provenance, report
from m31.conformance.item import LEVELS, Result
from m31.conformance.report import document
from m31.conformance.report.schema import faults
from m31.conformance.running import journal
from m31.conformance.running.pool import Pool
from m31.conformance.running.setup import Setup, manifest_of
from m31.errors import BackendError, SuiteError

SAMPLE = 20


@dataclass(frozen=True)
class Check:
    """Something that was looked at. `ok` is None where it could not be checked, or is for the reader to judge."""

    name: str
    ok: bool | None
    text: str


@dataclass
class Verification:
    """All that was looked at, in order.

    Attributes:
        checks: see `Check`.
        verdict: the sentence of the archive's report, as recomputed from its journal.
        salt, sample: of the items that were run again, and what became of them.
    """

    checks: list[Check] = field(default_factory=list)
    verdict: str = ""
    salt: str = ""
    sample: list[Result] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Nothing that could be checked is wrong."""
        return all(check.ok is not False for check in self.checks)

    def add(self, name: str, ok: bool | None, text: str) -> None:
        """Note a check."""
        self.checks.append(Check(name, ok, text))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "checks": [{"name": check.name, "ok": check.ok, "text": check.text} for check in self.checks],
            "salt": self.salt,
            "sample": [journal.result_dict(result) for result in self.sample],
        }


def verify(
    path: Path,
    *,
    sample: int = SAMPLE,
    backend: str | None = None,
    device: str | None = None,
    checkpoint: str | None = None,
    salt: str | None = None,
    source: str = catalog.SOURCE,
    today: datetime.date | None = None,
) -> Verification:
    """Check an archive. Nothing that it names is imported but an installed backend of the name that it has.

    Args:
        path: of `m31 conform pack`.
        sample: items that passed there, to be run here with fresh seeds; 0 runs none.
        backend: to run them on; the installed one of the archive's name by default.
        device, checkpoint, source: see `Setup`.
        salt: of the fresh seeds and of the choice of the sample; random unless given.
        today: waivers must not have expired on it.

    Raises: SuiteError: it is no archive at all.
    """
    done = Verification()
    files = packing.unpack(path)
    missing = [name for name in packing.REQUIRED if name not in files]
    done.add("files", not missing, f"without {', '.join(missing)}" if missing else f"{len(files)} files")
    if missing:
        return done
    same = packing.digests(files) == files[packing.DIGESTS]
    done.add("digests", same, "SHA-256 of every file is as stated" if same else "a file is not the one that was packed")
    try:
        about, stated = json.loads(files[packing.ABOUT]), json.loads(files[report.JSON])
        run = journal.parse(files[journal.NAME].decode(), where=journal.NAME)
        made = _recomputed(done, files, about, stated, run)
    except (SuiteError, ValueError, KeyError, TypeError) as error:
        done.add("content", False, f"{type(error).__name__}: {error}")
        return done
    done.verdict = made["verdict"]["sentence"]
    _sources(done, made, about)
    _waivers(done, run, today or datetime.date.today())
    if done.ok:
        _again(done, run, sample, backend, device, checkpoint, secrets.token_hex(8) if salt is None else salt, source)
    else:
        done.add("sample", None, "nothing was run: what the archive says is not to be relied on")
    return done


def _recomputed(
    done: Verification, files: dict[str, bytes], about: dict[str, Any], stated: dict[str, Any], run: journal.Run
) -> dict[str, Any]:
    found = list(faults(stated, document.schema()))
    done.add("schema", not found, found[0] if found else f"report.json follows version {document.VERSION}")
    made = document.build(run, today=datetime.date.fromisoformat(about["packed"]))
    wrong = [name for name, data in report.render(made).items() if files[name] != data]
    software = made["provenance"]["software"]
    same_program = (software["m31"], software["suite"]) == (_here()["m31"], _here()["suite"])
    judged_same = stated.get("verdict") == made["verdict"] and stated.get("results") == made["results"]
    if judged_same and (not wrong or not same_program):
        done.add("verdict", True, "recomputed from the journal, the same: " + made["verdict"]["sentence"])
    else:
        done.add("verdict", False, f"recomputed from the journal, {', '.join(wrong) or 'the verdict'} differs")
    extra = [
        name
        for name, data in (
            (packing.STATEMENT, packing.statement(made, about).encode()),
            (packing.EXPECT, run.header["expect"].encode()),
        )
        if files.get(name, b"") != data
    ]
    done.add("statement", not extra, f"{', '.join(extra)} differs" if extra else "says what the report says")
    return made


def _here() -> dict[str, Any]:
    return provenance.software()


def _sources(done: Verification, made: dict[str, Any], about: dict[str, Any]) -> None:
    theirs, ours = made["provenance"]["software"], _here()
    same = theirs["suite"] == ours["suite"]
    text = f"made with m31 {theirs['m31']}, suite {theirs['suite']}; here m31 {ours['m31']}, suite {ours['suite']}"
    done.add("version", True if same else None, text)
    changed = packing.dirty(made["provenance"])
    if changed != about["dirty"] or (changed and not about["allow_dirty"]):
        done.add("sources", False, "the archive does not say what its report says of changed sources")
    elif changed:
        done.add("sources", None, f"{' and '.join(changed)} had changes that no commit has; packed with --allow-dirty")
    else:
        done.add("sources", True, "no changes beside what commits or installed packages have")


def _waivers(done: Verification, run: journal.Run, today: datetime.date) -> None:
    expected = expectations.parse(run.header["expect"])
    expired = expected.expired(today)
    text = "; ".join(expired) if expired else f"{len(expected.entries)} entries of expect.toml, none expired"
    done.add("expectations", not expired, text)


def _again(
    done: Verification,
    run: journal.Run,
    sample: int,
    backend: str | None,
    device: str | None,
    checkpoint: str | None,
    salt: str,
    source: str,
) -> None:
    if sample == 0:
        done.add("sample", None, "nothing was run again, as asked")
        return
    name = backend or run.header["manifest"]["name"]
    setup = Setup(backend=name, device=device, level="L4", checkpoint=checkpoint, salt=salt, source=source)
    try:
        manifest = manifest_of(name)
    except BackendError as error:
        done.add("sample", None, f"nothing could be run again here: {error}")
        return
    same = provenance.manifest_hash(manifest) == run.header["provenance"]["backend"]["manifest_sha256"]
    done.add("manifest", True if same else None, f"that of the backend here is {'the same' if same else 'another'}")
    items = {item.id: item for item in catalog.collect(manifest, LEVELS, checkpoint=setup.folder, source=source)}
    passed = [result.id for result in run.results if result.outcome == "passed"]
    here = [name for name in passed if name in items]
    if len(here) < len(passed):
        done.add("catalog", None, f"{len(passed) - len(here):,} items that passed there do not exist here")
    chosen = sorted(random.Random(salt).sample(here, min(sample, len(here))), key=here.index)
    if not chosen:
        done.add("sample", False, "no item passed there that exists here")
        return
    done.salt = salt

    def keep(result: Result) -> bool:
        done.sample.append(result)
        return True

    try:
        Pool(setup, manifest, seeds=lambda _: 0).run([items[name] for name in chosen], keep)
    except BackendError as error:
        done.add("sample", None, f"nothing could be run again here: {error}")
        return
    failed = [result.id for result in done.sample if result.outcome != "passed"]
    text = f"{len(chosen)} of {len(passed):,} passed items run again on '{name}' with the fresh seeds of salt '{salt}'"
    done.add("sample", not failed, f"{text}: " + (f"not passed: {', '.join(failed)}" if failed else "all passed"))
