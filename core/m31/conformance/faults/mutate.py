"""Mutation of functions that the suite judges: if a changed operator, bound or constant passes every item, the suite
has a gap, or the change changes nothing.

Functions are changed in memory: a mutant is compiled from its module's syntax tree, and its code takes the place of the
function's own for as long as it is tried.
"""

from __future__ import annotations

import ast
import copy
import gc
import signal
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from m31.errors import RequestError

_SECONDS = 20.0
"""A mutant that loops is stopped after so long in one check."""

_OPERATORS: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mod,),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
}
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_NAMES = {
    "min": "max",
    "amax": "amin",
    "minimum": "maximum",
    "argmax": "argmin",
    "cos": "sin",
    "any": "all",
    "zeros": "ones",
    "rsqrt": "sqrt",
    "mean": "sum",
}
_NAMES |= {b: a for a, b in _NAMES.items()}


@dataclass(frozen=True, eq=False)
class Mutant:
    """One change of one function.

    Args:
        module, function: where; the function is the outermost one, its qualified name.
        line: of the change.
        change: `before -> after`, as source.
        number: among the same changes of the same function, from 1.
        code: of the changed function.
    """

    module: str
    function: str
    line: int
    change: str
    number: int
    code: types.CodeType

    @property
    def id(self) -> str:
        """Stays the same when lines move."""
        more = f" #{self.number}" if self.number > 1 else ""
        return f"{self.module}.{self.function}: {self.change}{more}"


def mutants(module: types.ModuleType, functions: Collection[str] | None = None) -> Iterator[Mutant]:
    """Every mutant of a module's functions and methods.

    Args:
        module: imported, with its source at hand.
        functions: qualified names; None is all.

    Raises:
        RequestError: there is no source, or no such function.
    """
    if module.__file__ is None:
        raise RequestError(f"module {module.__name__} has no source", expected="a file")
    path = Path(module.__file__)
    tree = ast.parse(path.read_text())
    found = dict(_functions(tree))
    unknown = sorted(set(functions or ()) - set(found))
    if unknown:
        raise RequestError(f"module {module.__name__} has no function '{unknown[0]}'", expected=", ".join(found))
    for name, node in found.items():
        if functions is not None and name not in functions:
            continue
        seen: dict[str, int] = {}
        for change, line, mutated in _changes(tree, node):
            try:
                whole = compile(ast.fix_missing_locations(mutated), str(path), "exec")
            except (SyntaxError, ValueError):
                continue
            code = _inside(whole, name.split("."))
            if code is not None:
                seen[change] = seen.get(change, 0) + 1
                yield Mutant(module.__name__, name, line, change, seen[change], code)


