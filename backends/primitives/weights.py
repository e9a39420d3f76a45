"""Quantised weights: how a target's products take them, and how rows of them are gathered."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import torch

from g4ir.ir.graph import Builder, Graph, Node
from g4ir.ops.codecs import COMPLEMENT, PACKED, unpack_codes

from .emitter import Emitter, Operand
from .network import Network

# --- how they lie -----------------------------------------------------------------------------


def made_dense(g: Graph, takes: Callable[[Graph, Node], bool]) -> Graph:
    """Return a graph whose weights are made of their codes at build, but for those that `takes`
    says yes to."""
    nodes = (n if n.op != "dequantize" or takes(g, n) else replace(n, op="dense") for n in g.nodes)
    return replace(g, nodes=tuple(nodes))


def by_columns(g: Graph, dtypes: Collection[str] = tuple(PACKED)) -> Graph:
    """Return a graph whose quantised weights with codes of these dtypes lie by columns. Two codes
    of 4 bits lie in a byte, so that of an odd number of rows the weight is made at build."""

    def held(n: Node) -> bool:
        return n["codes"].type.dtype in dtypes

    even = made_dense(
        g, lambda _, n: not held(n) or int(n["codes"].type.shape[-2]) % _packed(n) == 0
    )

    def nodes() -> Iterator[Node]:
        for n in even.nodes:
            b = Builder(g.name)
            if n.op == "dequantize" and held(n):
                parts = [b.emit("columns", v, name=_named(v.name)) for v in n.inputs]
                b.emit("dequantize_columns", *parts, name=n.out.name, **n.attrs)
            yield from b.nodes or [n]

    return replace(even, nodes=tuple(nodes()))


def _packed(n: Node) -> int:
    return PACKED[n["codes"].type.dtype]


def _named(part: str) -> str:
    """`L0.attn.wq.codes` -> `L0.attn.wq.columns.codes`"""
    weight, _, kind = part.rpartition(".")
    return f"{weight}.columns.{kind}"


# --- how they are taken -----------------------------------------------------------------------


@dataclass(frozen=True)
class Coded(Operand):
    """A weight of which there is no tensor: `type` is what its codes and scales mean."""

    codes: Operand
    scales: Operand
    #: whether they lie by columns
    columns: bool


def coded(net: Network, n: Node, codes: Operand, scales: Operand) -> Coded:
    """Return a quantised weight, which each node that takes it turns into what it needs."""
    return Coded(n.out.type, None, codes, scales, n.op == "dequantize_columns")


@dataclass(frozen=True)
class Weight:
    """A weight as products take it: [.., out, in], or its transpose where it is turned. What they
    make is multiplied by `factors` [.., out], where a target has scales of rows behind them."""

    matrix: Operand
    turned: bool = False
    factors: Operand | None = None


def whole_weight(e: Emitter, w: Operand, reader: int = 0) -> Weight:
    """Return a weight that is a tensor, or dequantised to one where it is read, by each of several
    readers for itself."""
    if not isinstance(w, Coded):
        return Weight(w)
    if (
        not w.columns
        and int(w.scales.shape[-1]) == 1
        and (made := e.part(w.codes, w.dtype, reader))
    ):
        matrix, rest = made
        scales = e.cast(e.reshape(w.scales, *w.shape[:-1]), w.dtype)
        return Weight(matrix, False, e.mul(scales, rest))
    axis = w.rank - 2 if w.columns else w.rank - 1
    return Weight(e.dequantize(w.codes, w.scales, axis, w.dtype), w.columns)


def gathered_weight(net: Network, w: Operand, index: Operand) -> Weight:
    """Return entries of the first axis of a weight. If it is quantised, codes are gathered, unless
    a target reads no more of it than is gathered behind it."""
    e = net.e
    if isinstance(w, Coded) and e.gathers_codes:
        axis = index.rank + w.rank - (3 if w.columns else 2)
        signed = COMPLEMENT if w.columns else 0
        return Weight(gathered(net, w.codes, w.scales, index, axis, w.dtype, signed), w.columns)
    made = whole_weight(e, w)
    factors = made.factors and e.gather(made.factors, index, 0)
    return Weight(e.gather(made.matrix, index, 0), made.turned, factors)


def linear(e: Emitter, x: Operand, w: Operand, reader: int = 0) -> Operand:
    """Return x w^T."""
    made = whole_weight(e, w, reader)
    y = e.linear(x, made.matrix, made.turned)
    if made.factors is None:
        return y
    return e.mul(y, e.unsqueeze(made.factors, *range(x.rank - 1)))


def gathered(
    net: Network,
    codes: Operand,
    scales: Operand,
    index: Operand,
    axis: int,
    dtype: str,
    signed: int = 0,
) -> Operand:
    """Return entries of the first axis of codes times their scales, rounded once; `axis` of the
    result is the one that scales have groups of. Codes of 4 bits are + 8, or so after `signed`."""
    e = net.e
    numbers = _numbers(net, codes, index, signed)
    factors = e.cast(e.gather(scales, index, 0), "f32")
    groups, size = int(factors.shape[axis]), int(numbers.shape[axis])
    if groups == 1:
        return e.cast(e.mul(numbers, factors), dtype)
    lead, rest = numbers.shape[:axis], numbers.shape[axis + 1 :]
    numbers = e.reshape(numbers, *lead, groups, size // groups, *rest)
    made = e.mul(numbers, e.unsqueeze(factors, axis + 1))
    return e.cast(e.reshape(made, *lead, size, *rest), dtype)


def _numbers(net: Network, codes: Operand, index: Operand, signed: int) -> Operand:
    """Return what gathered codes are, f32. They are gathered as bytes: no target gathers 4 bits, or
    e4m3, none of them shifts, and TensorRT's parser takes whole numbers of 8 bits with a sign as
    codes of a product alone. Bytes that are no such number are looked up."""
    e = net.e
    found = e.gather(e.bits(codes), index, 0)
    if codes.dtype == "i8":
        numbers = e.cast(found, "f32")
        return e.where(e.binary("gt", numbers, 127), e.sub(numbers, 256), numbers)
    table = net.shared(("codes", codes.dtype, signed), lambda: e.constant(_table(codes, signed)))
    numbers = e.gather(table, e.cast(found, "i32"), 0)
    return e.reshape(numbers, *found.shape[:-1], int(found.shape[-1]) * PACKED[codes.dtype])


def _table(codes: Operand, signed: int) -> torch.Tensor:
    """Return what each byte stands for: f32[256] or, of two codes, f32[256, 2]."""
    each = torch.arange(256, dtype=torch.uint8)
    if codes.dtype == "u8":
        return unpack_codes(each[:, None] ^ signed).float()
    return each.view(torch.float8_e4m3fn).float().nan_to_num()
