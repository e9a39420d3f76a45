"""Which nodes run as a kernel of ours on a GPU, and with which settings. Needs no torch.

A node that is not chosen goes through the library and the compiler: matrix products of many rows,
anything in fp32, everything between the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from g4ir.ir.graph import Graph, Node, Program
from g4ir.ops.types import Type

from .target import Target
from .tunings import Tuning, find_tuning

#: of decode attention: more shares than this are for contexts in which each has more keys
SHARES, SHARE_KEYS = 64, 256

#: most rows that products with few rows take; more are the library's
SKINNY = 32
#: most rows whose experts are read row by row; more are sorted by expert first
UNSORTED = 3
#: most candidates of a row that are found at once
MOST_CANDIDATES = 64
HALF = frozenset({"bf16", "f16"})
#: ops that add up partial sums of the products before them: op -> inputs that may be such
SUMS = {"norm_residual": (0,), "dual_norm_residual": (0, 2)}

#: the kernels of a layer's experts beside its dense MLP, row by row and sorted
MOE = ("router_logits", "moe_gate_up", "moe_down")
MOE_SORTED = ("router_logits", "moe_sort", "moe_gate_up_sorted", "moe_down_sorted")

Shape = dict[str, int]
#: (graph, node, target) -> (kernels, shape), or None
Rule = Callable[[Graph, Node, Target], tuple[str | tuple[str, ...], Shape] | None]


@dataclass(frozen=True)
class Choice:
    """The kernels of a node with their settings, in order, and the shape that these were looked
    up by."""

    shape: Mapping[str, int]
    tunings: Mapping[str, Tuning]

    @property
    def kernel(self) -> str:
        """The only one, or the first of several."""
        return next(iter(self.tunings))

    @property
    def use(self) -> Mapping[str, int]:
        """The settings of the first."""
        return self.tunings[self.kernel].use


def choose(g: Graph, n: Node, target: Target) -> Choice | None:
    """The kernel of a node of the graph; None: it is not ours."""
    if not target.gpu or n.op not in RULES or n.inputs[0].type.dtype not in HALF:
        return None
    found = RULES[n.op](g, n, target)
    if found is None:
        return None
    kernels, shape = found
    names = (kernels,) if isinstance(kernels, str) else kernels
    return Choice(shape, {k: find_tuning(k, target.gpu, shape) for k in names})


def choices(p: Program, phase: str, target: Target) -> Iterator[tuple[Node, Choice | None]]:
    """Every node of a phase with its kernel."""
    g = p.graphs[phase]
    return ((n, choose(g, n, target)) for n in g.nodes)


def is_row(t: Type) -> bool:
    """[B,1,...]: one token for each row of the batch."""
    return t.rank >= 3 and t.shape[1] == 1


def _size(t: Type, axis: int) -> int:
    size = t.shape[axis]
    assert isinstance(size, int)
    return size


def _skinny(n: Node, target: Target) -> bool:
    return is_row(n.inputs[0].type) and target.rows <= SKINNY


def _product(n: Node, target: Target) -> Shape:
    w = n.inputs[1].type
    return {"rows": target.rows, "n": _size(w, 0), "k": _size(w, 1)}


def is_summed(g: Graph, n: Node) -> bool:
    """Whether the node's result goes nowhere but into an op that can add up partial sums."""
    users = g.users().get(n.out.name, [])
    return (
        len(users) == 1
        and users[0].op in SUMS
        and any(users[0].inputs[i] == n.out for i in SUMS[users[0].op])
        and users[0].inputs.count(n.out) == 1
    )


def _linear(g: Graph, n: Node, target: Target) -> tuple[str, Shape] | None:
    if not _skinny(n, target):
        return None
    kernel = "skinny_linear_parts" if is_summed(g, n) else "skinny_linear"
    return kernel, _product(n, target)


def _linear_glu(g: Graph, n: Node, target: Target) -> tuple[str, Shape] | None:
    return ("skinny_linear_glu", _product(n, target)) if _skinny(n, target) else None


