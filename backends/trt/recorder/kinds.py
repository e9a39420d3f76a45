"""The layers: rules, types of results, and what each computes by its documented meaning.
Elementwise work in half precision is done in fp32 and rounded once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, reduce

import torch

from .enums import TORCH, DataType
from .layers import (
    CASTABLE,
    CODES,
    FLOATS,
    HELD,
    INDEXES,
    MAX_HEAD,
    MAX_TOP_K,
    NUMBERS,
    ITensor,
    Known,
    Layer,
    Output,
    Tensors,
    agree,
    volume,
)
from .record import Attribute

#: numbers of shape tensors that are followed at most
MOST_KNOWN = 16


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _pointwise(f: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """Compute `f` in fp32 at least, rounded to the operands' dtype."""
    out = f(*map(_wide, tensors))
    return out if out.dtype == torch.bool else out.to(tensors[0].dtype)


def _bits(mask: int, rank: int) -> list[int]:
    return [i for i in range(rank) if mask >> i & 1]


# --- sources and types ------------------------------------------------------------------------


class IConstantLayer(Layer):
    _kind = "constant"
    weights = Attribute()
    shape = Attribute()

    def _infer(self) -> list[Output]:
        dims, weights = tuple(self._shape), self._weights
        kind, count = weights._dtype, volume(dims)
        held = (HELD | CODES) - {DataType.BOOL, DataType.UINT8}
        self._need(kind in held, f"no constant is {kind.name}")
        self._need(count == weights._count, f"{weights._count} weights for {list(dims)}")
        return [(kind, dims)]

    def _known(self) -> Known:
        (kind, dims), weights = self._types[0], self._weights
        short = kind in INDEXES and len(dims) <= 1 and volume(dims) <= MOST_KNOWN
        return weights._tensor().tolist() if short and weights._pointer else None

    def _run(self) -> Tensors:  # type: ignore[override]
        cached = self._network._constants
        if self._index not in cached:
            cached[self._index] = self._weights._tensor().reshape(tuple(self._shape))
        return [cached[self._index]]


class IIdentityLayer(Layer):
    _kind = "identity"

    def _infer(self) -> list[Output]:
        return [self._in()._type]

    def _run(self, *ins: torch.Tensor) -> Tensors:
        return [*ins]


class ICastLayer(Layer):
    _kind = "cast"

    def _infer(self) -> list[Output]:
        self._takes(self._in(), CASTABLE)
        self._need(self._to_type in CASTABLE, f"nothing is cast to {self._to_type.name}")
        return [(self._to_type, self._in()._dims)]

    def _run(self, *ins: torch.Tensor) -> Tensors:
        return [ins[0].to(TORCH[self._to_type])]


class IDequantizeLayer(Layer):
    """One scale, one for each entry of an axis, or, of the codes' rank, one for each group of
    neighbours."""

    _kind = "dequantize"
    axis = Attribute(-1)

    def _check(self) -> None:
        """Codes are what it takes."""

    def _infer(self) -> list[Output]:
        x, scale, to = self._in(0), self._in(1), self._output_type
        self._takes(x, CODES, "here it")
        self._need(scale._type[0] == to, f"{scale._text}: the result, {to.name}, has its type")
        pairs = [*zip(x._dims, scale._dims)]
        fits = len(scale._dims) == len(x._dims) and sum(n != g for n, g in pairs) < 2
        fits = fits and all(n % g == 0 for n, g in pairs)
        if len(scale._dims) == 1:
            fits = scale._dims == x._dims[self._axis : self._axis + 1 or None]
        said = f"{scale._text}: one for each entry of axis {self._axis} of {x._text}, or for groups"
        self._need(fits or not scale._dims, said)
        return [(to, x._dims)]

    def _run(self, *ins: torch.Tensor) -> Tensors:
        x, scale = ins
        if scale.dim() == 1:
            axis = self._axis % x.dim()
            scale = scale.reshape([-1 if i == axis else 1 for i in range(x.dim())])
        for i, (n, groups) in enumerate(zip(x.shape, scale.shape)):
            scale = scale.repeat_interleave(n // groups, i)
        return [(x.float() * scale.float()).to(scale.dtype)]


# --- pointwise --------------------------------------------------------------------------------

_SAME_NAME = "EXP LOG SQRT NEG ERF TANH SIGMOID"
#: operations and activations
_UNARY: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{name: getattr(torch, name.lower()) for name in _SAME_NAME.split()},
    "GELU_ERF": torch.nn.functional.gelu,
    "GELU_TANH": partial(torch.nn.functional.gelu, approximate="tanh"),
    "NOT": torch.logical_not,
}


