"""The record of a Triton kernel: everything that the compiler knows about it.

A kernel is a pair of files. `NAME.py` has its record, or several: which nodes it replaces, how it
is called and how often it is launched. `NAME_triton.py` has the device code and a `triton_op` in
the namespace `g4ir` that launches it; on other devices the op computes the reference. Records are
used without torch or triton installed, to choose kernels, count launches and plan memory: so only
`call` imports the second file, when it runs. Every such pair of this folder is in the table of
kernels; no other file of the package refers to a kernel by name. `tests/interpreted/cases/NAME.py`
has its samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from g4ir.backends.inductor.lowered import Coded
from g4ir.backends.inductor.target import Target
from g4ir.ir.graph import Graph, Node, Value
from g4ir.ops.codecs import FORMAT_OF, FORMATS
from g4ir.ops.types import Type
from g4ir.quant.rewrite import QUANTISED_OPS

#: maximum rows of the small-batch matmul kernels; larger batches use the BLAS library
SKINNY = 64
#: maximum values in a tile of a quantised weight whose format has large blocks, 64 for each of 128
#: threads, so that decoded values fit the registers
DECODED = 8192

#: sizes that the launch settings of a kernel depend on, by name
Shape = Mapping[str, int]
#: launch settings of a kernel, by name (`block_n`, `warps`, `stages`)
Use = Mapping[str, int]


@dataclass(frozen=True)
class PackedWeight(Coded):
    """A quantised weight: `codes` as bytes [.., row bytes], scales, and the name of their format,
    `form`."""

    form: str = ""

    def dense(self) -> Any:
        from .rows_triton import dense

        return dense(self.codes, self.scales, self.form, self.dtype)


def codes_and_scales(w: Any) -> tuple[Any, Any, str]:
    """Return (codes as bytes, scales, format) of a quantised weight, or (weight, None, "") of a
    dense one."""
    return (w.codes, w.scales, w.form) if isinstance(w, PackedWeight) else (w, None, "")


@dataclass(frozen=True)
class Kernel:
    """One Triton kernel, or several launched in turn, that replace nodes of an op on a GPU.

    starts   kernel name -> launches per call, in launch order
    rule     (graph, node, target) -> shape that the launch settings depend on; None: the kernel
             does not replace this node
    call     (node, choice, *tensors) -> the node's outputs; writes caches in place
    uses     kernel name -> launch settings, or a function from the shape to them: estimates from
             the size of a Hopper GPU, none measured; kernels without an entry have none
    coded    whether `call` takes quantised weights (PackedWeight)
    large    whether thread blocks need more than 99 KiB of shared memory
    """

    op: str
    starts: Mapping[str, int]
    rule: Callable[[Graph, Node, Target], Shape | None]
    call: Callable[..., Any]
    uses: Mapping[str, Use | Callable[[Shape], Use]] = field(default_factory=dict)
    coded: bool = False
    large: bool = False

    def settings(self, shape: Shape) -> dict[str, Use]:
        """Return the launch settings of each kernel for a shape."""
        uses = {name: self.uses.get(name, {}) for name in self.starts}
        return {name: use(shape) if callable(use) else use for name, use in uses.items()}


@dataclass(frozen=True)
class Choice:
    """The kernel chosen for a node, the shape that its launch settings depend on, and the settings
    of each of its Triton kernels by name."""

    kernel: Kernel
    shape: Shape
    uses: Mapping[str, Use]

    @property
    def name(self) -> str:
        """Name of the kernel that is launched first."""
        return next(iter(self.uses))

    @property
    def use(self) -> Use:
        """The launch settings of the kernel that is launched first."""
        return self.uses[self.name]


@dataclass(frozen=True)
class Schedule:
    """A graph and the kernel choice of each lowered node, keyed by the node's first output."""

    graph: Graph
    target: Target
    choices: Mapping[str, Choice]

    def find(self, n: Node) -> Choice | None:
        """Return the kernel choice of a node of the graph or of an expansion; None if it has no
        kernel here."""
        return self.choices.get(n.outputs[0].name)


