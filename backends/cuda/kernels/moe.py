"""MoE block: router, experts (tokens grouped by expert) and the dense MLP next to them."""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any

from g4ir.backends.inductor.target import Target
from g4ir.ir.graph import Graph, Node

from .base import (
    Choice,
    Kernel,
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

#: names of the weights of an MoE block. The order matters: the launch shape has one group size for
#: each format, that of the last weight here in this format
WEIGHTS = ("w_dense", "w_dense_down", "down", "gate_up")
#: number of inputs of an MoE block whose experts are not sharded over ranks
ALL_EXPERTS = 10


def _shape(g: Graph, n: Node, target: Target) -> Shape | None:
    if not is_skinny(n, target) or len(n.inputs) > ALL_EXPERTS:  # torch runs sharded experts
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
    """Return launch settings from (block_n, block_k, stages): `one` for one row, else `many`."""
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


def _experts(n: Node, choice: Choice, *operands: Any) -> tuple[Any, Any]:
    """Return the outputs (dense MLP, experts). Both run in the same grids; the experts' weighted
    outputs are summed in top-k order."""
    from .moe_triton import moe_down, moe_gate_up, moe_route

    x_dense, x_moe, x, scale, proj, per_expert, w_dense, w_dense_down, gate_up, down = operands
    router, top_k, use = (x, scale, proj, per_expert, zeros_of(x)), n.integer("top_k"), choice.uses
    weights, *order = moe_route(*router, top_k, n.number("root"), **use["moe_route"])
    ups = (*codes_and_scales(w_dense), *codes_and_scales(gate_up))
    downs = (*codes_and_scales(w_dense_down), *codes_and_scales(down))
    act = moe_gate_up(x_dense, x_moe, *order, *ups, n.word("act"), **use["moe_gate_up"])
    dense, parts = moe_down(act, *order, *downs, **use["moe_down"])
    slots = (weights[..., None] * parts.float()).unbind(-2)
    return dense, reduce(operator.add, slots).to(x.dtype)


KERNELS = (
    Kernel(
        op="moe_mlp",
        starts={"moe_route": 1, "moe_gate_up": 1, "moe_down": 1},
        rule=_shape,
        call=_experts,
        uses={
            "moe_route": {"block_n": 2, "block_k": 4096, "warps": 4},
            "moe_gate_up": _gate_up,
            "moe_down": _down,
        },
        coded=True,
    ),
)
