"""MoE block: router, experts (grouped by expert) and the dense MLP next to them."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import reduce
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
    codes_and_scales,
    fit_blocks,
    is_quantised,
    is_skinny,
    row_tile,
    size,
    weight_codes,
    zeros_of,
)

#: weights; `g4ir kernels` prints the format of the last one
WEIGHTS = ("w_dense", "w_dense_down", "down", "gate_up")
#: inputs of an unsharded MoE block
ALL_EXPERTS = 10


def _shape(g: Graph, n: Node, target: Target) -> Shape | None:
    if not is_skinny(n, target) or len(n.inputs) > ALL_EXPERTS:  # sharded experts use the library
        return None
    x, dense, gate_up = n.outputs[0].type, n["w_dense"].type, n["gate_up"].type
    return {
        "rows": target.rows,
        "d": size(x, -1),
        "experts": size(gate_up, 0),
        "inner": size(gate_up, 1) // 2,
        "dense": size(dense, 0) // 2,
        **weight_codes(g, *(n[w] for w in WEIGHTS)),
    }


def _tile(shape: Shape, pairs: int, one: tuple[int, ...], many: tuple[int, ...]) -> Use:
    """Return launch settings from (block_n, block_k, stages) for one row, or for more."""
    rows = 1 if shape["rows"] == 1 else row_tile(shape)
    block_n, block_k, stages = one if rows == 1 else many
    tile = fit_blocks(shape, block_n, block_k, pairs)
    return {"block_m": rows, **tile, "warps": 4, "stages": stages}


def _gate_up(shape: Shape) -> Use:
    one = (4, 1024, 3) if "int4" in shape else (4, 512 if is_quantised(shape) else 256, 4)
    return _tile(shape, 2, one, (32, 128, 4))


def _down(shape: Shape) -> Use:
    one = (16, 256, 3) if is_quantised(shape) else (32, 128, 4)
    return _tile(shape, 1, one, (64, 64, 4))


def _experts(run: Run, n: Node, choice: Choice, *operands: Any) -> tuple[Any, Any]:
    """Return (dense, experts). The dense MLP runs in the same grids as the experts, whose outputs
    are summed in the order of rank."""
    from .moe_triton import moe_down, moe_gate_up, moe_route

    x_dense, x_moe, x, scale, proj, per_expert, w_dense, w_dense_down, gate_up, down = operands
    router, top_k, use = (x, scale, proj, per_expert, zeros_of(x)), n.whole("top_k"), choice.uses
    weights, *order = moe_route(*router, top_k, n.number("root"), **use["moe_route"])
    ups, downs = (
        (*codes_and_scales(w_dense), *codes_and_scales(gate_up)),
        (*codes_and_scales(w_dense_down), *codes_and_scales(down)),
    )
    act = moe_gate_up(x_dense, x_moe, *order, *ups, n.word("act"), **use["moe_gate_up"])
    dense, parts = moe_down(act, *order, *downs, **use["moe_down"])
    slots = (weights[..., None] * parts.float()).unbind(-2)
    return dense, reduce(operator.add, slots).to(x.dtype)


def _sample(use: Mapping[str, Use], sizes: tuple[Any, ...], act: str = "silu") -> Sample:
    """Return a block."""
    rows, d, inner, dense, experts, top_k, *formats = sizes
    dense_format, expert_format = formats or (None, None)
    x, w = f"T[{rows},1,{d}]", f"*T[{d}]"
    mlp = (f"*T[{2 * dense},{d}]", f"*T[{d},{dense}]")
    packed = (f"*T[{experts},{2 * inner},{d}]", f"*T[{experts},{d},{inner}]")
    return Sample(
        (x, x, x, w, f"*T[{experts},{d}]", f"*T[{experts}]", *mlp, *packed),
        {"top_k": top_k, "root": d**-0.5, "act": act},
        use,
        packed=True,
        coded={
            i: f
            for i, f in zip(
                (6, 7, 8, 9), (dense_format, dense_format, expert_format, expert_format)
            )
            if f
        },
    )


#: rows, d, inner, dense, experts, top_k: mostly no multiples of a block
SIZES: list[tuple[Any, ...]] = [
    (1, 37, 11, 29, 6, 2),
    (2, 32, 16, 48, 8, 4),
    (3, 37, 11, 29, 6, 6),
    (5, 37, 16, 29, 5, 1),
    (5, 38, 11, 29, 9, 3),
    (16, 37, 8, 16, 6, 1),
    (17, 20, 11, 29, 12, 2),
    (3, 18, 8, 16, 128, 8),
    (33, 20, 11, 29, 12, 2),
    (1, 18, 8, 16, 128, 8),
]
#: the same, quantised: rows, d, inner, dense, experts, top_k, formats of the dense MLP and the
#: experts
INT8, INT4, FP8 = ("int8", 0), ("int4", 32), ("fp8", 0)
CODED: list[tuple[Any, ...]] = [
    (1, 64, 32, 32, 6, 2, INT8, INT4),
    (2, 40, 16, 24, 5, 3, FP8, INT8),
    (64, 40, 24, 32, 4, 2, FP8, INT8),
]


def _use(rows: int) -> dict[str, Use]:
    """Return launch settings for a test case."""
    block_m = row_tile({"rows": rows}) if rows > 1 else 1
    tile = {"block_m": block_m, "block_n": 16 if rows > 1 else 8, "block_k": 32, "stages": 2}
    return {
        "moe_route": {"block_n": 4, "block_k": 32, "warps": 4},
        "moe_gate_up": {**tile, "warps": 4},
        "moe_down": {**tile, "warps": 4},
    }


KERNELS = (
    Kernel(
        op="moe_mlp",
        starts={"moe_route": 1, "moe_gate_up": 1, "moe_down": 1},
        rule=_shape,
        call=_experts,
        samples=(
            *(_sample(_use(sizes[0]), sizes, ACTIVATIONS[i % 4]) for i, sizes in enumerate(SIZES)),
            *(_sample(_use(sizes[0]), sizes) for sizes in CODED),
        ),
        error=1e-5,
        differ=0.05,
        uses={
            "moe_route": {"block_n": 2, "block_k": 4096, "warps": 4},
            "moe_gate_up": _gate_up,
            "moe_down": _down,
        },
        coded=True,
    ),
)
