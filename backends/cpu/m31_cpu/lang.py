"""A small language for kernels: Python that writes LLVM IR.

A kernel is a Python function that runs once, when it is compiled. Python's own numbers, loops and conditions are then
constants, unrolled code and choices made; what shall happen while the kernel runs is written with the values and
methods below:

    for i in k.range(rows):              # a loop at run time; `for j in range(4)` would be four copies
        total = k.var(k.f32(0.0))        # a variable: set() and get()
        with k.when(i < last): ...

Every value knows its LLVM type; integers are signed. Pointers count bytes. Vectors and scalars take the same operators,
and a Python number beside a value becomes a constant of its type.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from llvmlite.ir.instructions import StoreAtomicInstr

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32, F64, HALF, PTR, VOID = ir.FloatType(), ir.DoubleType(), ir.HalfType(), ir.PointerType(), ir.VoidType()

Number = int | float
Operand = "Val | Number"


def vec(kind: Any, lanes: int) -> Any:
    """The vector type of `lanes` times `kind`."""
    return ir.VectorType(kind, lanes)


def element(kind: Any) -> Any:
    """The type of a lane; of a scalar, its own."""
    return kind.element if isinstance(kind, ir.VectorType) else kind


def float32(value: float) -> float:
    """The nearest float32: LLVM refuses others as constants."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def constant(kind: Any, value: Number) -> Any:
    """A constant of a type, the same in every lane."""
    inner = element(kind)
    plain: Any = int(value) if isinstance(inner, ir.IntType) else float(value)
    if inner == F32:
        plain = float32(plain)
    return ir.Constant(kind, [plain] * kind.count) if isinstance(kind, ir.VectorType) else ir.Constant(kind, plain)


