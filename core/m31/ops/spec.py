"""How an op is declared: once, with everything that a backend, a reader and the conformance suite need.

An op is a name, a signature with **named layouts**, attributes without defaults, a shape function, a `naive`
definition in numpy float64 and a generator of cases. A layout is a comma-separated list of axis names and is never
guessed from a shape (BUG-1): a `T,h,D` tensor cannot be passed where `h,T,D` is declared even if T equals h.

Axis names: T tokens of the step, S sequences, R rows that get logits, P pages of a sequence (page-table width),
C channels, h heads, D channels of a head, K selected items, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from m31.errors import GraphError, OpRefused

Dim = int | str  # a number, or one of the step symbols T, S, R, P, S+1
DType = Literal[
    "model", "accum", "int64"
]  # compute dtype; its accumulation dtype (float32, or float64 with float64); indices
Attrs = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TensorType:
    """What flows along an edge of the graph: symbolic shape, layout and dtype; no storage."""

    shape: tuple[Dim, ...]
    layout: str
    dtype: DType

    def __post_init__(self) -> None:
        if len(self.shape) != (self.layout.count(",") + 1 if self.layout else 0):
            raise GraphError(f"shape {self.shape} does not have the axes of layout '{self.layout}'")


@dataclass(frozen=True, slots=True)
class TensorDecl:
    """One logical weight tensor.

    Args:
        name: canonical checkpoint name.
        shape: logical shape.
        axes: the axis along which each dimension shards: heads, kv_heads, index_heads, experts, ff, vocab or None.
        stored: how the checkpoint stores it: `mxfp8`, `nvfp4`, or the dtype of a plain one (`bfloat16`, `float32`).
            A kernel is chosen by it. None where a description is traced without a checkpoint.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    stored: str | None = None


@dataclass(frozen=True, slots=True)
class WeightDecl:
    """The weights of one op instance, by slot: `weight` for a single matrix; `w1.0`, `w3.0`, ... for experts."""

    name: str
    slots: Mapping[str, TensorDecl]

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True, slots=True)
class StateType:
    """The paged KV cache, threaded through the graph as a token: an op that writes it returns it (DESIGN.md §6).

    Args:
        name: of the state.
        kv_format, index_format: how pages store K and V, and index keys; a kernel is chosen by them. Empty where a
            description is traced without pages.
    """

    name: str
    kv_format: str = ""
    index_format: str = ""


ValueType = TensorType | WeightDecl | StateType


@dataclass(frozen=True, slots=True)
class Arg:
    """One input or output in an op's signature. `layout` is empty for weights and state."""

    name: str
    layout: str
    dtype: DType = "model"
    kind: Literal["data", "weight", "state"] = "data"


