"""A kernel: everything that the program knows about it, in one record.

A kernel is a pair of files. `NAME.py` has its record: which nodes become it, how it is called, how
often it is started, and the samples that it is tested on. `NAME_triton.py` has what runs on the GPU
and a `triton_op` in the namespace `g4ir` that starts it, which off CUDA computes the op's
reference. Records are read where there is no torch and no triton, to choose, count and plan: so
only `call` imports the second file, when it runs. Every such pair of this folder is in the table of
kernels; no other file knows a kernel by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from g4ir.backends.inductor.lowered import Coded
from g4ir.backends.inductor.target import Target
from g4ir.ir.graph import Graph, Node, Value
from g4ir.ops.codecs import FORMAT_OF, FORMATS, PACKED
from g4ir.ops.kv_quant import quantized_width
from g4ir.ops.types import Type

#: most rows that products with few rows take; more are the library's
SKINNY = 64

Shape = Mapping[str, int]
Use = Mapping[str, int]


@dataclass(frozen=True)
class Sample:
    """A node that the kernel is tried on, once in fp32 and once in bf16.

    inputs  types as text: `T` stands for the dtype, and a * in front says that it is a weight
    attrs   of the node; "T" stands for the dtype
    use     settings; of several kernels by name
    given   operand -> its whole numbers
    packed  whether no operand may be a view of something larger
    coded   operand -> the form of the codes that it comes in, and how many share a scale (0: a row)
    """

    inputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    use: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[int, Any] = field(default_factory=dict)
    packed: bool = False
    coded: Mapping[int, tuple[str, int]] = field(default_factory=dict)


def codes_and_scales(w: Any) -> tuple[Any, Any]:
    """Return a weight and None, or its codes and their scales."""
    return (w.codes, w.scales) if isinstance(w, Coded) else (w, None)


@dataclass(frozen=True)
class Kernel:
    """The kernel that nodes of an op become on a GPU where `rule` says so.

    starts   the kernels' names, in order -> how often each is started
    rule     (graph, node, target) -> the shape that settings depend on, or None: not ours
    call     (run, node, choice, *tensors) -> the node's results, caches written in place
    samples  from which tests are generated, with `error` and `differ`
    error    of fp32 results against float64: the most, in units of their rms
    differ   share of bf16 results that may differ from the op's; None: their error against float64
             is compared with that of the op
    uses     launch settings by kernel, or a function of the shape: estimates from the size of a
             Hopper GPU, none measured; kernels without an entry have none
    coded    whether weights may come quantised
    """

    op: str
    starts: Mapping[str, int]
    rule: Callable[[Graph, Node, Target], Shape | None]
    call: Callable[..., Any]
    samples: tuple[Sample, ...]
    error: float
    differ: float | None = 0.01
    uses: Mapping[str, Use | Callable[[Shape], Use]] = field(default_factory=dict)
    coded: bool = False

    def settings(self, shape: Shape) -> dict[str, Use]:
        """Return the launch settings of each kernel for a shape."""
        uses = {name: self.uses.get(name, {}) for name in self.starts}
        return {name: use(shape) if callable(use) else use for name, use in uses.items()}


@dataclass(frozen=True)
class Choice:
    """The kernel of a node, the shape that its settings depend on, and these by kernel."""

    kernel: Kernel
    shape: Shape
    uses: Mapping[str, Use]

    @property
    def name(self) -> str:
        """The only kernel, or the first of several."""
        return next(iter(self.uses))

    @property
    def use(self) -> Use:
        """The settings of the first."""
        return self.uses[self.name]


@dataclass(frozen=True)
class Schedule:
    """A graph with the choice of each node that becomes a kernel, by the node's first result; made
    once, and handed to whoever lowers, counts, times or prints the graph."""

    graph: Graph
    target: Target
    choices: Mapping[str, Choice]

    def find(self, n: Node) -> Choice | None:
        """Return the kernel of a node of the graph, or of the parts of one; None: not ours."""
        return self.choices.get(n.outputs[0].name)


def is_row(t: Type) -> bool:
    """Whether a tensor is [B,1,...]: one token for each row of the batch."""
    return t.rank >= 3 and t.shape[1] == 1


def is_skinny(n: Node, target: Target) -> bool:
    """Whether the node has few rows in all."""
    return is_row(n.inputs[0].type) and target.rows <= SKINNY


def size(t: Type, axis: int) -> int:
    """Return a dim that is a number."""
    dim = t.shape[axis]
    assert isinstance(dim, int)
    return dim


def codes_of(g: Graph, v: Value) -> dict[str, int]:
    """Return {form: how many codes share a scale} of a quantised weight that kernels read as such;
    nothing of any other. A part of a row has a power of two of them, from 16 on."""
    n = g.producers.get(v.name)
    if n is None or n.op != "dequantize":
        return {}
    codes, k = n["codes"].type, size(v.type, -1)
    group = k // size(n["scales"].type, -1)
    supported = group == k or (group >= 16 and group & (group - 1) == 0)
    supported &= k % 8 == 0 and codes.dtype in PACKED
    return {FORMAT_OF[codes.dtype]: group} if supported else {}


def is_quantised(shape: Shape) -> bool:
    """Whether a shape has what `codes_of` returns of a weight."""
    return any(fmt in shape for fmt in FORMATS)


def row_tile(shape: Shape) -> int:
    """Return how many of `rows` a program takes: what tensor cores take at least, or all."""
    return max(16, 1 << (shape["rows"] - 1).bit_length())


def reads_blocks(n: Node) -> bool:
    """Whether an attention reads block ids."""
    return len(n.chunk) > len(n.caches)


def kv_heads(n: Node) -> int:
    """Count the heads of an attention's caches."""
    return size(n.caches[0].type, 2)


