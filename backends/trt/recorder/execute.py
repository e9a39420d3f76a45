"""A network in torch on the CPU: each layer by its own documented meaning.

Elementwise work in half precision is done in fp32 and rounded once; products are torch's of that
dtype. An update of a cache happens in the memory that was fed, as in TensorRT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any

import torch

from . import layers as kinds
from .enums import TORCH
from .layers import ITensor, Layer
from .network import INetworkDefinition, interiors
from .ranks import Exchange
from .record import RuleError, held

Tensors = list[torch.Tensor]


def execute(
    network: INetworkDefinition,
    feeds: Mapping[str, torch.Tensor],
    exchange: Exchange | None = None,
) -> dict[str, torch.Tensor]:
    """Return outputs by name; caches that are updated share the memory of what was fed. `exchange`
    gives the tensors of all ranks, where there are several (ranks.py).

    RuleError where a feed, or what a layer makes of it, is not what the network says.
    """
    network._exchange = exchange
    run = _Run(network, feeds)
    for layer in run.plan[0]:
        run.layer(layer)
    return {held(t, "name"): run.env[t] for t in network._outputs}


def _plan(network: INetworkDefinition) -> tuple[list[Layer], Any]:
    """Return layers outside branches in order, and those of each branch; kept in the network."""
    if "plan" not in network.__dict__:
        inside = interiors(network)
        hidden = {x for sides in inside.values() for side in sides for x in side}
        main = [x for x in network._layers if x not in hidden]
        network.__dict__["plan"] = main, inside
    return network.__dict__["plan"]


class _Run:
    """One execution: tensors that are known so far."""

    def __init__(self, network: INetworkDefinition, feeds: Mapping[str, torch.Tensor]) -> None:
        self.network, self.plan = network, _plan(network)
        self.env: dict[ITensor, torch.Tensor] = {}
        sizes: dict[str, int] = {}
        for tensor in network._inputs:
            self.env[tensor] = _fed(tensor, feeds, sizes)
        unknown = feeds.keys() - {held(t, "name") for t in network._inputs}
        if unknown:
            raise RuleError(f"fed {', '.join(sorted(unknown))}: no inputs of this network")

    def layer(self, layer: Layer) -> None:
        if layer._outputs and layer._outputs[0] in self.env:
            return
        if isinstance(layer, kinds.IIfConditionalOutputLayer):
            made = [self.branch(layer)]
        else:
            made = _RUN[layer._kind](layer, [self.env[t] for t in layer._inputs if t is not None])
        for tensor, value in zip(layer._outputs, made, strict=True):
            _check_made(tensor, value)
            self.env[tensor] = value

    def branch(self, end: kinds.IIfConditionalOutputLayer) -> torch.Tensor:
        """Run the branch that the condition asks for, and it alone."""
        condition = end._conditional._condition
        assert condition
        side = 0 if bool(self.env[condition._in()]) else 1
        for layer in self.plan[1][end][side]:
            self.layer(layer)
        return self.env[end._in(side)]


def _fed(tensor: ITensor, feeds: Mapping[str, torch.Tensor], sizes: dict[str, int]) -> torch.Tensor:
    name = held(tensor, "name")
    if name not in feeds:
        raise RuleError(f"input {name} was not fed")
    value = feeds[name]
    _check_made(tensor, value)
    tensor._agree(value.shape, sizes)
    return value


def _check_made(tensor: ITensor, value: torch.Tensor) -> None:
    kind, dims = tensor._type
    fits = value.dtype == TORCH[kind] and value.dim() == len(dims)
    if not fits or any(d not in (-1, n) for d, n in zip(dims, value.shape)):
        raise RuleError(f"{tensor._text}: found {value.dtype}{list(value.shape)}")


# --- layers -----------------------------------------------------------------------------------


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _pointwise(f: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """Compute `f` in fp32 at least, rounded to the operands' dtype."""
    out = f(*map(_wide, tensors))
    return out if out.dtype == torch.bool else out.to(tensors[0].dtype)


def _constant(layer: Any, ins: Tensors) -> Tensors:
    cached = layer._network._constants
    if layer._index not in cached:
        shape = tuple(held(layer, "shape"))
        cached[layer._index] = held(layer, "weights")._tensor().reshape(shape)
    return [cached[layer._index]]