@dataclass(frozen=True, slots=True)
class Case:
    """One seeded example: everything that `naive` and a kernel need, in numpy float64 / int64.

    `state` lists the KV arrays by (layer, "k" | "v" | "index") for ops that read or write pages.
    """

    id: str
    attrs: Attrs
    inputs: Mapping[str, Any]
    state: Mapping[tuple[int, str], Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OpSpec:
    """The declaration of an op.

    Args:
        name: unique, snake_case.
        doc: formula and MODEL.md section.
        inputs, outputs: the signature; outputs are destinations given by the caller.
        attrs: names of the attributes; each must be given, there are no defaults (BUG-2).
        infer: types of the outputs from attributes and input types; raises OpRefused outside the domain.
        naive: numpy float64 definition, token by token: `naive(attrs, *inputs) -> tuple of outputs`.
        cases: seeded cases: ordinary, edge, adversarial.
        refuses: attribute/type combinations that `infer` must refuse: (reason, attrs, input types).
        criterion: how a kernel is judged: `exact`, or `bound` (derived from its declared arithmetic).
    """

    name: str
    doc: str
    inputs: tuple[Arg, ...]
    outputs: tuple[Arg, ...]
    attrs: tuple[str, ...]
    infer: Callable[[Attrs, Sequence[Any]], tuple[ValueType, ...]]
    naive: Callable[..., tuple[Any, ...]]
    cases: Callable[[], Iterator[Case]]
    refuses: tuple[tuple[str, Attrs, tuple[Any, ...]], ...]
    criterion: Literal["exact", "bound"]

    @property
    def __name__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __call__(self, *args: Any, **attrs: Any) -> Any:
        """Record a call of this op in the graph that is being traced. Returns one proxy, or a tuple of them."""
        tracer = next((a.tracer for a in args if hasattr(a, "tracer")), None)
        if tracer is None:
            raise GraphError(
                f"op '{self.name}' was called outside a trace", fix="bind the graph and run its plan instead"
            )
        self.check_attrs(attrs)
        proxy = tracer.create_proxy("call_function", self, args, attrs)
        return proxy if len(self.outputs) == 1 else tuple(proxy[i] for i in range(len(self.outputs)))

    def refuse(self, what: str, *, expected: str | None = None) -> NoReturn:
        """Raise OpRefused naming this op."""
        raise OpRefused(what, where=f"op {self.name}", expected=expected)

    def check_attrs(self, attrs: Attrs) -> None:
        """Exactly the declared attributes, no more and no fewer."""
        if set(attrs) != set(self.attrs):
            missing, extra = sorted(set(self.attrs) - set(attrs)), sorted(set(attrs) - set(self.attrs))
            self.refuse(f"attributes missing {missing}, unknown {extra}", expected=f"exactly {list(self.attrs)}")

    def types(self, attrs: Attrs, given: Sequence[Any]) -> tuple[ValueType, ...]:
        """Check the inputs against the signature, then infer the outputs."""
        self.check_attrs(attrs)
        if len(given) != len(self.inputs):
            self.refuse(f"{len(given)} inputs", expected=f"{len(self.inputs)}: {[a.name for a in self.inputs]}")
        for arg, value in zip(self.inputs, given, strict=True):
            self._check_input(arg, value)
        outputs = self.infer(attrs, given)
        for arg, out in zip(self.outputs, outputs, strict=True):
            self._check_input(arg, out)
        return outputs

    def _check_input(self, arg: Arg, value: Any) -> None:
        wanted = {"data": TensorType, "weight": WeightDecl, "state": StateType}[arg.kind]
        if not isinstance(value, wanted):
            self.refuse(f"'{arg.name}' is a {type(value).__name__}", expected=wanted.__name__)
        if isinstance(value, TensorType):
            if value.layout != arg.layout:
                self.refuse(f"'{arg.name}' has layout '{value.layout}'", expected=f"'{arg.layout}'")
            if value.dtype != arg.dtype:
                self.refuse(f"'{arg.name}' has dtype {value.dtype}", expected=arg.dtype)


def weight(name: str) -> Arg:
    """A weight argument."""
    return Arg(name, "", kind="weight")


KV = Arg("kv", "", kind="state")


def only_slot(spec: OpSpec, decl: WeightDecl, shape: tuple[int | None, ...]) -> TensorDecl:
    """The single tensor of a weight with the slot `weight`, its shape checked; None matches any size."""
    if set(decl.slots) != {"weight"}:
        spec.refuse(f"weight '{decl.name}' has slots {sorted(decl.slots)}", expected="['weight']")
    tensor = decl.slots["weight"]
    if len(tensor.shape) != len(shape) or any(
        w is not None and w != g for w, g in zip(shape, tensor.shape, strict=True)
    ):
        wanted = "[" + ", ".join("?" if s is None else str(s) for s in shape) + "]"
        spec.refuse(f"weight '{decl.name}' has shape {list(tensor.shape)}", expected=wanted)
    return tensor


def positive(spec: OpSpec, attrs: Attrs, *names: str) -> None:
    """Refuse attributes that are not positive numbers."""
    for name in names:
        value = attrs[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            spec.refuse(f"attribute {name} is {value!r}", expected="a positive number")