class Val:
    """A value at run time."""

    __slots__ = ("k", "v")

    def __init__(self, k: Fn, v: Any) -> None:
        self.k, self.v = k, v

    @property
    def type(self) -> Any:
        """Its LLVM type."""
        return self.v.type

    @property
    def floating(self) -> bool:
        """Whether its lanes are floating-point numbers."""
        return not isinstance(element(self.type), ir.IntType)

    def _with(self, other: Any) -> Any:
        return other.v if isinstance(other, Val) else constant(self.type, other)

    def _do(self, floating: str, integer: str, other: Any, *, swap: bool = False) -> Val:
        name = floating if self.floating else integer
        pair = (self.v, self._with(other))
        return Val(self.k, getattr(self.k.b, name)(*(reversed(pair) if swap else pair)))

    def __add__(self, other: Any) -> Val:
        if self.type == PTR:
            offset = other.v if isinstance(other, Val) else constant(I64, other)
            return Val(self.k, self.k.b.gep(self.v, [offset], source_etype=I8))
        return self._do("fadd", "add", other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Val:
        return self._do("fsub", "sub", other)

    def __rsub__(self, other: Any) -> Val:
        return self._do("fsub", "sub", other, swap=True)

    def __mul__(self, other: Any) -> Val:
        return self._do("fmul", "mul", other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Val:
        return self._do("fdiv", "sdiv", other)

    def __rtruediv__(self, other: Any) -> Val:
        return self._do("fdiv", "sdiv", other, swap=True)

    def __floordiv__(self, other: Any) -> Val:  # rounds toward zero: kernels divide counts
        return self._do("fdiv", "sdiv", other)

    def __mod__(self, other: Any) -> Val:
        return self._do("frem", "srem", other)

    def __and__(self, other: Any) -> Val:
        return self._do("and_", "and_", other)

    def __or__(self, other: Any) -> Val:
        return self._do("or_", "or_", other)

    def __xor__(self, other: Any) -> Val:
        return self._do("xor", "xor", other)

    def __lshift__(self, other: Any) -> Val:
        return self._do("shl", "shl", other)

    def __rshift__(self, other: Any) -> Val:
        """Logical: zeros come in."""
        return self._do("lshr", "lshr", other)

    def sar(self, other: Any) -> Val:
        """Arithmetic shift right: the sign comes in."""
        return self._do("ashr", "ashr", other)

    def __neg__(self) -> Val:
        return Val(self.k, self.k.b.fneg(self.v)) if self.floating else self._do("", "sub", 0, swap=True)

    def _compare(self, operator: str, other: Any) -> Val:
        build = self.k.b.fcmp_ordered if self.floating else self.k.b.icmp_signed
        return Val(self.k, build(operator, self.v, self._with(other)))

    def __lt__(self, other: Any) -> Val:
        return self._compare("<", other)

    def __le__(self, other: Any) -> Val:
        return self._compare("<=", other)

    def __gt__(self, other: Any) -> Val:
        return self._compare(">", other)

    def __ge__(self, other: Any) -> Val:
        return self._compare(">=", other)

    def eq(self, other: Any) -> Val:
        """Equal, lane by lane; NaN equals nothing."""
        return self._compare("==", other)

    def ne(self, other: Any) -> Val:
        """Not equal, lane by lane; for floating-point numbers: both ordered and different."""
        return self._compare("!=", other)

    def nan(self) -> Val:
        """Lanes that are NaN."""
        return Val(self.k, self.k.b.fcmp_unordered("uno", self.v, self.v))

    def select(self, yes: Any, no: Any) -> Val:
        """`yes` in lanes where this condition holds, else `no`; at least one of them is a value."""
        kind = (yes if isinstance(yes, Val) else no).type
        pick = [x.v if isinstance(x, Val) else constant(kind, x) for x in (yes, no)]
        return Val(self.k, self.k.b.select(self.v, *pick))

    def bits(self, kind: Any) -> Val:
        """The same bits as another type."""
        return Val(self.k, self.k.b.bitcast(self.v, kind))

    def zext(self, kind: Any) -> Val:
        """A wider integer, zeros above."""
        return Val(self.k, self.k.b.zext(self.v, self._like(kind)))

    def sext(self, kind: Any) -> Val:
        """A wider integer of the same value."""
        return Val(self.k, self.k.b.sext(self.v, self._like(kind)))

    def trunc(self, kind: Any) -> Val:
        """A narrower integer: the low bits."""
        return Val(self.k, self.k.b.trunc(self.v, self._like(kind)))

    def to_f32(self) -> Val:
        """From a signed integer, or from half precision."""
        kind = self._like(F32)
        build = self.k.b.fpext if self.floating else self.k.b.sitofp
        return Val(self.k, build(self.v, kind))

    def to_int(self, kind: Any = I32) -> Val:
        """A floating-point number toward zero."""
        return Val(self.k, self.k.b.fptosi(self.v, self._like(kind)))

    def _like(self, kind: Any) -> Any:
        mine = self.type
        wanted = isinstance(mine, ir.VectorType) and not isinstance(kind, ir.VectorType)
        return vec(kind, mine.count) if wanted else kind

    def splat(self, count: int) -> Val:
        """This scalar in `count` lanes."""
        kind = vec(self.type, count)
        one = self.k.b.insert_element(ir.Constant(kind, ir.Undefined), self.v, constant(I32, 0))
        zeros = ir.Constant(vec(I32, count), [0] * count)
        return Val(self.k, self.k.b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros))

    def shuffle(self, picks: Sequence[int], other: Val | None = None) -> Val:
        """The lanes `picks` of this vector followed by `other`."""
        second = ir.Constant(self.type, ir.Undefined) if other is None else other.v
        return Val(self.k, self.k.b.shuffle_vector(self.v, second, ir.Constant(vec(I32, len(picks)), list(picks))))

    def lane(self, index: int | Val) -> Val:
        """One lane."""
        at = index.v if isinstance(index, Val) else constant(I32, index)
        return Val(self.k, self.k.b.extract_element(self.v, at))

    def with_lane(self, index: int, value: Val) -> Val:
        """This vector with another value in one lane."""
        return Val(self.k, self.k.b.insert_element(self.v, value.v, constant(I32, index)))


class Var:
    """A variable; LLVM keeps it in a register where it can."""

    __slots__ = ("at", "k")

    def __init__(self, k: Fn, first: Val) -> None:
        self.k = k
        with k.b.goto_entry_block():
            self.at = k.b.alloca(first.type)
        self.set(first)

    def get(self) -> Val:
        """Its value now."""
        return Val(self.k, self.k.b.load(self.at))

    def set(self, value: Val) -> None:
        """Give it another value."""
        self.k.b.store(value.v, self.at)

    def add(self, value: Any) -> None:
        """Add to it."""
        self.set(self.get() + value)


class Fn:
    """A function that is being written.

    Args:
        module: that it is part of.
        name: its symbol.
        result: LLVM type of what it returns.
        given: LLVM types of its arguments.
    """

    def __init__(self, module: Any, name: str, result: Any, given: Sequence[Any]) -> None:
        self.module = module
        self.function = ir.Function(module, ir.FunctionType(result, list(given)), name)
        self.b = ir.IRBuilder(self.function.append_basic_block("entry"))
        self.given = [Val(self, argument) for argument in self.function.args]

    # --- constants and variables ---

    def const(self, kind: Any, value: Number) -> Val:
        """A constant of any type."""
        return Val(self, constant(kind, value))

    def i64(self, value: int) -> Val:
        """A constant."""
        return self.const(I64, value)

    def i32(self, value: int) -> Val:
        """A constant."""
        return self.const(I32, value)

    def f32(self, value: float) -> Val:
        """A constant."""
        return self.const(F32, value)

    def listed(self, kind: Any, values: Sequence[Number]) -> Val:
        """A constant vector, lane by lane."""
        return Val(self, ir.Constant(vec(kind, len(values)), list(values)))

    def var(self, first: Val) -> Var:
        """A variable with its first value."""
        return Var(self, first)

    def room(self, size: int, align: int = 64) -> Val:
        """`size` bytes on the stack, once per call of the function."""
        with self.b.goto_entry_block():
            place = self.b.alloca(ir.ArrayType(I8, size))
            place.align, place.type = align, PTR  # llvmlite gives it a typed pointer, which takes no other types
        return Val(self, place)

    # --- memory ---

    def load(self, kind: Any, at: Val, offset: int | Val = 0, *, align: int = 1) -> Val:
        """What lies `offset` bytes behind a pointer."""
        return Val(self, self.b.load((at + offset).v if _moves(offset) else at.v, typ=kind, align=align))

    def store(self, value: Val, at: Val, offset: int | Val = 0, *, align: int = 1) -> None:
        """Put a value `offset` bytes behind a pointer."""
        self.b.store(value.v, (at + offset).v if _moves(offset) else at.v, align=align)

    def prefetch(self, at: Val, offset: int = 0, locality: int = 2) -> None:
        """Ask for a cache line early; reading it would not fault where it does not exist."""
        self.call("llvm.prefetch.p0", VOID, at + offset, *(self.i32(v) for v in (0, locality, 1)))

    def copy(self, to: Val, source: Val, size: Val) -> None:
        """`size` bytes; the two do not overlap."""
        self.call("llvm.memcpy.p0.p0.i64", VOID, to, source, size, Val(self, ir.Constant(I1, 0)))

    def fill(self, to: Val, byte: int, size: Val) -> None:
        """`size` bytes of one value."""
        self.call("llvm.memset.p0.i64", VOID, to, self.const(I8, byte), size, Val(self, ir.Constant(I1, 0)))

    def atomic(self, operation: str, at: Val, value: Any, order: str = "seq_cst") -> Val:
        """`atomicrmw`: the value before."""
        given = value if isinstance(value, Val) else self.i64(value)
        return Val(self, self.b.atomic_rmw(operation, at.v, given.v, order))

    def load_atomic(self, at: Val, offset: int = 0, order: str = "acquire") -> Val:
        """An int64 that other threads write."""
        return Val(self, self.b.load_atomic((at + offset).v, order, 8, typ=I64))

    def store_atomic(self, value: Val, at: Val, offset: int = 0, order: str = "release") -> None:
        """An int64 that other threads read."""
        store = StoreAtomicInstr(self.b.block, value.v, (at + offset).v, order, 8)
        self.b._insert(store)  # llvmlite's own method asks for the pointee of an opaque pointer

    # --- calls ---

    def call(self, name: str, result: Any, *given: Val) -> Val:
        """An LLVM intrinsic, or a function of the C library."""
        known = self.module.globals.get(name)
        if known is None:
            known = ir.Function(self.module, ir.FunctionType(result, [value.type for value in given]), name)
        return Val(self, self.b.call(known, [value.v for value in given]))

    def unary(self, name: str, x: Val) -> Val:
        """`llvm.<name>` of one operand: sqrt, fabs, roundeven, ..."""
        return self.call(f"llvm.{name}.{_suffix(x.type)}", x.type, x)

    def binary(self, name: str, x: Val, y: Any) -> Val:
        """`llvm.<name>` of two operands of a type: maxnum, minnum, smax, smin, umin, ..."""
        second = y if isinstance(y, Val) else self.const(x.type, y)
        return self.call(f"llvm.{name}.{_suffix(x.type)}", x.type, x, second)

    def max(self, x: Val, y: Any) -> Val:
        """The greater; of a number and NaN, the number."""
        return self.binary("maxnum" if x.floating else "smax", x, y)

    def min(self, x: Val, y: Any) -> Val:
        """The lesser; of a number and NaN, the number."""
        return self.binary("minnum" if x.floating else "smin", x, y)

    # --- control ---

    def range(self, start: Any, stop: Any = None, step: Any = 1) -> Iterator[Val]:
        """A loop at run time over int64: `for i in k.range(n):` writes its body once. No `break` inside it."""
        if stop is None:
            start, stop = 0, start
        first, last, by = (x if isinstance(x, Val) else self.i64(x) for x in (start, stop, step))
        before = self.b.block
        head, body, after = (self.b.append_basic_block(n) for n in ("loop", "body", "after"))
        self.b.branch(head)
        self.b.position_at_end(head)
        i = self.b.phi(I64)
        i.add_incoming(first.v, before)
        self.b.cbranch(self.b.icmp_signed("<", i, last.v), body, after)
        self.b.position_at_end(body)
        yield Val(self, i)
        i.add_incoming(self.b.add(i, by.v), self.b.block)
        self.b.branch(head)
        self.b.position_at_end(after)

    def repeat(self, condition: Callable[[], Val]) -> Iterator[None]:
        """`for _ in k.repeat(lambda: ...)`: while the condition, asked before each turn, holds."""
        head, body, after = (self.b.append_basic_block(n) for n in ("while", "do", "done"))
        self.b.branch(head)
        self.b.position_at_end(head)
        self.b.cbranch(condition().v, body, after)
        self.b.position_at_end(body)
        yield None
        self.b.branch(head)
        self.b.position_at_end(after)

    @contextmanager
    def when(self, condition: Val) -> Iterator[None]:
        """What is written inside happens if the condition holds."""
        then, after = self.b.append_basic_block("then"), self.b.append_basic_block("join")
        self.b.cbranch(condition.v, then, after)
        self.b.position_at_end(then)
        yield
        self.b.branch(after)
        self.b.position_at_end(after)

    @contextmanager
    def unless(self, condition: Val) -> Iterator[None]:
        """What is written inside happens if the condition does not hold."""
        with self.when(condition.eq(self.const(condition.type, 0))):
            yield

    def done(self, value: Val | None = None) -> None:
        """Return; the last thing that is written."""
        if value is None:
            self.b.ret_void()
        else:
            self.b.ret(value.v)


def _moves(offset: int | Val) -> bool:
    return isinstance(offset, Val) or offset != 0


def _suffix(kind: Any) -> str:
    inner = element(kind)
    floats = {"float": "f32", "double": "f64", "half": "f16"}
    name = f"i{inner.width}" if isinstance(inner, ir.IntType) else floats[str(inner)]
    return f"v{kind.count}{name}" if isinstance(kind, ir.VectorType) else name