def called(module: types.ModuleType, roots: Collection[str]) -> set[str]:
    """Functions of a module that are reached from others of it, by name, themselves included."""
    assert module.__file__ is not None
    found = dict(_functions(ast.parse(Path(module.__file__).read_text())))
    reached, todo = set(), list(roots)
    while todo:
        name = todo.pop()
        if name in found and name not in reached:
            reached.add(name)
            todo += [node.id for node in ast.walk(found[name]) if isinstance(node, ast.Name)]
    return reached


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Within it, the function is the mutant.

    Raises:
        RequestError: no such function lives in this process.
    """
    functions = [
        item
        for item in gc.get_objects()
        if isinstance(item, types.FunctionType)
        and item.__module__ == mutant.module
        and item.__qualname__ == mutant.function
    ]
    if not functions:
        raise RequestError(f"there is no function {mutant.module}.{mutant.function} in this process")
    before = [function.__code__ for function in functions]
    try:
        for function in functions:
            function.__code__ = mutant.code
        yield
    finally:
        for function, code in zip(functions, before, strict=True):
            function.__code__ = code


def killed(mutant: Mutant, checks: Sequence[Callable[[], None]], seconds: float = _SECONDS) -> str:
    """The first line of what the first failing check said of a mutant; "" if it survives them all.

    Args:
        checks: pass by returning.
        seconds: a check that takes longer has killed it. Needs the main thread.
    """

    def late(signum: int, frame: types.FrameType | None) -> None:
        raise TimeoutError(f"more than {seconds:g} s")

    old = signal.signal(signal.SIGALRM, late)
    try:
        with applied(mutant):
            for check in checks:
                signal.setitimer(signal.ITIMER_REAL, seconds)  # of each: a survivor runs them all
                check()
    except Exception as error:  # noqa: BLE001  # a mutant may do anything
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    return ""


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    yield f"{node.name}.{inner.name}", inner


def _inside(code: types.CodeType, path: Sequence[str]) -> types.CodeType | None:
    for name in path:
        inner = [c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name]
        if not inner:
            return None
        code = inner[-1]
    return code


def _changes(tree: ast.Module, function: ast.FunctionDef) -> Iterator[tuple[str, int, ast.Module]]:
    """(what, line, the module with it) for every change of one function."""
    for place in _places(function):
        for made in _variants(place.node):
            if _same_place(place, made):
                continue
            before, after = ast.unparse(place.node), ast.unparse(made)
            if before == after:
                continue
            place.put(made)
            changed = copy.deepcopy(tree)
            place.put(place.node)
            yield f"{_short(before)} -> {_short(after)}", getattr(place.node, "lineno", function.lineno), changed


@dataclass(frozen=True)
class _Place:
    parent: ast.AST
    field: str
    index: int | None
    node: ast.AST

    def put(self, node: ast.AST) -> None:
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node


def _places(function: ast.FunctionDef) -> Iterator[_Place]:
    """Every node in the body, but annotations, docstrings and what only words an error."""
    for parent in _walk(ast.Module(body=list(function.body), type_ignores=[])):
        for field, value in ast.iter_fields(parent):
            if field in ("annotation", "returns", "decorator_list", "ctx", "args") and not isinstance(parent, ast.Call):
                continue
            for index, node in enumerate(value) if isinstance(value, list) else ((None, value),):
                if isinstance(node, ast.AST) and not _worded(node):
                    real = function if isinstance(parent, ast.Module) else parent
                    yield _Place(real, "body" if isinstance(parent, ast.Module) else field, index, node)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """The node and what is in it, without what only words something."""
    yield node
    for inner in ast.iter_child_nodes(node):
        if not _worded(inner):
            yield from _walk(inner)


def _worded(node: ast.AST) -> bool:
    return isinstance(node, ast.Raise | ast.JoinedStr) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )


def _same_place(place: _Place, made: ast.AST) -> bool:
    """`outs[0]` and `outs[-1]`: nearly every op has one; another place is tried by `outs[1]`."""
    parent = place.parent
    named = (
        isinstance(parent, ast.Subscript) and isinstance(parent.value, ast.Name) and parent.value.id in ("outs", "ins")
    )
    return named and isinstance(made, ast.Constant) and made.value == -1


def _variants(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.BinOp(left=left, op=op, right=right):
            for other in _OPERATORS.get(type(op), ()):
                yield ast.BinOp(left, other(), right)
            if isinstance(op, ast.Add | ast.Sub | ast.Mult | ast.Div):
                yield left
        case ast.Compare(left=left, ops=[op], comparators=comparators) if type(op) in _COMPARISONS:
            yield ast.Compare(left, [_COMPARISONS[type(op)]()], comparators)
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield ast.Constant(value + 1)
            yield ast.Constant(value - 1)
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert(), operand=operand):
            yield operand
        case ast.BoolOp(op=op, values=values):
            yield ast.BoolOp(ast.And() if isinstance(op, ast.Or) else ast.Or(), values)
        case ast.Slice(lower=lower, upper=upper, step=step):
            if lower is not None:
                yield ast.Slice(None, upper, step)
            if upper is not None:
                yield ast.Slice(lower, None, step)
        case ast.IfExp(body=body, orelse=orelse):
            yield body
            yield orelse
        case ast.If(body=body, orelse=orelse):
            yield ast.If(ast.Constant(True), body, orelse)
            yield ast.If(ast.Constant(False), body, orelse)
        case ast.Attribute(value=value, attr=attr, ctx=ctx) if attr in _NAMES:
            yield ast.Attribute(value, _NAMES[attr], ctx)
        case ast.Name(id=name, ctx=ast.Load()) if name in ("min", "max", "any", "all"):
            yield ast.Name(_NAMES[name], ast.Load())
        case ast.AugAssign() | ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case _:
            return


def _short(source: str) -> str:
    line = " ".join(source.split())
    return line if len(line) <= 90 else f"{line[:60]} ... {line[-25:]}"