def _divided(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Divide; whole numbers are cut off towards zero."""
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


_BINARY: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "PROD": torch.mul,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
    "SUB": torch.sub,
    "DIV": _divided,
    "POW": torch.pow,
    "FLOOR_DIV": torch.floor_divide,
    "AND": torch.logical_and,
    "OR": torch.logical_or,
    "EQUAL": torch.eq,
    "GREATER": torch.gt,
    "LESS": torch.lt,
}
#: elementwise operations on sizes
_ON_SIZES: Mapping[str, Callable[[int, int], int]] = {"SUB": int.__sub__, "MIN": min}
_LOGIC, _COMPARISONS = ("AND", "OR", "XOR"), ("EQUAL", "GREATER", "LESS")


class IUnaryLayer(Layer):
    _kind = "unary"

    def _infer(self) -> list[Output]:
        kinds = {"NOT": {DataType.BOOL}, "NEG": NUMBERS}.get(self._op.name, FLOATS)
        self._takes(self._in(), kinds, self._op.name)
        return [self._in()._type]

    def _run(self, *ins: torch.Tensor) -> Tensors:
        return [_pointwise(_UNARY[self._op.name], *ins)]


class IActivationLayer(IUnaryLayer):
    _kind = "activation"
    _op = property(lambda layer: layer._type)


class IElementWiseLayer(Layer):
    _kind = "elementwise"

    def _infer(self) -> list[Output]:
        name, a, b = self._op.name, self._in(0), self._in(1)
        self._same(a, b)
        if name != "EQUAL":
            self._takes(a, {DataType.BOOL} if name in _LOGIC else NUMBERS, name)
        kind = DataType.BOOL if name in _COMPARISONS else a._type[0]
        return [(kind, self._broadcast(a, b))]

    def _known(self) -> Known:
        f, one, two = _ON_SIZES.get(self._op.name), self._in(0)._known(), self._in(1)._known()
        if f is None or one is None or two is None or len(one) != len(two):
            return None
        return [None if a is None or b is None else f(a, b) for a, b in zip(one, two)]

    def _run(self, *ins: torch.Tensor) -> Tensors:
        return [_pointwise(_BINARY[self._op.name], *ins)]


class ISelectLayer(Layer):
    _kind = "select"

    def _infer(self) -> list[Output]:
        condition, a, b = (self._in(i) for i in range(3))
        self._takes(condition, {DataType.BOOL}, "a condition")
        self._same(a, b)
        return [(a._type[0], self._broadcast(condition, a, b))]

    def _run(self, *ins: torch.Tensor) -> Tensors:
        return [torch.where(ins[0], ins[1], ins[2])]


# --- products and sums ------------------------------------------------------------------------


class IMatrixMultiplyLayer(Layer):
    _kind = "matrix multiply"

    def _infer(self) -> list[Output]:
        a, b = self._in(0), self._in(1)
        ops = self._op0.name, self._op1.name
        self._same(a, b)
        self._takes(a, FLOATS)
        text = f"{a._text}, {b._text}"
        self._need(len(a._dims) == len(b._dims) >= 2, f"{text}: ranks must be equal, 2 or more")
        lead = tuple(self._joined(d, text) for d in zip(a._dims[:-2], b._dims[:-2]))
        (m, inner), (other, n) = (
            t._dims[:-3:-1] if op == "TRANSPOSE" else t._dims[-2:] for t, op in zip((a, b), ops)
        )
        self._need(agree([inner], [other]), f"{text}: {inner} times {other}")
        return [(a._type[0], (*lead, m, n))]

    def _run(self, *ins: torch.Tensor) -> Tensors:
        a, b = (x.mT if op.name == "TRANSPOSE" else x for x, op in zip(ins, (self._op0, self._op1)))
        return [a @ b]


class ISoftMaxLayer(Layer):
    """Of one axis, which is given."""

    _kind = "softmax"
    axes = Attribute(0)

    def _infer(self) -> list[Output]:
        self._takes(self._in(), FLOATS)
        self._need(len(_bits(self._axes, len(self._in()._dims))) == 1, "one axis")
        return [self._in()._type]

    def _run(self, *ins: torch.Tensor) -> Tensors:
        (axis,) = _bits(self._axes, ins[0].dim())
        return [_wide(ins[0]).softmax(axis).to(ins[0].dtype)]


_REDUCE: Mapping[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.sum,
    "AVG": torch.mean,
    "MAX": torch.amax,
}


class IReduceLayer(Layer):
    _kind = "reduce"

    def _infer(self) -> list[Output]:
        x = self._in()
        self._takes(x, NUMBERS, self._op.name)
        axes = _bits(self._axes, len(x._dims))
        self._need(self._keep_dims and axes, "axes, whose dims are kept")
        return [(x._type[0], tuple(1 if i in axes else d for i, d in enumerate(x._dims)))]

    def _run(self, *ins: torch.Tensor) -> Tensors:
        axes = _bits(self._axes, ins[0].dim())
        return [_REDUCE[self._op.name](_wide(ins[0]), axes, True).to(ins[0].dtype)]


class ITopKLayer(Layer):
    _kind, _count = "top-k", 2

    def _infer(self) -> list[Output]:
        x, k = self._in(), int(self._k)
        self._takes(x, NUMBERS)
        self._need(0 < k <= MAX_TOP_K, f"k is {k}, at most {MAX_TOP_K} are taken")
        (axis,) = _bits(self._axes, len(x._dims))
        size = x._dims[axis]
        self._need(size == -1 or k <= size, f"{x._text}: k is {k}")
        dims = tuple(k if i == axis else d for i, d in enumerate(x._dims))
        return [(x._type[0], dims), (self._indices_type, dims)]

    def _run(self, *ins: torch.Tensor) -> Tensors:
        (axis,) = _bits(self._axes, ins[0].dim())
        values, index = torch.topk(ins[0], self._k, axis)
        return [values, index.to(TORCH[self._indices_type])]


class IDistCollectiveLayer(Layer):
    """A collective: the sum of all ranks' tensors, or these along the first dim."""

    _kind = "distributed collective"
    num_ranks = Attribute(1)

    @property
    def _gathers(self) -> bool:
        return bool(self._dist_collective_op.name == "ALL_GATHER")

    def _infer(self) -> list[Output]:
        x, op, ranks = self._in(), self._dist_collective_op.name, self._num_ranks
        join = {"ALL_REDUCE": "SUM", "ALL_GATHER": "NONE"}.get(op)
        joined = self._reduce_op.name
        self._need(join == joined and self._root == -1, f"{op} by {joined} is not recorded here")
        every = [*self._groups] == [*range(ranks)] and ranks > 1  # none was seen to mean no rank
        self._need(every, f"groups {[*self._groups]}: all of {ranks} ranks, in order")
        self._takes(x, FLOATS, "an exchange here")
        if not self._gathers:
            return [x._type]
        first = -1 if x._dims[0] == -1 else ranks * x._dims[0]
        return [(x._type[0], (first, *x._dims[1:]))]

    def _run(self, *ins: torch.Tensor) -> Tensors:
        """Exchange; a sum is rounded after each addition, in order of rank, as by NCCL."""
        exchange = self._network._exchange
        self._need(exchange, "a rank alone has nobody to exchange with")
        parts = exchange(ins[0])
        said = f"{len(parts)} ranks run, num_ranks is {self._num_ranks}"
        self._need(len(parts) == self._num_ranks, said)
        if self._gathers:
            return [torch.cat([*parts])]
        return [reduce(partial(_pointwise, torch.add), parts)]


# --- attention --------------------------------------------------------------------------------


class IKVCacheUpdateLayer(Layer):
    """Written in place; network.check has the rest: its output is an output of the network."""

    _kind = "KV cache update"

    def _infer(self) -> list[Output]:
        cache, new, at = (self._in(i) for i in range(3))
        text = f"{new._text} at {at._text} of {cache._text}"
        self._need(cache._layer is None, f"{cache._text}: a cache is a network input")
        self._takes(cache, FLOATS, "a cache")
        self._same(cache, new)
        self._takes(at, {DataType.INT32}, "write_indices")
        ranks = len(cache._dims), len(new._dims), len(at._dims)
        self._need(ranks == (4, 4, 1), f"{text}: [B,N,S_max,H], [B,N,S,H] and [B]")
        (rows, heads, slots, size), (b, n, s, d) = cache._dims, new._dims
        self._need(slots != -1, f"{cache._text}: S_max is static")
        fits = agree((rows, heads, size, rows), (b, n, d, *at._dims)) and s <= slots
        self._need(fits, f"{text} does not fit")
        return [cache._type]

    def _run(self, *ins: torch.Tensor) -> Tensors:
        """Write. TensorRT ignores what lies out of bounds silently; here it is an error."""
        cache, new, at = ins
        for row, first in enumerate(at.tolist()):
            last = first + new.shape[2]
            inside = 0 <= first <= last <= cache.shape[2]
            self._need(inside, f"{first} to {last} of {list(cache.shape)}")
            cache[row, :, first:last] = new[row]
        return [cache]


class IAttention(Layer):
    """A causal kind hides what lies before a chunk, or excludes a mask: there is none."""

    _kind = "attention"
    mask = Attribute()
    decomposable = Attribute(False)

    def _changed(self, member: str) -> None:
        super()._changed(member)
        if member == "mask":
            self._inputs = [*self._inputs[:3], self._mask]

    def _infer(self) -> list[Output]:
        q, k, v = (self._in(i) for i in range(3))
        text = f"{q._text}, {k._text}, {v._text}"
        kind = vars(self).get("_causal_kind")
        causal = kind.name != "NONE" if kind else self._causal
        self._need(not causal, "a causal kind is not recorded here")
        self._need(self._norm_op.name == "SOFTMAX", "norms but SOFTMAX are not recorded here")
        self._same(q, k, v)
        self._takes(q, FLOATS, "attention")
        self._need({len(t._dims) for t in (q, k, v)} == {4}, f"{text}: [B,N,S,H] each")
        fits = k._dims[1] == v._dims[1] and q._dims[1] % k._dims[1] == 0
        fits = fits and len({t._dims[3] for t in (q, k, v)}) == 1
        self._need(fits, f"{text}: heads do not fit")
        self._joined([t._dims[0] for t in (q, k, v)], text)
        self._joined([k._dims[2], v._dims[2]], text)
        if self._mask is not None:
            self._check_mask(q, k, self._mask)
        return [q._type]

    def _check(self) -> None:
        kind, dims = self._in()._type
        whole = dims[3] <= MAX_HEAD and kind != DataType.FLOAT
        self._need(self._decomposable or whole, f"{self._in()._text}: no kernel for these heads")

    def _check_mask(self, q: ITensor, k: ITensor, mask: ITensor) -> None:
        self._takes(mask, {DataType.BOOL, q._type[0]}, "a mask")
        want = (*q._dims[:3], k._dims[2])
        fits = len(mask._dims) == 4 and all(
            h in (1, -1, w) or w == -1 for h, w in zip(mask._dims, want)
        )
        self._need(fits, f"{mask._text}: a mask is {list(want)}")

    def _run(self, *ins: torch.Tensor) -> Tensors:
        """Attend: scores and sums in fp32, probabilities rounded to the inputs' dtype."""
        q, k, v = ins[:3]
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        scores = _wide(q) @ _wide(k).mT
        if len(ins) > 3:
            mask, least = ins[3], torch.finfo(scores.dtype).min
            chosen = mask.dtype == torch.bool
            scores = scores.masked_fill(~mask, least) if chosen else scores + _wide(mask)
        return [(_wide(scores.softmax(-1).to(q.dtype)) @ _wide(v)).to(q.dtype)]