def attention_shape(n: Node) -> dict[str, int] | None:
    """Return the shape; None for blocks of media, the library's: kernels see the past alone."""
    q, heads = n["q"].type, kv_heads(n)
    if reads_blocks(n):
        return None
    return {
        "d": size(q, -1),
        "kv_heads": heads,
        "group": size(q, 2) // heads,
        "window": n.whole("window"),
    }


def masking(n: Node) -> dict[str, Any]:
    """Return the attributes that every attention has."""
    return {k: n.attrs[k] for k in ("window", "scale", "softcap")}


def attention_sample(
    lengths: tuple[int, ...],
    slots: int,
    window: int,
    use: Use,
    tokens: int = 0,
    heads: tuple[int, int] = (4, 2),
    d: int = 32,
    scale: float = 0.3,
    softcap: float = 0.0,
    pairs: int | None = None,
    kv_dtype: str = "",
) -> Sample:
    """Return rows of which `lengths` tokens are in caches of `slots`: the newest of these attends,
    or a chunk of `tokens` that follows. `heads`: of queries and of keys; `pairs`: that are
    rotated, of a latent cache; `kv_dtype`: what the caches' rows are held in, if not the dtype."""
    b, s, (nq, n) = len(lengths), tokens or 1, heads
    widths = [d, d] if pairs is None else [d + 2 * pairs]
    layouts = [(kv_dtype or "T", quantized_width(w, kv_dtype) if kv_dtype else w) for w in widths]
    attrs: dict[str, Any] = {"window": window, "scale": scale, "softcap": softcap}
    if pairs is not None:
        attrs["pairs"] = pairs
    first = [length - (tokens == 0) for length in lengths]
    return Sample(
        (
            f"T[{b},{s},{nq},{d}]",
            f"i64[{b},{s}]",
            f"i64[{b}]",
            *[f"*T[{d}]"] * (pairs is not None),
            *(f"{t}[{slots},{b},{n},{w}]" for t, w in layouts),
            *(f"{t}[{b},{tokens},{n},{w}]" for t, w in layouts * bool(tokens)),
        ),
        attrs,
        use,
        {1: [[*range(at, at + s)] for at in first], 2: lengths},
    )


def zeros_of(x: Any) -> Any:
    """Return zeros, i64 of the leading dims: counters of programs that work together. Made of what
    the kernel reads, since the compiler then makes both in one kernel; of nothing, by one more."""
    return x.isnan().any(-1).long() * 0
