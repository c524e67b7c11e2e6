"""The traced model: counts of the published configs, the meta check, binding, step buffers."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
import torch
from tests.support import tiny

from m31 import checkpoint, config
from m31.errors import GraphError, NoKernel, OpRefused
from m31.graph import DefaultPlan, Kernel, OpInstance, Refusal, StepBatch, StepClass, assign, infer, trace
from m31.ops import TensorType
from m31.sdk.serving import Serving
from m31_reference.session import ReferenceBackend

STEP = StepClass(kind="mixed", q_len=0, tokens=8, seqs=2, rows=2, pages=16)


def session():  # type: ignore[no-untyped-def]
    return ReferenceBackend(None).open(device=None, dtype="float64", rank=0, world=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "weights"), [("m3.1-flash", 426_186_370_176), ("m3", 426_174_572_928)])
def test_published_models_trace_to_their_parameter_count(name: str, weights: int) -> None:
    """MODEL.md §3.7: with 865,567,232 of vision, M3.1 has 427,051,937,408. M3 lacks three index branches."""
    model = config.parse(config.published(name), where=name)  # type: ignore[arg-type]
    graph = trace(model.text)
    tensors = graph.meta_tensors()
    assert sum(t.numel() for t in tensors.values()) == weights
    counts = checkpoint.counts(model)
    assert counts.logical - weights == 865_567_232
    if name == "m3.1-flash":
        assert counts.logical == 427_051_937_408


def test_the_published_model_builds_in_little_memory() -> None:
    """DESIGN.md §6: the 428B graph is traced, shape-checked and instantiated on the meta device below 0.6 GB."""
    code = (
        "from m31 import config\n"
        "from m31.graph import trace\n"
        "graph = trace(config.parse(config.published('m3.1-flash'), where='published').text)\n"
        "assert len(graph.meta_tensors()) == 22905\n"
        # not ru_maxrss: a child inherits its parent's peak
        "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 0.6e9


@pytest.mark.parametrize("name", ["m3.1-flash", "m3"])
def test_the_graph_and_the_checkpoint_name_the_same_tensors(name: str) -> None:
    """Every text tensor of the inventory is used by exactly one op, with the shape that the inventory says."""
    plain = {**config.published(name)}  # type: ignore[arg-type]
    plain.pop("quantization_config", None)
    model = config.parse(plain, where=name)
    declared = {t.name: t.shape for t in trace(model.text).tensors()}
    stored = {
        n: tuple(d.shape)
        for n, d in checkpoint.expected(model).items()
        if n.startswith(("model.", "lm_head")) and ".mtp." not in n
    }
    assert declared == stored


def test_layer_kinds_become_ops() -> None:
    graph = trace(tiny.text(attention=("full", "sparse", "sparse", "full")))
    kinds = Counter(call.op.spec.name for call in graph.calls)
    assert (kinds["dense_attention"], kinds["sparse_attention"], kinds["block_select"]) == (2, 2, 2)
    assert (kinds["router"], kinds["experts"], kinds["kv_write"], kinds["index_write"]) == (2, 2, 4, 2)


def test_a_wrong_layout_is_refused_with_the_node() -> None:
    """BUG-1: layouts are compared by name; T equal to h does not help a wrong one through."""
    graph = trace(tiny.text())
    node = next(n for n in graph.fx.nodes if n.name == "tokens")
    node.meta["type"] = TensorType(("T",), "R", "int64")
    with pytest.raises(OpRefused, match=r"op embedding, node embedding.*layout 'R'.*expected 'T'"):
        infer(graph.fx)


def test_a_foreign_node_is_refused() -> None:
    graph = trace(tiny.text())
    last = list(graph.fx.nodes)[-1]
    with graph.fx.inserting_before(last):
        graph.fx.call_function(torch.relu, (next(iter(graph.fx.nodes)),))
    with pytest.raises(GraphError, match=r"relu.*no call of a declared op"):
        infer(graph.fx)


def test_a_model_without_the_part_that_a_layer_needs() -> None:
    with pytest.raises(GraphError, match="layer 0 is sparse but the model description has no sparse part"):
        trace(tiny.text(sparse=None))


class Lacking:
    """A session that refuses two ops."""

    def __init__(self) -> None:
        self.real = session()

    def kernel(self, op: OpInstance, step: StepClass) -> Kernel | Refusal:
        if op.spec.name in ("router", "experts"):
            return Refusal(f"no {op.spec.name} here")
        return self.real.kernel(op, step)


def test_binding_lists_every_op_that_a_backend_lacks() -> None:
    """BUG-113: reasons are shown, not thrown away; there is no silent fallback."""
    with pytest.raises(
        NoKernel, match=r"backend x: no kernel for experts \(no experts here\), router \(no router here\)"
    ):
        assign(trace(tiny.text()), Serving("x", Lacking()), STEP)  # type: ignore[arg-type]


def test_buffers_are_shared_between_values_that_do_not_overlap() -> None:
    """Twice the layers need no more buffers."""
    sizes = []
    for layers in (4, 8):
        description = tiny.text(num_layers=layers)
        engine = tiny.engine(description, tiny.weights(trace(description), 0), dtype="float64")
        session = engine.compiler.serving.session
        bound = engine.compiler.bind(STEP)
        sizes.append(DefaultPlan(bound, STEP, session.dtypes, session.device).buffer_bytes)
    assert sizes[0] == sizes[1]


def fill(batch: StepBatch, tokens: int, pages: int = 1) -> None:
    batch.fill(
        tokens=[5] * tokens,
        positions=list(range(tokens)),
        q_lens=[tokens],
        seq_lens=[tokens],
        slot_map=list(range(tokens)),
        page_table=[list(range(pages))],
        out_rows=[tokens - 1],
    )


def test_step_buffers_keep_their_addresses_and_pad() -> None:
    batch = StepBatch.allocate(STEP, torch.device("cpu"))
    addresses = {name: t.data_ptr() for name, t in batch.named().items()}
    fill(batch, 8, pages=2)
    fill(batch, 3)
    assert addresses == {name: t.data_ptr() for name, t in batch.named().items()}
    assert batch.slot_map.tolist() == [0, 1, 2, -1, -1, -1, -1, -1]
    assert batch.cu_q.tolist() == [0, 3, 3]
    assert batch.seq_lens.tolist() == [3, 0]
    assert batch.page_table[0].tolist() == [0] + [-1] * 15
    assert batch.tokens.tolist() == [5, 5, 5, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(("tokens", "pages"), [(9, 1), (3, 17)])
def test_a_step_beyond_its_class_is_refused(tokens: int, pages: int) -> None:
    batch = StepBatch.allocate(STEP, torch.device("cpu"))
    with pytest.raises(GraphError, match=r"exceed"):
        fill(batch, tokens, pages)


def test_inconsistent_steps_are_refused() -> None:
    batch = StepBatch.allocate(STEP, torch.device("cpu"))
    with pytest.raises(GraphError, match="2 tokens, 1 queries"):
        batch.fill(
            tokens=[1, 2], positions=[0, 1], q_lens=[1], seq_lens=[1], slot_map=[0, 1], page_table=[[0]], out_rows=[0]
        )
