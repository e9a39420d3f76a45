"""Products of a few rows with a weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g4ir.ir.graph import Graph, Node
from g4ir.ops.mlp import ACTIVATIONS

from ..target import Target
from .base import Choice, Kernel, Sample, Shape, is_skinny, size

if TYPE_CHECKING:
    from ..run import Run

#: ops that add up partial sums of the products before them: op -> inputs that may be such
SUMS = {"norm_residual": (0,), "dual_norm_residual": (0, 2)}


def _sum(g: Graph, n: Node) -> Node | None:
    """Return the op that can add up partial sums, where the node's result goes nowhere else."""
    users = g.users().get(n.out.name, [])
    if len(users) != 1 or users[0].op not in SUMS or users[0].inputs.count(n.out) != 1:
        return None
    summed = any(users[0].inputs[i] == n.out for i in SUMS[users[0].op])
    return users[0] if summed else None


def _shape(g: Graph, n: Node, target: Target) -> Shape | None:
    w = n["w"].type
    found = {"rows": target.rows, "n": size(w, 0), "k": size(w, 1)}
    return found if is_skinny(n, target) else None


def _summed(g: Graph, n: Node, target: Target) -> Shape | None:
    return _shape(g, n, target) if _sum(g, n) else None


def _linear(run: Run, n: Node, choice: Choice, x: Any, w: Any) -> Any:
    from .linear_triton import skinny_linear

    return skinny_linear(x, w, **choice.use)


def _parts(run: Run, n: Node, choice: Choice, x: Any, w: Any) -> Any:
    """Return a stack of partial sums, which the norm behind it adds up."""
    from .linear_triton import skinny_linear_parts

    return skinny_linear_parts(x, w, **choice.use)


def _glu(run: Run, n: Node, choice: Choice, x: Any, w: Any, up: Any = None) -> Any:
    from .linear_triton import skinny_linear_glu

    return skinny_linear_glu(x, w, up, n.word("act"), **choice.use)


def _use(block_m: int, block_n: int, block_k: int = 32, **more: int) -> dict[str, int]:
    return {"block_m": block_m, "block_n": block_n, "block_k": block_k, "warps": 1, "stages": 2} | (
        more
    )


#: both inner loops, with few rows and with more than `block_m`
ONE, MANY, WIDE = _use(1, 4), _use(16, 16), _use(32, 16)
#: rows, n, k, settings: tiny, odd, not whole blocks, whole blocks
PRODUCTS = [
    (1, 1, 1, ONE),
    (1, 17, 100, ONE),
    (3, 5, 33, ONE),
    (1, 32, 96, MANY),
    (2, 3, 7, MANY),
    (3, 17, 100, MANY),
    (16, 5, 33, MANY),
    (19, 32, 96, MANY),
    (27, 17, 100, WIDE),
    (1, 40, 1536, _use(1, 8, 512, stages=4)),
    (5, 72, 1536, _use(16, 64, 128, stages=3)),
]
SUMMED = [(1, 21, 7, ONE, 3), (1, 21, 100, ONE, 4), (3, 21, 100, MANY, 3), (16, 21, 256, MANY, 1)]
GATED = [(1, 5, 33, ONE), (3, 32, 96, MANY), (16, 5, 33, MANY), (2, 37, 45, ONE)]


def _product(rows: int, n: int, k: int) -> tuple[str, ...]:
    return f"T[{rows},1,{k}]", f"*T[{n},{k}]"


KERNELS = (
    Kernel(
        op="linear",
        starts={"skinny_linear_parts": 1},
        rule=_summed,
        call=_parts,
        samples=tuple(
            Sample(_product(b, n, k), use={**use, "split": split}) for b, n, k, use, split in SUMMED
        ),
        error=5e-6,
        ending=_sum,
    ),
    Kernel(
        op="linear",
        starts={"skinny_linear": 1},
        rule=_shape,
        call=_linear,
        samples=tuple(Sample(_product(b, n, k), use=use) for b, n, k, use in PRODUCTS),
        error=5e-6,
    ),
    Kernel(
        op="linear_glu",
        starts={"skinny_linear_glu": 1},
        rule=_shape,
        call=_glu,
        samples=tuple(
            Sample(
                (*_product(b, n * (1 + packed), k), *[f"T[{b},1,{n}]"] * (not packed)),
                {"act": act},
                use,
            )
            for (b, n, k, use), act in zip(GATED, ACTIVATIONS, strict=True)
            for packed in (True, False)
        ),
        error=1e-5,
        differ=0.02,
    ),
)
