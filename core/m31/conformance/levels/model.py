"""L3: a whole model. Op by op on the reference's values, and end to end against the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path

from m31.checkpoint import Checkpoint, bundled
from m31.conformance import agreement, layers, oracle
from m31.conformance.bench import Bench
from m31.conformance.item import Evidence, Item, Verdict
from m31.conformance.layers import CACHED, PREFILL, VERIFIED
from m31.conformance.levels.forms import CHECKPOINTS, arithmetics, checkpoints, pages, prompt, shown
from m31.conformance.rig import Forms, Rig, Run, opened_for
from m31.conformance.synthetic import VOCAB_SIZE, config
from m31.errors import NotACheckpoint
from m31.graph import ModelGraph
from m31.sdk.manifest import Manifest

_DEFAULT = Forms()


def items(manifest: Manifest) -> Iterator[Item]:
    """By checkpoint, step and layer; then by every format and arithmetic that is claimed."""
    kinds = ["prefill", "decode", *(["verify"] if manifest.limits.draft_tokens >= VERIFIED - 1 else [])]
    for name in checkpoints(manifest):
        for kind in kinds:
            for layer in (*range(config()["num_hidden_layers"]), -1):
                case = f"L3/layers/{name}/{kind}/{'ends' if layer < 0 else f'layer-{layer}'}"
                yield Item(
                    id=case,
                    level="L3",
                    subject="layers",
                    format=CHECKPOINTS[name],
                    criterion="bound",
                    claims=(),
                    attributes={"checkpoint": name, "step": kind, "layer": layer},
                    execute=partial(_layer, name, kind, layer),
                    judge=partial(_judge_layer, case, name),
                    seconds=1 if kind == "prefill" else 2,
                )
    yield from _agreements(manifest)


def _agreements(manifest: Manifest) -> Iterator[Item]:
    asked: dict[tuple[str, Forms], tuple[str, ...]] = {}
    names = checkpoints(manifest)
    for name in names:
        asked[name, _DEFAULT] = (f"weights:{CHECKPOINTS[name]}",)
    for name in names[:1]:
        for dtype in manifest.formats.compute:
            asked[name, Forms(dtype=dtype)] = (f"compute:{dtype}",)
        for arithmetic in arithmetics(manifest):
            asked[name, Forms(arithmetic=arithmetic)] = (f"arithmetic:{arithmetic}",)
        for claim, forms in pages(manifest):
            asked[name, forms] = (claim,)
    for (name, forms), claims in asked.items():
        case = f"L3/agreement/{name}/{shown(forms)}" + (f"/{claims[0].partition(':')[0]}" if forms.label else "")
        yield Item(
            id=case,
            level="L3",
            subject="agreement",
            format=forms.kv or forms.index or CHECKPOINTS[name],
            criterion="agreement",
            claims=claims,
            attributes={"checkpoint": name, "forms": forms.label},
            execute=partial(_logits, name, forms),
            judge=partial(_judge_logits, case, name, forms),
            seconds=2,
        )

    if packaged() is not None:
        yield Item(
            id="L3/agreement/nano/default",
            level="L3",
            subject="agreement",
            format=manifest.formats.kv[0],
            criterion="agreement",
            claims=(),
            attributes={"checkpoint": "nano", "forms": ""},
            execute=_nano,
            judge=_judge_nano,
            seconds=20,
        )


def packaged() -> Path | None:
    """The folder of the checkpoint that comes with m31; None in a source tree without it."""
    try:
        return bundled.folder()
    except NotACheckpoint:
        return None


def _nano_texts(place: Path) -> Sequence[Sequence[int]]:
    text = Checkpoint.open(place).config.text
    return (prompt("L3/nano", PREFILL, text.vocab_size),)


def _nano(bench: Bench) -> Evidence:
    place = bundled.folder()
    return agreement.run(bench, place, _DEFAULT, _nano_texts(place))


def _judge_nano(evidence: Evidence) -> Verdict:
    place = bundled.folder()
    return agreement.judge("L3/agreement/nano/default", place, _nano_texts(place), evidence)


def _ids(count: int) -> list[int]:
    return prompt(f"L3/prompt-{count}", count, VOCAB_SIZE)


# --- op by op -------------------------------------------------------------------------------------------------------

_STEPS = {"prefill": (0, PREFILL, "mixed"), "decode": (CACHED, 1, "decode"), "verify": (CACHED, VERIFIED, "verify")}


def _layer(name: str, kind: str, layer: int, bench: Bench) -> Evidence:
    folder = bench.checkpoint(name)
    done, count, step = _STEPS[kind]

    def begun() -> tuple[Rig, Run]:
        spec, numerics = opened.opened.spec, opened.serving.session.numerics
        forms = Forms(kv=spec.kv_format, index=spec.index_format, arithmetic=numerics.name)
        return layers.reference_run(folder, forms, _ids(done + (VERIFIED if done else count)), done)

    def values() -> layers.Values:
        return layers.reference_values(*bench.once(("begun", name, done), begun), count, kind=step)

    opened = bench.once(("opened", name), lambda: Rig(bench, folder, _DEFAULT, pages=1))
    return layers.run_layer(bench, folder, _DEFAULT, layer, bench.once(("values", name, kind), values))


def _judge_layer(case: str, name: str, evidence: Evidence) -> Verdict:
    facts = evidence.facts
    graph = _graph(name, facts["compute"], facts["kv"], facts["index"], facts["arithmetic"])
    return layers.judge_layer(graph, case, evidence)


@lru_cache(maxsize=8)
def _graph(name: str, compute: str, kv: str, index: str, arithmetic: str) -> ModelGraph:
    """The graph of a session that computes so; its description needs no backend but the reference."""
    bench = oracle.bench()
    opened = opened_for(
        bench, bench.checkpoint(name), Forms(dtype="float64", kv=kv, index=index, arithmetic=arithmetic)
    )
    return layers.graph_for(opened, compute)


# --- end to end -----------------------------------------------------------------------------------------------------


def _logits(name: str, forms: Forms, bench: Bench) -> Evidence:
    return agreement.run(bench, bench.checkpoint(name), forms, _prompts(forms))


def _judge_logits(case: str, name: str, forms: Forms, evidence: Evidence) -> Verdict:
    return agreement.judge(case, _folder(name), _prompts(forms), evidence)


def _folder(name: str) -> Path:
    return oracle.bench().checkpoint(name)


def _prompts(forms: Forms) -> Sequence[Sequence[int]]:
    """Of a format of index keys one text of more than 16 blocks: before that every block is selected."""
    if forms.index is not None:
        return (_ids(CACHED),)
    return (_ids(200), _ids(90))