def _dequantize(layer: Any, ins: Tensors) -> Tensors:
    """Multiply in fp32, rounded once; a scale serves one entry of the axis, or all numbers."""
    x, scale = ins
    axis = int(held(layer, "axis"))
    if scale.dim():
        scale = scale.reshape([-1 if i == axis % x.dim() else 1 for i in range(x.dim())])
    return [(x.float() * scale.float()).to(scale.dtype)]


_SAME_NAME = "EXP LOG SQRT ABS NEG SIN COS ERF FLOOR CEIL SIGN TANH SIGMOID RELU"
#: operations and activations
_UNARY: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{name: getattr(torch, name.lower()) for name in _SAME_NAME.split()},
    "GELU_ERF": torch.nn.functional.gelu,
    "GELU_TANH": partial(torch.nn.functional.gelu, approximate="tanh"),
    "RECIP": torch.reciprocal,
    "NOT": torch.logical_not,
}


def _divided(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Divide; whole numbers are cut off towards zero."""
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


_ELEMENTWISE: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
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
    "XOR": torch.logical_xor,
    "EQUAL": torch.eq,
    "GREATER": torch.gt,
    "LESS": torch.lt,
}


def _looked_up(
    table: Mapping[str, Callable[..., torch.Tensor]], member: str
) -> Callable[[Any, Tensors], Tensors]:
    """Return a function that runs a layer which names its own by an enum."""
    return lambda layer, ins: [_pointwise(table[held(layer, member).name], *ins)]


def _matmul(layer: Any, ins: Tensors) -> Tensors:
    ops = held(layer, "op0"), held(layer, "op1")
    a, b = (x.mT if op.name == "TRANSPOSE" else x for x, op in zip(ins, ops))
    return [a @ b]


def _softmax(layer: Any, ins: Tensors) -> Tensors:
    (axis,) = kinds._bits(layer._axes(), ins[0].dim())
    return [_wide(ins[0]).softmax(axis).to(ins[0].dtype)]


_REDUCE: Mapping[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.sum,
    "AVG": torch.mean,
    "MAX": torch.amax,
    "MIN": torch.amin,
}


def _reduce(layer: Any, ins: Tensors) -> Tensors:
    x = ins[0]
    axes = kinds._bits(int(held(layer, "axes")), x.dim())
    out = _REDUCE[held(layer, "op").name](_wide(x), axes, held(layer, "keep_dims"))
    return [out.to(x.dtype)]


def _topk(layer: Any, ins: Tensors) -> Tensors:
    (axis,) = kinds._bits(int(held(layer, "axes")), ins[0].dim())
    largest = held(layer, "op").name == "MAX"
    values, index = torch.topk(ins[0], int(held(layer, "k")), axis, largest)
    return [values, index.to(TORCH[held(layer, "indices_type")])]


def _shuffle(layer: Any, ins: Tensors) -> Tensors:
    x, target = ins[0], held(layer, "reshape_dims")
    if (order := held(layer, "first_transpose")) is not None:
        x = x.permute(*order)
    if target is not None:
        copies = held(layer, "zero_is_placeholder")
        x = x.reshape([x.shape[i] if d == 0 and copies else int(d) for i, d in enumerate(target)])
    if (order := held(layer, "second_transpose")) is not None:
        x = x.permute(*order)
    return [x]


def _slice(layer: Any, ins: Tensors) -> Tensors:
    """Slice; a stride of 0 repeats one entry. What is beyond the end is at the start, in the mode
    that wraps."""
    given = iter(ins[1:])
    start, shape, stride = (
        next(given).tolist()
        if len(layer._inputs) > i and layer._inputs[i] is not None
        else held(layer, member)
        for i, member in layer._MEMBERS
    )
    x, wraps = ins[0], held(layer, "mode").name == "WRAP"
    for axis, first, count, step in zip(layer._sliced_axes(), start, shape, stride):
        at = first + step * torch.arange(count)
        if wraps:
            at = at % x.shape[axis]
        if count and not 0 <= int(at.min()) <= int(at.max()) < x.shape[axis]:
            raise RuleError(
                f"{layer._title}: {count} from {first} by {step} of {list(x.shape)}, dim {axis}"
            )
        x = x.narrow(axis, first, count) if step == 1 and not wraps else x.index_select(axis, at)
    return [x]


def _in_bounds(layer: Any, index: torch.Tensor, size: int) -> torch.Tensor:
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < size:
        raise RuleError(f"{layer._title}: index outside of {size}")
    return index.long()


def _gather(layer: Any, ins: Tensors) -> Tensors:
    x, index = ins
    if held(layer, "mode").name == "DEFAULT":
        axis = int(held(layer, "axis"))
        rows = x.index_select(axis, _in_bounds(layer, index, x.shape[axis]).reshape(-1))
        return [rows.reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])]
    shared = int(held(layer, "num_elementwise_dims"))
    count = index.shape[-1]
    places = [_in_bounds(layer, index[..., i], x.shape[shared + i]) for i in range(count)]
    for i in range(shared):
        shape = [-1 if j == i else 1 for j in range(index.dim() - 1)]
        places.insert(i, torch.arange(x.shape[i]).reshape(shape))
    return [x[tuple(places)]]


def _cache_update(layer: Any, ins: Tensors) -> Tensors:
    """Write in place. TensorRT ignores what lies out of bounds silently; here it is an error."""
    cache, new, at = ins
    for row, first in enumerate(at.tolist()):
        last = first + new.shape[2]
        if not 0 <= first <= last <= cache.shape[2]:
            raise RuleError(f"{layer._title}: {first} to {last} of {list(cache.shape)}")
        cache[row, :, first:last] = new[row]
    return [cache]


def _collective(layer: Any, ins: Tensors) -> Tensors:
    """Exchange; a sum is rounded after each addition, in order of rank, as on the way of NCCL."""
    exchange = layer._network._exchange
    if exchange is None:
        raise RuleError(f"{layer._title}: a rank alone has nobody to exchange with")
    parts = exchange(ins[0])
    if len(parts) != layer._ranks:
        raise RuleError(f"{layer._title}: {len(parts)} ranks run, num_ranks is {layer._ranks}")
    if layer._gathers:
        return [torch.cat([*parts])]
    return [reduce(partial(_pointwise, torch.add), parts)]


def _attention(layer: Any, ins: Tensors) -> Tensors:
    """Attend: scores and sums in fp32, probabilities rounded to the inputs' dtype."""
    q, k, v = ins[:3]
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = _wide(q) @ _wide(k).mT
    if len(ins) > 3:
        mask = ins[3]
        seen = mask.dtype == torch.bool
        least = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, least) if seen else scores + _wide(mask)
    if layer._is_causal():
        s, t = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(s, t).triu(t - s + 1).bool(), -torch.inf)
    if held(layer, "norm_op").name == "SOFTMAX":
        scores = scores.softmax(-1)
    return [(_wide(scores.to(q.dtype)) @ _wide(v)).to(q.dtype)]


_RUN: Mapping[str, Callable[[Any, Tensors], Tensors]] = {
    "constant": _constant,
    "identity": lambda layer, ins: ins,
    "cast": lambda layer, ins: [ins[0].to(TORCH[held(layer, "to_type")])],
    "dequantize": _dequantize,
    "unary": _looked_up(_UNARY, "op"),
    "activation": _looked_up(_UNARY, "type"),
    "elementwise": _looked_up(_ELEMENTWISE, "op"),
    "matrix multiply": _matmul,
    "softmax": _softmax,
    "reduce": _reduce,
    "top-k": _topk,
    "shuffle": _shuffle,
    "concatenation": lambda layer, ins: [torch.cat(ins, layer._axis())],
    "slice": _slice,
    "select": lambda layer, ins: [torch.where(ins[0], ins[1], ins[2])],
    "shape": lambda layer, ins: [torch.tensor(ins[0].shape, dtype=torch.int64)],
    "gather": _gather,
    "KV cache update": _cache_update,
    "attention": _attention,
    "distributed collective": _collective,
    "plugin": lambda layer, ins: list(held(layer, "plugin").run(*ins)),
    "condition": lambda layer, ins: [],
    "conditional input": lambda layer, ins: ins,
}
