"""MoE block: router, experts (grouped by expert) and the dense MLP next to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from g4ir.backends.cuda.kernels.base import Use, row_tile
from g4ir.ops.mlp import ACTIVATIONS

from .base import Budget, Sample


def moe_sample(
    use: Mapping[str, Use],
    sizes: tuple[int, ...],
    act: str = "silu",
    forms: Iterable[tuple[str, int]] = (),
) -> Sample:
    """Return a block; `forms` of its weights: gate_up and down of the dense MLP and the experts."""
    rows, d, inner, dense, experts, top_k = sizes
    x, w = f"T[{rows},1,{d}]", f"*T[{d}]"
    mlp = (f"*T[{2 * dense},{d}]", f"*T[{d},{dense}]")
    packed = (f"*T[{experts},{2 * inner},{d}]", f"*T[{experts},{d},{inner}]")
    return Sample(
        (x, x, x, w, f"*T[{experts},{d}]", f"*T[{experts}]", *mlp, *packed),
        {"top_k": top_k, "root": d**-0.5, "act": act},
        use,
        packed=True,
        coded=dict(zip((6, 7, 8, 9), forms)),
    )


#: rows, d, inner, dense, experts, top_k: mostly no multiples of a block
SIZES = [
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
#: the same, quantised: and formats of the dense MLP and the experts
INT8, INT4, FP8 = ("int8", 0), ("int4", 32), ("fp8", 0)
CODED = [
    ((1, 64, 32, 32, 6, 2), INT8, INT4),
    ((2, 40, 16, 24, 5, 3), FP8, INT8),
    ((64, 40, 24, 32, 4, 2), FP8, INT8),
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


BUDGETS = {
    "moe_route": Budget(
        samples=(
            *(moe_sample(_use(s[0]), s, ACTIVATIONS[i % 4]) for i, s in enumerate(SIZES)),
            *(
                moe_sample(_use(s[0]), s, forms=(dense, dense, experts, experts))
                for s, dense, experts in CODED
            ),
        ),
        error=1e-5,
        differ=0.05,
    ),
}