def _norm(g: Graph, n: Node, target: Target) -> tuple[str, Shape] | None:
    x = n.inputs[0].type
    return (n.op, {"d": _size(x, -1)}) if is_row(x) else None


def _qkv(g: Graph, n: Node, target: Target) -> tuple[str, Shape] | None:
    q = n.outputs[0].type
    return "qkv_write", {"d": _size(q, -1)}


def _queries(g: Graph, n: Node, target: Target) -> tuple[str, Shape] | None:
    """Q of a layer that reads another layer's cache."""
    x = n.inputs[0].type
    if not is_row(x) or reader(g, n) is None:
        return None
    return "q_heads", {"d": _size(x, -1)}


def reader(g: Graph, n: Node) -> Node | None:
    """The attention over a cache alone that reads a node's first result as its queries."""
    users = g.users().get(n.outputs[0].name, [])
    found = [u for u in users if u.op in ATTENTIONS and u.inputs[0] == n.outputs[0]]
    return found[0] if len(found) == 1 and not has_chunk(found[0]) else None


ATTENTIONS = {"attention": 3, "attention_latent": 4}


def caches(n: Node) -> int:
    """How many caches an attention reads."""
    return 2 if n.op == "attention" or n.attrs["form"] == "raw" else 1


def has_chunk(n: Node) -> bool:
    """Whether an attention reads fresh rows beside its caches."""
    return len(n.inputs) > ATTENTIONS[n.op] + caches(n)


def reads_blocks(n: Node) -> bool:
    """Whether an attention reads block ids."""
    return len(n.inputs) > ATTENTIONS[n.op] + 2 * caches(n)


def kv_heads(n: Node) -> int:
    return _size(n.inputs[ATTENTIONS[n.op]].type, 2)


def _attention(g: Graph, n: Node, target: Target) -> tuple[str, Shape] | None:
    """Blocks of media are the library's: the kernels see the past alone."""
    if reads_blocks(n):
        return None
    q, heads = n.inputs[0].type, kv_heads(n)
    shape = {
        "d": _size(q, -1),
        "kv_heads": heads,
        "group": _size(q, 2) // heads,
        "window": n.whole("window"),
    }
    latent = "_latent" if n.op == "attention_latent" else ""
    if not has_chunk(n):
        if not is_row(q):
            return None
        return f"decode_attention{latent}", shape | {"programs": target.rows * heads}
    if latent and n.attrs["form"] != "value":
        return "prefill_attention", shape
    return f"prefill_attention{latent}", shape


def _moe(g: Graph, n: Node, target: Target) -> tuple[tuple[str, ...], Shape] | None:
    if not _skinny(n, target):
        return None
    x, dense, gate_up = n.inputs[1].type, n.inputs[6].type, n.inputs[8].type
    shape = {
        "rows": target.rows,
        "d": _size(x, -1),
        "experts": _size(gate_up, 0),
        "inner": _size(gate_up, 1) // 2,
        "dense": _size(dense, 0) // 2,
    }
    return (MOE if target.rows <= UNSORTED else MOE_SORTED), shape


def _choose_token(g: Graph, n: Node, target: Target) -> tuple[str, Shape] | None:
    logits = n.inputs[0].type
    few = n.op == "greedy" or n.whole("k") <= MOST_CANDIDATES
    kernel = {"greedy": "block_argmax", "candidates": "top_candidates"}[n.op]
    return (kernel, {"vocab": _size(logits, -1)}) if few else None


RULES: dict[str, Rule] = {
    "linear": _linear,
    "linear_glu": _linear_glu,
    "rms_norm": _norm,
    "norm_residual": _norm,
    "dual_norm_residual": _norm,
    "qkv_write": _qkv,
    "norm_rope": _queries,
    "attention": _attention,
    "attention_latent": _attention,
    "moe_mlp": _moe,
    "greedy": _choose_token,
    "candidates": _choose_token,
}
