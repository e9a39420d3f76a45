"""The experts of a layer beside its dense MLP: row by row, or sorted by expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from g4ir.ir.graph import Graph, Node
from g4ir.ops.mlp import ACTIVATIONS

from ..target import Target
from .base import Choice, Kernel, Sample, Shape, Use, is_skinny, size

if TYPE_CHECKING:
    from ..run import Run

#: most rows whose experts are read row by row; more are sorted by expert first
UNSORTED = 3


def _shape(n: Node, target: Target) -> Shape:
    x, dense, gate_up = n["x_moe"].type, n["w_dense"].type, n["gate_up"].type
    return {
        "rows": target.rows,
        "d": size(x, -1),
        "experts": size(gate_up, 0),
        "inner": size(gate_up, 1) // 2,
        "dense": size(dense, 0) // 2,
    }


def _few(g: Graph, n: Node, target: Target) -> Shape | None:
    return _shape(n, target) if is_skinny(n, target) and target.rows <= UNSORTED else None


def _many(g: Graph, n: Node, target: Target) -> Shape | None:
    return _shape(n, target) if is_skinny(n, target) and target.rows > UNSORTED else None


def _by_row(run: Run, n: Node, choice: Choice, *given: Any) -> Any:
    """Return (dense, experts): the dense MLP in the grids of the experts."""
    from .moe_triton import moe_down, moe_gate_up

    x_dense, x, per_expert, w_dense, w_dense_down, gate_up, down = *given[:2], *given[5:]
    act, top_k, use = n.word("act"), n.whole("top_k"), choice.uses
    scores = _scores(n, choice, given)
    inner = moe_gate_up(x_dense, x, scores, w_dense, gate_up, top_k, act, **use["moe_gate_up"])
    return moe_down(inner, scores, per_expert, w_dense_down, down, top_k, **use["moe_down"])


def _sorted(run: Run, n: Node, choice: Choice, *given: Any) -> Any:
    """Return the results of `_by_row`, with each expert in use read once for all rows."""
    from .moe_triton import moe_down_sorted, moe_gate_up_sorted, moe_sort

    x_dense, x, per_expert, w_dense, w_dense_down, gate_up, down = *given[:2], *given[5:]
    act, top_k, use = n.word("act"), n.whole("top_k"), choice.uses
    weights, *chosen = moe_sort(_scores(n, choice, given), per_expert, top_k, **use["moe_sort"])
    inner = moe_gate_up_sorted(
        x_dense, x, *chosen, w_dense, gate_up, act, **use["moe_gate_up_sorted"]
    )
    return moe_down_sorted(inner, weights, *chosen, w_dense_down, down, **use["moe_down_sorted"])


def _scores(n: Node, choice: Choice, given: tuple[Any, ...]) -> Any:
    from .moe_triton import router_logits

    return router_logits(*given[2:5], n.number("root"), **choice.uses["router_logits"])


def _sample(
    use: Mapping[str, Use],
    rows: int,
    d: int,
    inner: int,
    dense: int,
    experts: int,
    top_k: int,
    act: str,
) -> Sample:
    x, w = f"T[{rows},1,{d}]", f"*T[{d}]"
    mlp = (f"*T[{2 * dense},{d}]", f"*T[{d},{dense}]")
    packed = (f"*T[{experts},{2 * inner},{d}]", f"*T[{experts},{d},{inner}]")
    return Sample(
        (x, x, x, w, f"*T[{experts},{d}]", f"*T[{experts}]", *mlp, *packed),
        {"top_k": top_k, "root": d**-0.5, "act": act},
        use,
        packed=True,
    )


#: rows, d, inner, dense, experts, top_k: few are multiples of a block
SIZES = [(1, 37, 11, 29, 6, 2), (2, 32, 16, 48, 8, 4), (3, 37, 11, 29, 6, 6), (5, 37, 16, 29, 5, 1)]
SORTED = [
    *SIZES,
    (5, 38, 11, 29, 9, 3),
    (16, 37, 8, 16, 6, 1),
    (17, 20, 11, 29, 12, 2),
    (3, 18, 8, 16, 128, 8),
]
ACTS = (*ACTIVATIONS, *ACTIVATIONS)
SCORES = {"router_logits": {"block_n": 4, "block_k": 32, "warps": 4, "stages": 1}}
ROW = {"block_n": 8, "block_k": 16, "warps": 4, "stages": 2}
ROWS = SCORES | {"moe_gate_up": ROW, "moe_down": ROW}
#: as the table of tunings has it, up to 16 rows and for more
TILE = {"block_m": 16, "block_n": 16, "block_k": 32, "warps": 4, "stages": 2}
SORT = SCORES | {"moe_sort": {"warps": 4}}
TILES = SORT | {"moe_gate_up_sorted": TILE, "moe_down_sorted": TILE}
LARGE = {name: {**use, "block_m": 32} if use is TILE else use for name, use in TILES.items()}


KERNELS = (
    Kernel(
        op="moe_mlp",
        starts={"router_logits": 1, "moe_gate_up": 1, "moe_down": 1},
        rule=_few,
        call=_by_row,
        samples=tuple(_sample(ROWS, *sizes, act) for sizes, act in zip(SIZES, ACTS)),
        error=1e-5,
        differ=0.05,
    ),
    Kernel(
        op="moe_mlp",
        starts={"router_logits": 1, "moe_sort": 1, "moe_gate_up_sorted": 1, "moe_down_sorted": 2},
        rule=_many,
        call=_sorted,
        samples=tuple(
            _sample(LARGE if sizes[0] > 16 else TILES, *sizes, act)
            for sizes, act in zip(SORTED, ACTS)
        ),
        error=1e-5,
        differ=0.05,
    ),
)
