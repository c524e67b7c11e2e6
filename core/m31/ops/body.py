"""Ops that are declared by their unfused body (DESIGN.md §4): the machinery; the declarations are in `m31.ops.fused`.

A body is a Python function over ops, in the language of the model graph. It is recorded, never run as written:
positional parameters are the inputs, keyword-only parameters are the attributes. Everything that an `OpSpec` needs
follows from it: the signature, the shapes, `naive`, the cases' values, the refusals and the criterion.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

from m31.errors import GraphError, OpRefused
from m31.ops.examples import Example, types, values
from m31.ops.spec import Arg, Attrs, Case, OpSpec, ValueType

BodyFn = Callable[..., Any]


class Layers(Protocol):
    """What a fusion needs to know of a text model to say how often it must match; `m31.config.Text` is one."""

    @property
    def num_layers(self) -> int:
        """Layers of the decoder."""

    @property
    def attention(self) -> Sequence[str]:
        """`sparse` or `full` per layer."""

    @property
    def mlp(self) -> Sequence[str]:
        """`moe` or `dense` per layer."""


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for an attribute of the fused op where the body gives one of its parts a value."""

    name: str


@dataclass(frozen=True, slots=True)
class Part:
    """One op of a body and the names of the values that it reads and makes."""

    spec: OpSpec
    args: tuple[str, ...]
    attrs: Attrs
    results: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Body:
    """A recorded body: a straight line of parts. A value is called like its parameter, or after its op."""

    parameters: tuple[str, ...]
    parts: tuple[Part, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class FusedOp(OpSpec):
    """An op that is declared by its body; the rest of the graph code treats it like any other.

    Args:
        body: the composition of ops that it replaces.
        variants: boolean attributes that choose among forms of the body: which roundings it contains.
        anchor: the op of the body that occurs once in it and from which a match is searched.
        readers: output -> ops that may read it in the graph; an output that is named here has at least one reader. It
            tells apart chains of the body that look alike.
        expected: how often it must match in the graph of a model.
    """

    body: BodyFn
    variants: tuple[str, ...]
    anchor: str
    readers: Mapping[str, tuple[str, ...]]
    expected: Callable[[Layers], int]

    def patterns(self) -> Iterator[tuple[dict[str, bool], Body]]:
        """Every form of the body, attributes as `Ref`; the form with the most roundings first, so that it wins."""
        for flags in product((True, False), repeat=len(self.variants)):
            chosen = dict(zip(self.variants, flags, strict=True))
            yield chosen, _record(self.body, {a: chosen.get(a, Ref(a)) for a in self.attrs})

    def parts(self, attrs: Attrs) -> Body:
        """The body with the attributes of one instance."""
        return _record(self.body, attrs)


class _Value:
    """What a body's Python sees: one or several values, by name."""

    def __init__(self, tracer: _Recorder, names: tuple[str, ...]) -> None:
        self.tracer, self.names = tracer, names

    def __getitem__(self, index: int) -> _Value:
        return _Value(self.tracer, (self.names[index],))


class _Recorder:
    """Takes the place of a tracer in `OpSpec.__call__`."""

    def __init__(self) -> None:
        self.parts: list[Part] = []

    def create_proxy(self, kind: str, spec: OpSpec, args: Sequence[Any], attrs: Attrs) -> _Value:
        """Record one part."""
        if not all(isinstance(a, _Value) for a in args):
            raise GraphError(
                f"a body gives '{spec.name}' a constant", expected="values of the body, attributes by name"
            )
        at = f"{spec.name}#{len(self.parts)}"
        several = len(spec.outputs) > 1
        results = tuple(f"{at}.{out.name}" if several else at for out in spec.outputs)
        self.parts.append(Part(spec, tuple(a.names[0] for a in args), dict(attrs), results))
        return _Value(self, results)


def _record(body: BodyFn, attrs: Attrs) -> Body:
    recorder = _Recorder()
    parameters = _names(body, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    made = body(*(_Value(recorder, (name,)) for name in parameters), **attrs)
    outputs = made if isinstance(made, tuple) else (made,)
    return Body(parameters, tuple(recorder.parts), tuple(value.names[0] for value in outputs))


def _names(body: BodyFn, kind: Any) -> tuple[str, ...]:
    return tuple(p.name for p in inspect.signature(body).parameters.values() if p.kind is kind)


def declare(
    name: str,
    doc: str,
    body: BodyFn,
    *,
    outputs: tuple[str, ...],
    anchor: str,
    expected: Callable[[Layers], int],
    examples: Callable[[str], Iterator[Example]],
    readers: Mapping[str, tuple[str, ...]] | None = None,
) -> FusedOp:
    """A fused op from its body.

    Args:
        name, doc: see `OpSpec`.
        body: inputs are its parameters, attributes its keyword-only ones; those annotated `bool` are variants.
        outputs: names of what it returns.
        anchor, expected, readers: see `FusedOp`.
        examples: sizes of the cases: the argument is the id that seeds what the example gives itself.

    Raises:
        GraphError: the body contradicts itself: an unused parameter or attribute, one value in two layouts, an anchor
            that does not occur exactly once.
    """
    attrs = _names(body, inspect.Parameter.KEYWORD_ONLY)
    annotated = inspect.signature(body, eval_str=True).parameters
    variants = tuple(a for a in attrs if annotated[a].annotation is bool)

    def infer(given: Attrs, inputs: Sequence[Any]) -> tuple[ValueType, ...]:
        return _infer(spec, given, inputs)

    def naive(given: Attrs, *inputs: Any) -> tuple[Any, ...]:
        return _naive(spec.parts(given), inputs)

    def cases() -> Iterator[Case]:
        return _cases(spec, examples)

    def fused(ins: tuple[Arg, ...], outs: tuple[Arg, ...], refuses: Any, criterion: Any) -> FusedOp:
        return FusedOp(
            name=name,
            doc=doc,
            inputs=ins,
            outputs=outs,
            attrs=attrs,
            infer=infer,
            naive=naive,
            cases=cases,
            refuses=refuses,
            criterion=criterion,
            body=body,
            variants=variants,
            anchor=anchor,
            readers=readers or {},
            expected=expected,
        )

    draft = fused((), (), (), "bound")
    ins, outs = _signature(draft, outputs)
    exact = all(part.spec.criterion == "exact" for _, form in draft.patterns() for part in form.parts)
    spec = fused(ins, outs, (), "exact" if exact else "bound")
    example = next(examples(f"{name}/refused"))
    spec = fused(ins, outs, _refuses(spec, example), spec.criterion)
    return spec


def _signature(draft: FusedOp, outputs: tuple[str, ...]) -> tuple[tuple[Arg, ...], tuple[Arg, ...]]:
    """Inputs and outputs as the parts declare them, the same in every form of the body."""
    found: dict[str, set[tuple[str, Any, Any]]] = {}
    used: set[str] = set(draft.variants)
    for _, form in draft.patterns():
        made: dict[str, Arg] = {}
        for part in form.parts:
            for value, arg in zip(part.args, part.spec.inputs, strict=True):
                if value in form.parameters:
                    found.setdefault(value, set()).add((arg.layout, arg.dtype, arg.kind))
            made |= dict(zip(part.results, part.spec.outputs, strict=True))
            used |= {value.name for value in part.attrs.values() if isinstance(value, Ref)}
        if len(form.outputs) != len(outputs):
            wanted = ", ".join(outputs)
            raise GraphError(f"the body returns {len(form.outputs)} values", where=f"op {draft.name}", expected=wanted)
        for name, value in zip(outputs, form.outputs, strict=True):
            arg = made[value]
            found.setdefault(f"-> {name}", set()).add((arg.layout, arg.dtype, arg.kind))
        if sum(part.spec.name == draft.anchor for part in form.parts) != 1:
            raise GraphError(f"anchor '{draft.anchor}' does not occur once in the body", where=f"op {draft.name}")
        unused = sorted(set(form.parameters) - set(found))
        if unused:
            raise GraphError(f"parameters {unused} of the body are not used", where=f"op {draft.name}")
    for name, kinds in found.items():
        if len(kinds) != 1:
            raise GraphError(f"value '{name}' of the body is used as {sorted(kinds)}", where=f"op {draft.name}")
    if used != set(draft.attrs):
        raise GraphError(f"attributes {sorted(set(draft.attrs) - used)} are not used", where=f"op {draft.name}")
    one = {name: next(iter(kinds)) for name, kinds in found.items()}
    parameters = _names(draft.body, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(Arg(p, *one[p]) for p in parameters), tuple(Arg(o, *one[f"-> {o}"]) for o in outputs)


def _infer(spec: FusedOp, attrs: Attrs, given: Sequence[Any]) -> tuple[ValueType, ...]:
    for name in spec.variants:
        if not isinstance(attrs[name], bool):
            spec.refuse(f"attribute {name} is {attrs[name]!r}", expected="True or False")
    body = spec.parts(attrs)
    known: dict[str, ValueType] = dict(zip(body.parameters, given, strict=True))
    for part in body.parts:
        try:
            made = part.spec.types(part.attrs, [known[a] for a in part.args])
        except OpRefused as error:
            where = f"op {spec.name}, part {part.spec.name} of {list(part.args)}"
            raise OpRefused(error.what, where=where, expected=error.expected) from error
        known.update(zip(part.results, made, strict=True))
    return tuple(known[o] for o in body.outputs)


def _naive(body: Body, inputs: Sequence[Any]) -> tuple[Any, ...]:
    known = dict(zip(body.parameters, inputs, strict=True))
    for part in body.parts:
        made = part.spec.naive(part.attrs, *(known[a] for a in part.args))
        known.update(zip(part.results, made, strict=True))
    return tuple(known[o] for o in body.outputs)


def _cases(spec: FusedOp, examples: Callable[[str], Iterator[Example]]) -> Iterator[Case]:
    """Every example in every form of the body."""
    for chosen, _ in spec.patterns():
        on = "+".join(name for name, flag in chosen.items() if flag) or "exact"
        for example in examples(spec.name):
            case = f"{spec.name}/{example.name}" + (f"/{on}" if spec.variants else "")
            yield Case(case, {**example.attrs, **chosen}, values(spec.inputs, example, case), example.state)


def _refuses(spec: FusedOp, example: Example) -> tuple[tuple[str, Attrs, tuple[Any, ...]], ...]:
    """Each weight one too wide, and a variant that is no boolean."""
    attrs = {**example.attrs, **dict.fromkeys(spec.variants, False)}
    wide = tuple(
        (f"a weight '{arg.name}' of another width", attrs, types(spec.inputs, example, grown=arg.name))
        for arg in spec.inputs
        if arg.kind == "weight"
    )
    odd = tuple((f"{name} of 1", {**attrs, name: 1}, types(spec.inputs, example)) for name in spec.variants)
    return wide + odd
