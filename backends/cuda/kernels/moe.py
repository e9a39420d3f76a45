"""The experts of a layer beside its dense MLP: row by row, or sorted by expert."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from g4ir.backends.inductor.lowered import Run
from g4ir.backends.inductor.target import Target
from g4ir.ir.graph import Graph, Node
from g4ir.ops.mlp import ACTIVATIONS

from .base import (
    Choice,
    Kernel,
    Sample,
    Shape,
    Use,
    codes_of,
    held,
    is_quantised,
    is_skinny,
    row_tile,
    size,
)

#: most rows whose experts are read row by row; more are sorted by expert first
UNSORTED = 3


def _shape(g: Graph, n: Node, target: Target) -> Shape:
    x, dense, gate_up = n.outputs[0].type, n["w_dense"].type, n["gate_up"].type
    return {
        "rows": target.rows,
        "d": size(x, -1),
        "experts": size(gate_up, 0),
        "inner": size(gate_up, 1) // 2,
        "dense": size(dense, 0) // 2,
        **codes_of(g, n["gate_up"]),
    }


def _few(g: Graph, n: Node, target: Target) -> Shape | None:
    return _shape(g, n, target) if is_skinny(n, target) and target.rows <= UNSORTED else None


def _many(g: Graph, n: Node, target: Target) -> Shape | None:
    return _shape(g, n, target) if is_skinny(n, target) and target.rows > UNSORTED else None


def _gate_up(shape: Shape) -> Use:
    coded = is_quantised(shape)
    block_n, block_k, stages = (8, 1024, 3) if "int4" in shape else (4, 512 if coded else 256, 4)
    return {"block_n": block_n, "block_k": block_k, "warps": 4, "stages": stages}


def _down(shape: Shape) -> Use:
    coded = is_quantised(shape)
    block_n, block_k, stages = (2, 256, 3 if "int4" in shape else 4) if coded else (4, 128, 4)
    tile = {"block_n": block_n, "block_k": block_k, "warps": 4, "stages": stages}
    return {"programs": 396, **tile}


def _gate_up_sorted(shape: Shape) -> Use:
    return {"block_m": row_tile(shape), "block_n": 32, "block_k": 128, "warps": 4, "stages": 4}


def _down_sorted(shape: Shape) -> Use:
    return {"block_m": row_tile(shape), "block_n": 64, "block_k": 64, "warps": 4, "stages": 4}


ESTIMATES: Mapping[str, Use | Callable[[Shape], Use]] = {
    "router_logits": {"block_n": 2, "block_k": 4096, "warps": 4, "stages": 1},
    "moe_gate_up": _gate_up,
    "moe_down": _down,
    "moe_sort": {"warps": 8},
    "moe_gate_up_sorted": _gate_up_sorted,
    "moe_down_sorted": _down_sorted,
}


def _by_row(run: Run, n: Node, choice: Choice, *given: Any) -> Any:
    """Return (dense, experts): the dense MLP in the grids of the experts."""
    return _experts(n, choice, given[:2], _scores(n, choice, given), given[5:])


def _experts(n: Node, choice: Choice, rows: Any, scores: Any, given: tuple[Any, ...]) -> Any:
    """Start gate and up, then down; rows: of the dense MLP and of the experts."""
    from .moe_triton import moe_down, moe_gate_up

    (x_dense, x), (per_expert, w_dense, w_dense_down, gate_up, down, *first) = rows, given
    act, top_k, use = n.word("act"), n.whole("top_k"), choice.uses
    part = {"first": next(iter(first), None)}
    ups, ups_scales = _held(w_dense, gate_up)
    downs, downs_scales = _held(w_dense_down, down)
    ups_scales, downs_scales = ups_scales | part, downs_scales | part
    given = (x_dense, x, scores, None, *ups, top_k, act)
    inner = moe_gate_up(*given, **use["moe_gate_up"], **ups_scales)
    given = (inner, scores, per_expert, None, *downs, top_k)
    return moe_down(*given, **use["moe_down"], **downs_scales)


def _sorted(run: Run, n: Node, choice: Choice, *operands: Any) -> Any:
    """Return the results of `_by_row`, with each expert in use read once for all rows."""
    from .moe_order_triton import moe_sort
    from .moe_triton import moe_down, moe_gate_up

    x_dense, x, per_expert, w_dense, w_dense_down, gate_up, down = *operands[:2], *operands[5:10]
    act, top_k, use = n.word("act"), n.whole("top_k"), choice.uses
    part = (*operands[10:], size(n["gate_up"].type, 0)) if operands[10:] else ()
    scores, warps = _scores(n, choice, operands), use["moe_sort"]["warps"]
    weights, *chosen = moe_sort(scores, per_expert, top_k, warps, *part)
    ups, ups_scales = _held(w_dense, gate_up)
    downs, downs_scales = _held(w_dense_down, down)
    given = (x_dense, x, *chosen, *ups, top_k, act)
    inner = moe_gate_up(*given, **use["moe_gate_up_sorted"], **ups_scales)
    index, listed = chosen
    given = (inner, index, weights, listed, *downs, top_k)
    return moe_down(*given, **use["moe_down_sorted"], **downs_scales)


def _held(w_dense: Any, w: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return both weights or their codes, and the scales by their operands' names."""
    pairs = held(w_dense), held(w)
    scales = {"dense_scales": pairs[0][1], "scales": pairs[1][1]}
    return (pairs[0][0], pairs[1][0]), scales


