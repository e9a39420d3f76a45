"""The tensor primitives of networks, common to all targets.

ONNX and TensorRT both take a graph of small tensor operations. Each op of the IR is decomposed
once (see lowerings.py) into the primitives below, and an emitter per target turns a primitive into
that target's node. A decomposition verified on one target holds on the other. Rules, the stricter
of both targets: both operands of a binary primitive have the same rank and dtype (dims of 1
repeat), no dtype changes without `cast`, axes are not negative. A dim is an int, or a name; equal
names mean equal sizes. Shapes are checked here, the dtypes that an operator supports by the
targets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from g4ir.ir.graph import Value
from g4ir.ops.codecs import PACKED
from g4ir.ops.types import Dim, Type, torch_dtype

COMPARISONS = ("eq", "gt", "lt")
#: suffix of the scope of nodes that several values share
SHARED = "/shared"


@dataclass(frozen=True)
class Operand:
    """A tensor of a network under construction; `handle`: the emitter's object or name."""

    type: Type
    handle: Any

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.type.shape

    @property
    def dtype(self) -> str:
        return self.type.dtype

    @property
    def rank(self) -> int:
        return self.type.rank


class Emitter(ABC):
    """Checks each primitive, infers its output type, and lets the target emit it.

    Public methods are the primitives; a target implements the underscored ones, which receive
    checked operands and the output type. ValueError on operands that break a rule.
    """

    #: name prefix of the next nodes: the IR value that they compute
    scope: str = ""
    #: whether to gather entries of a quantised weight before dequantising them
    gathers_codes = True

    @contextmanager
    def shared_scope(self) -> Iterator[None]:
        """Context for tensors that several values share: `scope` gets the suffix SHARED."""
        before = self.scope
        self.scope = before if before.endswith(SHARED) else before + SHARED
        try:
            yield
        finally:
            self.scope = before

    # --- sources ------------------------------------------------------------------------------

    @abstractmethod
    def input(self, name: str, t: Type) -> Operand:
        """Declare a network input."""

    @abstractmethod
    def param(self, v: Value) -> Operand:
        """Declare a weight."""

    @abstractmethod
    def constant(self, tensor: Any) -> Operand:
        """Embed a torch tensor as a constant."""

    @abstractmethod
    def output(self, name: str, x: Operand) -> None:
        """Declare a network output."""

    # --- pointwise ----------------------------------------------------------------------------

    def activation(self, name: str, x: Operand) -> Operand | None:
        """Apply the framework's built-in op for an activation (Hugging Face name); None if it has
        none."""
        return None

    def unary(self, kind: str, x: Operand) -> Operand:
        """Apply `neg`, `exp`, `log`, `tanh`, `sqrt`, `erf` or `not`."""
        return self._unary(kind, x, x.type)

    def binary(self, kind: str, a: Operand, b: Operand | float) -> Operand:
        """Apply `add`, `sub`, `mul`, `div`, `pow`, `max`, `min`, `floor_div`, `eq`, `gt`, `lt`,
        `and` or `or`. A Python number becomes a constant of the first operand's dtype."""
        other = b if isinstance(b, Operand) else self._number(b, a)
        _need(a.dtype == other.dtype, f"{kind}: {a.type} and {other.type} differ in dtype")
        shape = broadcast(kind, a.type, other.type)
        dtype = "bool" if kind in COMPARISONS else a.dtype
        return self._binary(kind, a, other, Type(dtype, shape))

    def where(self, condition: Operand, a: Operand, b: Operand | float) -> Operand:
        other = b if isinstance(b, Operand) else self._number(b, a)
        _need(a.dtype == other.dtype, f"where: {a.type} and {other.type} differ in dtype")
        shape = broadcast(
            "where", Type("bool", broadcast("where", a.type, other.type)), condition.type
        )
        return self._where(condition, a, other, Type(a.dtype, shape))

    def cast(self, x: Operand, dtype: str) -> Operand:
        return x if x.dtype == dtype else self._cast(x, Type(dtype, x.shape))

    def add(self, a: Operand, b: Operand | float) -> Operand:
        return self.binary("add", a, b)

    def sub(self, a: Operand, b: Operand | float) -> Operand:
        return self.binary("sub", a, b)

    def mul(self, a: Operand, b: Operand | float) -> Operand:
        return self.binary("mul", a, b)

    def div(self, a: Operand, b: Operand | float) -> Operand:
        return self.binary("div", a, b)

    def _number(self, value: float, like: Operand) -> Operand:
        return self.constant(torch.full((1,) * like.rank, value, dtype=torch_dtype(like.dtype)))

    # --- matmuls and reductions ---------------------------------------------------------------

    def linear(self, x: Operand, w: Operand, columns: bool = False) -> Operand:
        """Return x w^T for a weight w [out, in]; if `columns`, w is stored as [in, out]."""
        out, inner = w.shape[::-1] if columns else w.shape
        fits = w.rank == 2 and x.shape[-1] == inner and x.dtype == w.dtype
        _need(fits, f"linear: {x.type} does not fit {w.type}")
        return self._linear(x, w, columns, x.type.with_shape(*x.shape[:-1], out))

    def matmul(self, a: Operand, b: Operand, transpose_b: bool = False) -> Operand:
        """Return a b, or a b^T, over the last two dims; leading dims broadcast as in `binary`."""
        fits = a.rank == b.rank >= 2 and a.dtype == b.dtype
        _need(fits, f"matmul: {a.type} does not fit {b.type}")
        inner, out = b.shape[-2:] if not transpose_b else b.shape[:-3:-1]
        _need(a.shape[-1] == inner, f"matmul: {a.type} and {b.type} differ in the inner dim")
        lead = broadcast(
            "matmul", a.type.with_shape(*a.shape[:-2]), b.type.with_shape(*b.shape[:-2])
        )
        return self._matmul(a, b, transpose_b, Type(a.dtype, (*lead, a.shape[-2], out)))

    def dequantize(self, codes: Operand, scales: Operand, axis: int, dtype: str) -> Operand:
        """Return codes * scales, rounded once. Both are params; scales [.., G, ..] have the
        result's shape except on `axis`, with one scale per group. 4-bit codes must be two's
        complement (`by_columns`), the first in the low half of a byte."""
        last = int(codes.shape[-1]) * PACKED[codes.dtype]
        t = Type(dtype, (*codes.shape[:-1], last))
        pairs = [*zip(t.shape, scales.shape, strict=True)]
        size, groups = map(int, pairs.pop(axis))
        fits = all(m == n for m, n in pairs) and groups > 0 and size % groups == 0
        _need(fits, f"dequantize: {codes.type} does not fit scales {scales.type} on axis {axis}")
        return self._dequantize(codes, scales, axis, t)

    def part(self, codes: Operand, dtype: str, reader: int) -> tuple[Operand, float] | None:
        """For a weight with one scale per row, on targets that do not fuse such scales with a
        matmul: return the codes times a power of two (distinct per reader), and the factor that
        undoes it; the caller multiplies the matmul's output by row scale and factor. None on other
        targets."""
        return None

    def bits(self, codes: Operand) -> Operand:
        """Reinterpret a param of one-byte codes as u8."""
        if codes.dtype == "u8":
            return codes
        return self._bits(codes, Type("u8", codes.shape))

    def softmax(self, x: Operand) -> Operand:
        """Return the softmax over the last dim, in x's dtype."""
        return self._softmax(x, x.type)

    def reduce(self, kind: str, x: Operand, axis: int) -> Operand:
        """Return sum, mean or max over one axis (keepdim)."""
        shape = tuple(1 if i == axis else d for i, d in enumerate(x.shape))
        return self._reduce(kind, x, axis, x.type.with_shape(*shape))

    def topk(self, x: Operand, k: int) -> tuple[Operand, Operand]:
        """Return the k largest of the last dim in descending order, and their indices i64."""
        shape = (*x.shape[:-1], k)
        return self._topk(x, k, Type(x.dtype, shape), Type("i64", shape))

    # --- layout -------------------------------------------------------------------------------

    def reshape(self, x: Operand, *shape: Dim) -> Operand:
        """Change the shape; at most one named (dynamic) dim may be on another axis than before."""
        moved = [
            i
            for i, d in enumerate(shape)
            if isinstance(d, str) and (i >= x.rank or x.shape[i] != d)
        ]
        _need(len(moved) <= 1, f"reshape: {x.type} to {list(shape)}: two named dims move")
        if shape == x.shape:
            return x
        return self._reshape(x, x.type.with_shape(*shape))

    def transpose(self, x: Operand, *order: int) -> Operand:
        return self._transpose(x, order, x.type.with_shape(*(x.shape[i] for i in order)))

    def unsqueeze(self, x: Operand, *axes: int) -> Operand:
        """Insert dims of 1 at these axes of the result."""
        dims = iter(x.shape)
        shape = [1 if i in axes else next(dims) for i in range(x.rank + len(axes))]
        return self._unsqueeze(x, axes, x.type.with_shape(*shape))

    def concat(self, xs: Sequence[Operand], axis: int) -> Operand:
        first = xs[0]
        outer = {(x.dtype, x.shape[:axis], x.shape[axis + 1 :]) for x in xs}
        types = ", ".join(str(x.type) for x in xs)
        _need(len(outer) == 1, f"concat: {types} differ in dtype or in more than axis {axis}")
        sizes = [x.shape[axis] for x in xs]
        names = [d for d in sizes if isinstance(d, str)]
        count = sum(d for d in sizes if isinstance(d, int))
        size: Dim = "_".join([*names, *([str(count)] if count else [])]) if names else count
        shape = (*first.shape[:axis], size, *first.shape[axis + 1 :])
        return self._concat(xs, axis, first.type.with_shape(*shape))

    def slice(self, x: Operand, axis: int, start: int, stop: int) -> Operand:
        """Return the entries [start, stop) of an axis."""
        size = x.shape[axis]
        fits = 0 <= start < stop and (isinstance(size, str) or stop <= size)
        _need(fits, f"slice: [{start}, {stop}) is empty or not within axis {axis} of {x.type}")
        if (start, stop) == (0, size):
            return x
        shape = (*x.shape[:axis], stop - start, *x.shape[axis + 1 :])
        return self._slice(x, axis, start, stop, x.type.with_shape(*shape))

    def swap_halves(self, x: Operand) -> Operand:
        """Return (second half, first half) of the last dim."""
        last, half = x.rank - 1, int(x.shape[-1]) // 2
        return self.concat([self.slice(x, last, i, i + half) for i in (half, 0)], last)

    def prefix(self, x: Operand, axis: int, like: Operand) -> Operand:
        """Return the first n entries of an axis, n being the size of `like` [n]."""
        shape = (*x.shape[:axis], like.shape[0], *x.shape[axis + 1 :])
        return self._prefix(x, axis, like, x.type.with_shape(*shape))

    def block(self, x: Operand, axis: int, first: int, count: int) -> Operand:
        """Return entries first .. first + count - 1 of an axis of dynamic size, clipped to it
        (possibly empty)."""
        name = f"{x.shape[axis]}@{first}+{count}"
        shape = (name if i == axis else d for i, d in enumerate(x.shape))
        return self._block(x, axis, first, count, x.type.with_shape(*shape))

    # --- gather and scatter -------------------------------------------------------------------

    def gather(self, x: Operand, index: Operand, axis: int) -> Operand:
        """Return entries of an axis: x.shape[:axis] + index.shape + x.shape[axis + 1:]."""
        shape = (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])
        return self._gather(x, index, axis, x.type.with_shape(*shape))

    def stack(self, x: Operand) -> Operand:
        """Return stacked weights [E, ..] as an operand of a batched matmul: by default unchanged; a
        target that needs another layout overrides this."""
        return x

    def gather_rows(self, x: Operand, index: Operand) -> Operand:
        """Return y[b, j] = x[b, index[b, j]]."""
        fits = index.rank == 2 and x.rank >= 2 and index.shape[0] == x.shape[0]
        _need(fits, f"gather_rows: index {index.type} does not fit {x.type}")
        return self._gather_rows(x, index, x.type.with_shape(*index.shape, *x.shape[2:]))

    def append(self, cache: Operand, new: Operand, start: Operand) -> Operand:
        """Return cache [B,n,M,d] with cache[b, :, start[b] + s] = new[b, :, s]; start[b] + s must
        be below M."""
        b, n, _, d = cache.shape
        fits = new.rank == 4 and (new.shape[0], new.shape[1], new.shape[3]) == (b, n, d)
        fits = fits and new.dtype == cache.dtype and start.shape == (b,)
        _need(fits, f"append: {new.type} at {start.type} does not fit {cache.type}")
        return self._append(cache, new, start, cache.type)

    # --- attention and ranks ------------------------------------------------------------------

    def attention(self, q: Operand, keys: Operand, values: Operand, mask: Operand) -> Operand:
        """Return softmax(q keys^T) values for q [B,heads,S,d], keys [B,n,T,d] and values [B,n,T,w]
        (GQA). The mask [.,.,S,T] is bool, or additive."""
        fits = q.shape[3] == keys.shape[3] and keys.shape[:3] == values.shape[:3]
        fits = fits and int(q.shape[1]) % int(keys.shape[1]) == 0
        _need(fits, f"attention: {q.type} does not fit keys {keys.type} and values {values.type}")
        t = q.type.with_shape(*q.shape[:3], values.shape[3])
        return self._attention(q, keys, values, mask, t)

    def exchange(self, op: str, x: Operand, ranks: int) -> Operand:
        """Return a collective over the ranks' tensors: their sum (all_reduce), or all of them in
        order of rank, concatenated along the first dim (all_gather)."""
        first, *trailing = x.shape
        t = x.type.with_shape(ranks * int(first), *trailing) if op == "all_gather" else x.type
        return self._exchange(op, x, ranks, t)

    # --- control ------------------------------------------------------------------------------

    @abstractmethod
    def when_one(
        self, x: Operand, axis: int, then: Callable[[], Operand], otherwise: Callable[[], Operand]
    ) -> Operand:
        """Return the result of `then` if the axis of x has one entry at run time, else that of
        `otherwise`; both must have the same type."""

    # --- implemented by targets: checked operands, and the output type -----------

    _unary: Callable[[str, Operand, Type], Operand]
    _binary: Callable[[str, Operand, Operand, Type], Operand]
    _where: Callable[[Operand, Operand, Operand, Type], Operand]
    _cast: Callable[[Operand, Type], Operand]
    _linear: Callable[[Operand, Operand, bool, Type], Operand]
    _dequantize: Callable[[Operand, Operand, int, Type], Operand]
    _bits: Callable[[Operand, Type], Operand]
    _matmul: Callable[[Operand, Operand, bool, Type], Operand]
    _softmax: Callable[[Operand, Type], Operand]
    _reduce: Callable[[str, Operand, int, Type], Operand]
    _topk: Callable[[Operand, int, Type, Type], tuple[Operand, Operand]]
    _reshape: Callable[[Operand, Type], Operand]
    _transpose: Callable[[Operand, Sequence[int], Type], Operand]
    _unsqueeze: Callable[[Operand, Sequence[int], Type], Operand]
    _concat: Callable[[Sequence[Operand], int, Type], Operand]
    _slice: Callable[[Operand, int, int, int, Type], Operand]
    _prefix: Callable[[Operand, int, Operand, Type], Operand]
    _block: Callable[[Operand, int, int, int, Type], Operand]
    _gather: Callable[[Operand, Operand, int, Type], Operand]
    _gather_rows: Callable[[Operand, Operand, Type], Operand]
    _append: Callable[[Operand, Operand, Operand, Type], Operand]
    _attention: Callable[[Operand, Operand, Operand, Operand, Type], Operand]
    _exchange: Callable[[str, Operand, int, Type], Operand]


def reshape_spec(x: Type, t: Type) -> list[int]:
    """Return reshape sizes as in ONNX: 0 keeps the dim at that axis, -1 is inferred."""
    return [
        d if isinstance(d, int) else 0 if i < x.rank and x.shape[i] == d else -1
        for i, d in enumerate(t.shape)
    ]


def broadcast(op: str, a: Type, b: Type) -> tuple[Dim, ...]:
    """Return the shape of a pointwise result; ValueError if ranks differ, or two sizes of which
    neither is 1."""
    _need(a.rank == b.rank, f"{op}: {a} and {b} differ in rank")
    pairs = list(zip(a.shape, b.shape, strict=True))
    _need(all(m == n or 1 in (m, n) for m, n in pairs), f"{op}: {a} and {b} do not fit")
    return tuple(n if m == 1 else m for m, n in pairs)


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
