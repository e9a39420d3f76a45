"""Quantised weights in networks: layouts for a target's matmuls, and gathers of entries."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import torch

from g4ir.ir.graph import Builder, Graph, Node
from g4ir.ops.codecs import COMPLEMENT, PACKED, unpack_codes

from .emitter import Emitter, Operand
from .network import Network

# --- layout -----------------------------------------------------------------------------------


def dequantize_at_build(g: Graph, keeps_codes: Callable[[Graph, Node], bool]) -> Graph:
    """Return the graph with quantised weights dequantised at build time, except those for whose
    `dequantize` node `keeps_codes(graph, node)` is true."""
    nodes = (
        n if n.op != "dequantize" or keeps_codes(g, n) else replace(n, op="dense") for n in g.nodes
    )
    return replace(g, nodes=tuple(nodes))


def by_columns(g: Graph, dtypes: Collection[str] = tuple(PACKED)) -> Graph:
    """Return the graph with quantised weights of these code dtypes stored column-major. Two 4-bit
    codes share a byte, so a 4-bit weight with an odd number of rows is dequantised at build
    time."""

    def in_columns(n: Node) -> bool:
        return n["codes"].type.dtype in dtypes

    even = dequantize_at_build(
        g, lambda _, n: not in_columns(n) or int(n["codes"].type.shape[-2]) % _packed(n) == 0
    )

    def nodes() -> Iterator[Node]:
        for n in even.nodes:
            b = Builder(g.name)
            if n.op == "dequantize" and in_columns(n):
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


# --- weights as operands ----------------------------------------------------------------------


@dataclass(frozen=True)
class QuantizedWeight(Operand):
    """A quantised weight that is not dequantised yet; `type` is that of the dequantised tensor."""

    codes: Operand
    scales: Operand
    #: whether codes and scales are column-major
    columns: bool


def quantized_weight(net: Network, n: Node, codes: Operand, scales: Operand) -> QuantizedWeight:
    """Lower a dequantize lazily: each reader dequantises the weight in the layout it needs."""
    return QuantizedWeight(n.out.type, None, codes, scales, n.op == "dequantize_columns")


@dataclass(frozen=True)
class Weight:
    """A matmul's weight: [.., out, in], or its transpose if `turned`. The product is multiplied by
    `factors` [.., out] on targets that apply row scales after the matmul."""

    matrix: Operand
    turned: bool = False
    factors: Operand | None = None


def read_weight(e: Emitter, w: Operand, reader: int = 0) -> Weight:
    """Return a weight for a matmul. A quantised one is dequantised once for each reader of it;
    `reader`: index of the reader."""
    if not isinstance(w, QuantizedWeight):
        return Weight(w)
    per_row = not w.columns and int(w.scales.shape[-1]) == 1
    if per_row and (scaled := e.part(w.codes, w.dtype, reader)):
        matrix, factor = scaled
        scales = e.reshape(w.scales, *w.shape[:-1])
        return Weight(matrix, False, e.mul(scales, factor))
    axis = w.rank - 2 if w.columns else w.rank - 1
    return Weight(e.dequantize(w.codes, w.scales, axis, w.dtype), w.columns)


def gathered_weight(net: Network, w: Operand, index: Operand) -> Weight:
    """Gather entries of a weight's first axis (experts). A quantised weight's codes are gathered
    before they are dequantised, unless the target fuses dequantisation and gather
    (`gathers_codes`)."""
    e = net.e
    if isinstance(w, QuantizedWeight) and e.gathers_codes:
        axis = index.rank + w.rank - (3 if w.columns else 2)
        signed = COMPLEMENT if w.columns else 0
        matrix = gather_dequantized(net, w.codes, w.scales, index, axis, w.dtype, signed)
        return Weight(matrix, w.columns)
    weight = read_weight(e, w)
    factors = weight.factors and e.gather(weight.factors, index, 0)
    return Weight(e.gather(weight.matrix, index, 0), weight.turned, factors)


def linear(e: Emitter, x: Operand, w: Operand, reader: int = 0) -> Operand:
    """Return x w^T for a dense or quantised weight; `reader` as in `read_weight`."""
    weight = read_weight(e, w, reader)
    y = e.linear(x, weight.matrix, weight.turned)
    if weight.factors is None:
        return y
    factors = e.unsqueeze(weight.factors, *range(x.rank - 1))
    return e.cast(e.mul(e.cast(y, factors.dtype), factors), y.dtype)


def gather_dequantized(
    net: Network,
    codes: Operand,
    scales: Operand,
    index: Operand,
    axis: int,
    dtype: str,
    signed: int = 0,
) -> Operand:
    """Gather entries of the codes' first axis and dequantise them, rounded once. Scales are grouped
    along `axis` of the result. `signed`: XOR that converts bytes of 4-bit codes to code + 8."""
    e = net.e
    values = _gather_values(net, codes, index, signed)
    factors = e.cast(e.gather(scales, index, 0), "f32")
    groups, size = int(factors.shape[axis]), int(values.shape[axis])
    if groups == 1:
        return e.cast(e.mul(values, factors), dtype)
    lead, trailing = values.shape[:axis], values.shape[axis + 1 :]
    values = e.reshape(values, *lead, groups, size // groups, *trailing)
    scaled = e.mul(values, e.unsqueeze(factors, axis + 1))
    return e.cast(e.reshape(scaled, *lead, size, *trailing), dtype)


def _gather_values(net: Network, codes: Operand, index: Operand, signed: int) -> Operand:
    """Return the gathered codes' values, f32. Codes are gathered as bytes, since no target gathers
    4 bits or e4m3, and TensorRT's parser has no bit shifts and takes int8 only as a matmul's
    weight; bytes of 4-bit and e4m3 codes index a lookup table."""
    e = net.e
    raw = e.gather(e.bits(codes), index, 0)
    if codes.dtype == "i8":
        values = e.cast(raw, "f32")
        return e.where(e.binary("gt", values, 127), e.sub(values, 256), values)
    table = net.shared(("codes", codes.dtype, signed), lambda: e.constant(_table(codes, signed)))
    values = e.gather(table, e.cast(raw, "i32"), 0)
    return e.reshape(values, *raw.shape[:-1], int(raw.shape[-1]) * PACKED[codes.dtype])


def _table(codes: Operand, signed: int) -> torch.Tensor:
    """Return the value of each byte: f32[256], or f32[256, 2] for two 4-bit codes."""
    code_bytes = torch.arange(256, dtype=torch.uint8)
    if codes.dtype == "u8":
        return unpack_codes(code_bytes[:, None] ^ signed).float()
    return code_bytes.view(torch.float8_e4m3fn).float().nan_to_num()