def is_row(t: Type) -> bool:
    """Whether a tensor is [B,1,...]: one token per sequence."""
    return t.rank >= 3 and t.shape[1] == 1


def is_skinny(n: Node, target: Target) -> bool:
    """Whether the node computes one token of each of at most SKINNY sequences (a decode step)."""
    return is_row(n.inputs[0].type) and target.rows <= SKINNY


def size(t: Type, axis: int) -> int:
    """Return the size of a dim that is static."""
    dim = t.shape[axis]
    assert isinstance(dim, int)
    return dim


def codes_of(n: Node | None) -> dict[str, int]:
    """Return {format: codes per scale} of the quantised weight that a node dequantises or gathers
    from; {} if kernels do not read it, and for any other node. They read rows of a multiple of 8
    values, with a scale per row or for each 16, 32, 64 ... codes."""
    if n is None or n.op not in QUANTISED_OPS:
        return {}
    form, k = FORMAT_OF[n["codes"].type.dtype], size(n.out.type, -1)
    group = k // (size(n["scales"].type, -1) // FORMATS[form].scales)
    supported = group == k or (group >= 16 and group & (group - 1) == 0)
    return {form: group} if supported and k % 8 == 0 else {}


def weight_codes(g: Graph, *weights: Value) -> dict[str, int]:
    """Return {format: codes per scale} (`codes_of`) of those weights of a graph that are quantised;
    for several weights of one format, the last one's codes per scale."""
    return {k: v for w in weights for k, v in codes_of(g.producers.get(w.name)).items()}


def is_quantised(shape: Shape) -> bool:
    """Whether a launch shape contains the format of a quantised weight (`weight_codes`)."""
    return any(fmt in shape for fmt in FORMATS)


def fit_blocks(shape: Shape, block_n: int, block_k: int, pairs: int = 1) -> dict[str, int]:
    """Return the tile sizes for a weight's formats: block_k of at least a block of each, and for
    formats with large blocks so few rows (`pairs` * block_n) that decoded values fit the
    registers."""
    formats = [FORMATS[name] for name in FORMATS.keys() & shape.keys()]
    block_k = max([block_k, *(fmt.block_values for fmt in formats)])
    if any(fmt.block_values > 2 for fmt in formats):
        block_n = min(block_n, DECODED // (block_k * pairs))
    return {"block_n": block_n, "block_k": block_k}


def byte_params(g: Graph) -> frozenset[str]:
    """Return the params of a graph that programs take as bytes: codes of quantised weights."""
    return frozenset(n["codes"].name for n in g.nodes if n.op in QUANTISED_OPS)


def row_tile(shape: Shape) -> int:
    """Return BLOCK_M: all rows, rounded up to a power of two of at least 16, the minimum of tensor
    cores."""
    return max(16, 1 << (shape["rows"] - 1).bit_length())


def reads_blocks(n: Node) -> bool:
    """Whether an attention node has block ids (bidirectional media blocks)."""
    return len(n.chunk) > len(n.caches)


def kv_heads(n: Node) -> int:
    """Return the number of KV heads of an attention node."""
    return size(n.caches[0].type, 2)


def attention_shape(n: Node) -> dict[str, int] | None:
    """Return the launch shape of an attention node: head dim, KV heads, query heads per KV head,
    window; None with bidirectional media blocks, since the kernels are causal only."""
    q, heads = n["q"].type, kv_heads(n)
    if reads_blocks(n):
        return None
    return {
        "d": size(q, -1),
        "kv_heads": heads,
        "group": size(q, 2) // heads,
        "window": n.integer("window"),
    }


def masking(n: Node) -> dict[str, Any]:
    """Return the mask and score attributes that all attention ops share."""
    return {k: n.attrs[k] for k in ("window", "scale", "softcap")}


def zeros_of(x: Any) -> Any:
    """Return zeros, i64 of x's leading dims, for arrival counters. Computed from x, so that the
    compiler fuses them into the kernel that produces x; torch.zeros would be one more launch."""
    return x.isnan().any(-1).long() * 0