def _scores(n: Node, choice: Choice, given: tuple[Any, ...]) -> Any:
    from .moe_order_triton import router_logits

    return router_logits(*given[2:5], n.number("root"), **choice.uses["router_logits"])


def _sample(
    use: Mapping[str, Use], sizes: tuple[Any, ...], act: str = "silu", held: int = 0
) -> Sample:
    """Return a block; with `held`, of as many experts, those in the middle."""
    rows, d, inner, dense, experts, top_k, *forms = sizes
    dense_form, form = forms or (None, None)
    x, w = f"T[{rows},1,{d}]", f"*T[{d}]"
    mlp = (f"*T[{2 * dense},{d}]", f"*T[{d},{dense}]")
    own, first = held or experts, (experts - held) // 2
    packed = (f"*T[{own},{2 * inner},{d}]", f"*T[{own},{d},{inner}]", *["i64[1]"] * bool(held))
    return Sample(
        (x, x, x, w, f"*T[{experts},{d}]", f"*T[{experts}]", *mlp, *packed),
        {"top_k": top_k, "root": d**-0.5, "act": act},
        use,
        {10: [first]} if held else {},
        packed=True,
        coded={i: f for i, f in zip((6, 7, 8, 9), (dense_form, dense_form, form, form)) if f},
    )


#: rows, d, inner, dense, experts, top_k: few are multiples of a block
SIZES = [(1, 37, 11, 29, 6, 2), (2, 32, 16, 48, 8, 4), (3, 37, 11, 29, 6, 6), (5, 37, 16, 29, 5, 1)]
SORTED: list[tuple[Any, ...]] = [
    *SIZES,
    (5, 38, 11, 29, 9, 3),
    (16, 37, 8, 16, 6, 1),
    (17, 20, 11, 29, 12, 2),
    (3, 18, 8, 16, 128, 8),
]
#: the same, quantised: rows, d, inner, dense, experts, top_k, the dense MLP's form, the experts'
INT8, INT4, FP8 = ("int8", 0), ("int4", 32), ("fp8", 0)
CODED = [
    (1, 64, 32, 32, 6, 2, INT8, INT4),
    (2, 40, 16, 24, 5, 3, FP8, INT8),
    (1, 40, 24, 32, 4, 2, None, FP8),
]
CODED_SORTED: list[tuple[Any, ...]] = [
    (4, 64, 32, 32, 6, 2, INT8, INT4),
    (16, 40, 16, 24, 5, 1, FP8, INT8),
    (17, 40, 24, 32, 4, 2, None, FP8),
]
#: parts of the experts: sizes, and how many there are
PARTS = [((2, 32, 16, 48, 8, 4), 4), ((3, 37, 11, 29, 6, 2), 2), ((1, 37, 11, 29, 6, 1), 1)]
PARTS_SORTED = [((5, 38, 11, 29, 9, 3), 3), ((17, 20, 11, 29, 12, 2), 6), ((4, 37, 8, 16, 6, 1), 1)]
ACTS = (*ACTIVATIONS, *ACTIVATIONS)
SCORES = {"router_logits": {"block_n": 4, "block_k": 32, "warps": 4, "stages": 1}}
ROW = {"block_n": 8, "block_k": 16, "warps": 4, "stages": 2}
ROWS = SCORES | {"moe_gate_up": ROW, "moe_down": {"programs": 3, **ROW}}
#: up to 16 rows, and for more and many more
TILE = {"block_m": 16, "block_n": 16, "block_k": 32, "warps": 4, "stages": 2}
SORT = SCORES | {"moe_sort": {"warps": 4}}
TILES = SORT | {"moe_gate_up_sorted": TILE, "moe_down_sorted": TILE}
LARGE, LARGEST = (
    {name: {**use, "block_m": rows} if use is TILE else use for name, use in TILES.items()}
    for rows in (32, 64)
)


KERNELS = (
    Kernel(
        op="moe_mlp",
        starts={"router_logits": 1, "moe_gate_up": 1, "moe_down": 1},
        rule=_few,
        call=_by_row,
        samples=tuple(_sample(ROWS, sizes, act) for sizes, act in zip(SIZES, ACTS))
        + tuple(_sample(ROWS, sizes) for sizes in CODED)
        + tuple(_sample(ROWS, sizes, held=held) for sizes, held in (*PARTS, (CODED[0], 3))),
        error=1e-5,
        differ=0.05,
        uses=ESTIMATES,
        coded=True,
    ),
    Kernel(
        op="moe_mlp",
        starts={"router_logits": 1, "moe_sort": 1, "moe_gate_up_sorted": 1, "moe_down_sorted": 2},
        rule=_many,
        call=_sorted,
        samples=tuple(
            _sample(LARGE if sizes[0] > 16 else TILES, sizes, act)
            for sizes, act in (*zip(SORTED, ACTS), *((sizes, "silu") for sizes in CODED_SORTED))
        )
        + tuple(_sample(LARGE, sizes, held=held) for sizes, held in PARTS_SORTED)
        + (_sample(LARGEST, (33, 20, 11, 29, 12, 2), "gelu"),)
        + (_sample(LARGEST, (64, 40, 24, 32, 4, 2, FP8, INT8)),)
        + (_sample(TILES, CODED_SORTED[0], held=3),),
        error=1e-5,
        differ=0.05,
        uses=ESTIMATES,
        coded=True,
    ),
)
